"""All benchmarks of this repository, one after the other, and the tables in ``docs/benchmarks.md``.

    python -m benchmarks.run [--quick]

Leave the machine alone meanwhile: two cores shared with anything else measure that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
START, END = "<!-- serving: start -->\n", "<!-- serving: end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition, short outputs, nothing written")
    options = parser.parse_args()
    if options.quick:
        subprocess.run([sys.executable, "-m", "benchmarks.serving", "--repeat", "1", "--tokens", "32"], check=True)
        return
    table = Path("serving.md")
    subprocess.run([sys.executable, "-m", "benchmarks.serving", "--markdown", str(table)], check=True)
    text = DOCUMENT.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    DOCUMENT.write_text(before + START + table.read_text() + END + after)
    table.unlink()
    print(f"written into {DOCUMENT}")


if __name__ == "__main__":
    main()
