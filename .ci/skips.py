"""Fail if a test was skipped for a reason that is not on the list: ``skips.py JUNIT_XML ALLOWED``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree


def unexpected(report: Path, allowed: Path) -> list[str]:
    """One line for each skipped test whose reason matches no pattern."""
    lines = [line.strip() for line in allowed.read_text().splitlines()]
    patterns = [re.compile(line) for line in lines if line and not line.startswith("#")]
    skips = [
        (f"{case.get('classname')}.{case.get('name')}", skip.get("message") or "")
        for case in ElementTree.parse(report).iter("testcase")
        for skip in case.iter("skipped")
        if skip.get("type") == "pytest.skip"
    ]
    return [f"{test}: {reason}" for test, reason in skips if not any(pattern.search(reason) for pattern in patterns)]


if __name__ == "__main__":
    found = unexpected(Path(sys.argv[1]), Path(sys.argv[2]))
    if found:
        sys.exit("ci: skipped for a reason that .ci/allowed-skips.txt does not list:\n  " + "\n  ".join(found))
