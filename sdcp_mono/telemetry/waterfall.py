"""Sessions and rounds from trace files, for a terminal: one line a round, and one round in full."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdcp_mono.telemetry.spans import Span
from sdcp_mono.telemetry.trace_files import Found, Round, Session

WIDTH: Final = 40  # characters of a bar: with the columns beside it a line fits 120
PHASES: Final = (("sdcp.draft", "▒", "cyan"), ("sdcp.verify", "█", "green"), ("sdcp.commit", "▓", "magenta"))
WAITING: Final = "·"
HIDDEN: Final = frozenset({"sdcp.session_id", "sdcp.role", "sdcp.round", "sdcp.epoch"})  # said elsewhere on the line


# ---- ls ----------------------------------------------------------------------------------------------


def summary(session: Session) -> dict[str, Any]:
    """One session in numbers."""
    rounds = [round_.span.attributes for round_ in session.rounds]
    drafted = sum(facts.get("sdcp.m", 0) for facts in rounds)
    root = {} if session.root is None else session.root.attributes
    return {
        "session": session.id,
        "trace": session.trace_id.hex(),
        "started": datetime.fromtimestamp(session.start_ns / 1e9).astimezone().isoformat(timespec="milliseconds"),
        "seconds": (session.end_ns - session.start_ns) / 1e9,
        "model": root.get("gen_ai.request.model", ""),
        "tokens": root.get("gen_ai.usage.output_tokens", sum(facts.get("sdcp.emitted", 0) for facts in rounds)),
        "rounds": len(rounds),
        "drafted": drafted,
        "accepted": sum(facts.get("sdcp.accepted", 0) for facts in rounds),
        "escalations": len(session.events("sdcp.escalation")),
        "rejections": len(session.events("sdcp.rejected")),
        "failovers": len(session.events("sdcp.failover")),
        "error": None if session.root is None else session.root.error,
    }


def show_sessions(out: Console, found: Found, sessions: Sequence[Session]) -> None:
    table = Table("session", "started", "s", "tokens", "rounds", "accepted", "notes", box=None)
    for column in table.columns[2:6]:
        column.justify = "right"
    for session in sessions:
        facts = summary(session)
        share = f"{facts['accepted'] / facts['drafted']:.0%}" if facts["drafted"] else "-"
        notes = [f"{facts[kind]} {kind}" for kind in ("escalations", "rejections", "failovers") if facts[kind]]
        if facts["error"] is not None:
            notes.insert(0, f"[red]{facts['error']}[/]")
        if session.root is None:
            notes.insert(0, "no root: unsampled, still running, or its router's file is elsewhere")
        table.add_row(
            facts["session"][:12], facts["started"][11:23], f"{facts['seconds']:.3f}", f"{facts['tokens']:,}",
            f"{facts['rounds']:,}", share, ", ".join(notes),
        )  # fmt: skip
    out.print(table)
    warn(out, found)


def warn(out: Console, found: Found) -> None:
    """What is missing from what was shown."""
    for (service, process), dropped in found.dropped.items():
        if dropped:
            out.print(f"[yellow]{service} {process} has dropped {dropped:,} spans[/]")
    if found.damaged:
        out.print(f"[yellow]{found.damaged:,} lines could not be read[/]")


# ---- show --------------------------------------------------------------------------------------------


def show_session(out: Console, session: Session, rounds: Sequence[Round]) -> None:
    facts = summary(session)
    share = f", accepted {facts['accepted'] / facts['drafted']:.0%} of {facts['drafted']}" if facts["drafted"] else ""
    out.print(
        f"[bold]session {session.id}[/] {facts['model']}  {facts['tokens']} tokens in {_time(facts['seconds'])}, "
        f"{facts['rounds']} rounds{share}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if session.root is not None:
        for event in session.root.events:
            out.print(_event(event, session.start_ns))
    if rounds:
        legend = Text("bars: ")
        for name, block, style in PHASES:
            legend.append(f"{block} {name.removeprefix('sdcp.')}  ", style)
        out.print(legend.append(f"{WAITING} waiting"))
    longest = max((round_.span.seconds for round_ in rounds), default=0.0)
    for round_ in rounds:
        show_line(out, session, round_, longest)


def show_line(out: Console, session: Session, round_: Round, longest: float) -> None:
    """A round in one line; its events below it. The bar is as long as the round is, beside the longest."""
    span, facts = round_.span, round_.span.attributes
    line = Text()
    line.append(f"{_time((span.start_ns - session.start_ns) / 1e9):>9} ")
    line.append(f"{round_.number:>5} ", "bold")
    if "sdcp.emitted" in facts:
        kind = (
            f"{facts['sdcp.accepted']}/{facts['sdcp.m']} {facts.get('sdcp.drafter', '')}" if facts["sdcp.m"] else "self"
        )
        line.append(f"{kind:<16.16} +{facts['sdcp.emitted']:<3}")
    else:
        line.append(f"{'not committed':<21}", "red")
    line.append_text(_bar(round_, longest))
    line.append(f" {_time(span.seconds):>9}")
    out.print(line, soft_wrap=True)
    for event in span.events:
        out.print(_event(event, session.start_ns))


def _bar(round_: Round, longest: float) -> Text:
    span = round_.span
    scale = WIDTH / (longest * 1e9) if longest else 0.0
    cells = [(WAITING, "dim")] * max(1, round(scale * (span.end_ns - span.start_ns)))
    for name, block, style in PHASES:
        for child in round_.children:
            if child.name == name:
                first = min(len(cells) - 1, max(0, int(scale * (child.start_ns - span.start_ns))))
                last = max(first + 1, round(scale * (child.end_ns - span.start_ns)))
                cells[first:last] = [(block, style)] * (min(last, len(cells)) - first)
    return Text.assemble(*cells, " " * (WIDTH - len(cells)))


def show_round(out: Console, session: Session, round_: Round) -> None:
    """Every span of a round with its attributes, and where in the round it was."""
    first = min(span.start_ns for span in (round_.span, *round_.children))
    last = max(span.end_ns for span in (round_.span, *round_.children))
    out.print(f"[bold]session {session.id}, round {round_.number}, epoch {round_.epoch}[/]", highlight=False)
    for span in (round_.span, *round_.children):
        begins, ends = ((at - first) / max(1, last - first) for at in (span.start_ns, span.end_ns))
        before, length = int(begins * WIDTH), max(1, round((ends - begins) * WIDTH))
        before = min(before, WIDTH - 1)
        block, style = next(((block, style) for name, block, style in PHASES if name == span.name), ("─", "bold"))
        line = Text(f"{'' if span is round_.span else '  '}{span.name}".ljust(15))
        line.append(f"{span.attributes.get('sdcp.role', span.service):<10}", "dim")
        line.append(" " * before + block * min(length, WIDTH - before), style)
        line.append(" " * max(0, WIDTH - before - length) + f"{_time((span.start_ns - first) / 1e9):>9} ")
        line.append(f"+{_time(span.seconds)}")
        out.print(line, soft_wrap=True)
        told = [f"{_short(key)} {_fact(key, value)}" for key, value in span.attributes.items() if key not in HIDDEN]
        if span.error is not None:
            told.insert(0, f"failed: {span.error}")
        out.print(Text("    " + ", ".join(told), "dim"), soft_wrap=True)
        for event in span.events:
            out.print(_event(event, session.start_ns))


def _event(event: Any, start_ns: int) -> Text:
    told = ", ".join(f"{_short(key)} {value}" for key, value in event.attributes.items())
    style = "yellow" if event.name in ("sdcp.escalation", "sdcp.rejected", "sdcp.failover", "sdcp.fenced") else "dim"
    return Text(f"{_time((event.time_ns - start_ns) / 1e9):>9}     ◆ {_short(event.name)} {told}".rstrip(), style)


def _short(key: str) -> str:
    return key.removeprefix("sdcp.").replace(".", " ").replace("_", " ")


def _fact(key: str, value: Any) -> str:
    return _time(value) if key.endswith("_seconds") else str(value)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.1f} ms"


# ---- JSON --------------------------------------------------------------------------------------------


def as_json(session: Session, spans: Sequence[Span]) -> dict[str, Any]:
    """Spans by name, in order of time."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        by_name.setdefault(span.name, []).append(span_json(span))
    return {"session": session.id, "trace": session.trace_id.hex(), "spans": by_name}


def span_json(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "span": span.span_id.hex(),
        "parent": span.parent_id.hex(),
        "start_ns": span.start_ns,
        "seconds": span.seconds,
        "service": span.service,
        "attributes": span.attributes,
        "events": [{"time_ns": e.time_ns, "name": e.name, "attributes": e.attributes} for e in span.events],
        "error": span.error,
    }
