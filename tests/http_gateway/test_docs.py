"""``docs/sdcp.md`` names files that exist, every section of the draft, and every test module of the gateway."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sdcp.md").read_text()
SECTIONS = ("4.1", "4.2", "5.1", "5.2", *(f"6.{i}" for i in range(1, 10)), "7", "8", "9", "10", "Appendix A")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_a_module_and_a_test(section: str) -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith(f"| {section}")]
    assert rows
    for row in rows:
        _, modules, tests = (cell for cell in row.strip("| ").split(" | "))
        assert "`sdcp_mono/" in modules
        assert "`tests/" in tests


def test_every_file_it_names_exists() -> None:
    named = re.findall(r"`((?:sdcp_mono|tests)/[^`]+)`", TEXT)
    assert [name for name in named if not (ROOT / name).is_file()] == []
