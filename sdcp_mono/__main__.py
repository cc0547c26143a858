"""``python -m sdcp_mono``."""

from sdcp_mono.cli import main

main()
