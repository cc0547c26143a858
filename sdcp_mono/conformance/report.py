"""Findings as a table for people, as JSON for scripts and as JUnit XML for CI."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdcp_mono.conformance.kit import Finding, Level, Verdict

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.SKIP: "yellow"}


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if a MUST failed or nothing passed, else 0; failed decisions, SHOULDs and MAYs are only shown."""
    failed = any(f.verdict is Verdict.FAIL and f.check.level is Level.MUST for f in findings)
    return int(failed or not any(f.verdict is Verdict.PASS for f in findings))


def as_json(findings: Sequence[Finding]) -> str:
    checks = [
        {
            "id": f.check.id, "level": f.check.level, "section": f.check.section, "title": f.check.title,
            "verdict": f.verdict, "seen": f.seen,
        }
        for f in findings
    ]  # fmt: skip
    return json.dumps({"checks": checks, "summary": summary(findings)}, indent=2)


def summary(findings: Sequence[Finding]) -> dict[str, int]:
    counts = Counter(f.verdict for f in findings)
    return {verdict.value: counts[verdict] for verdict in Verdict} | {
        "must_failures": sum(f.verdict is Verdict.FAIL and f.check.level is Level.MUST for f in findings)
    }


def show(findings: Sequence[Finding], console: Console, title: str) -> None:
    table = Table(title=title, title_justify="left", expand=False)
    for column in ("requirement", "level", "verdict"):
        table.add_column(column, no_wrap=True)
    table.add_column("asked, and what was seen")
    for f in findings:
        verdict = Text(f.verdict, style=COLOURS[f.verdict])
        style = "dim" if f.verdict is Verdict.PASS else ""
        asked = Text(f"{f.check.title} ({f.check.section})\n").append(f.seen, style=style)
        table.add_row(f.check.id, f.check.level, verdict, asked)
    console.print(table)
    counts = summary(findings)
    console.print(
        f"{counts['pass']} passed, {counts['fail']} failed ({counts['must_failures']} MUST), {counts['skip']} skipped"
    )


def write_junit(findings: Sequence[Finding], file: Path, name: str, seconds: float) -> None:
    counts = summary(findings)
    suite = ElementTree.Element(
        "testsuite", name=name, tests=str(len(findings)), failures=str(counts["fail"]), skipped=str(counts["skip"]),
        time=f"{seconds:.3f}",
    )  # fmt: skip
    for f in findings:
        case = ElementTree.SubElement(suite, "testcase", classname=f"{name}.{f.check.level}", name=f.check.id)
        if f.verdict is not Verdict.PASS:
            kind = "failure" if f.verdict is Verdict.FAIL else "skipped"
            ElementTree.SubElement(case, kind, message=_printable(f.seen))
        ElementTree.SubElement(case, "system-out").text = _printable(f"{f.check.title}: {f.seen}")
    ElementTree.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    """A peer's words may hold characters that XML does not allow."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
