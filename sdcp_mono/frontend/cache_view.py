"""``sdcp-mono cache stat|ls|fsck``: the cache of a running server, or of a data folder that nobody serves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

ANSWER_SECONDS: Final = 30.0  # a check reads every log; statistics take milliseconds


def ask(url: str, *, check: bool = False) -> dict[str, Any] | None:
    """What the server at ``url`` says of its cache; None if none answers."""
    try:
        with urlopen(f"{url}/cache{'?check=1' if check else ''}", timeout=ANSWER_SECONDS) as answer:
            told = json.load(answer)
    except (URLError, OSError, ValueError):
        return None
    return told if isinstance(told, dict) and "tiers" in told else None


def show_report(out: Console, report: dict[str, Any]) -> None:
    """Tiers as a table; below it what came back from them, and the logs."""
    table = Table("tier", "used", "of", "", "objects", "hits", "rate", "evicted", "damaged", "state", box=None)
    for column in table.columns[1:9]:
        column.justify = "right"
    for tier in report["tiers"]:
        asked = tier["hits"] + tier["misses"]
        share = tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0.0
        table.add_row(
            tier["name"], decimal(tier["used_bytes"]), decimal(tier["capacity_bytes"]), f"{share:.0%}",
            f"{tier['objects']:,}", f"{tier['hits']:,}", f"{tier['hits'] / asked:.0%}" if asked else "-",
            f"{tier['evicted']:,}", f"{tier['corrupt']:,}",
            "good" if tier["healthy"] else f"[red]{tier['note']}[/]",
        )  # fmt: skip
    out.print(table)
    for name, facts in report.items():
        if isinstance(facts, dict):
            out.print(f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))


def show_objects(out: Console, entries: Sequence[dict[str, Any]], limit: int) -> None:
    table = Table("kind", "scope", "name", "bytes", "dtype", "shape", "state")
    for entry in entries[:limit]:
        table.add_row(
            entry["kind"], entry["scope"], entry["name"], f"{entry['size']:,}", entry["dtype"],
            "x".join(map(str, entry["shape"])), entry["state"],
        )  # fmt: skip
    out.print(table)
    if len(entries) > limit:
        out.print(f"... and {len(entries) - limit:,} more (--limit)")


def counted(entries: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many entries are in which state."""
    states: dict[str, int] = {}
    for entry in entries:
        states[entry["state"]] = states.get(entry["state"], 0) + 1
    return states
