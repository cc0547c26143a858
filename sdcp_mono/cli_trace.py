"""``sdcp-mono trace ls|show``: sessions and rounds from trace files, without a collector."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console

from sdcp_mono.settings import TraceSettings
from sdcp_mono.telemetry import trace_files, waterfall

LOOK_SECONDS: Final = 0.5  # between two looks at files that are followed: as often as they are written
FOLLOWED: Final = 256  # sessions that are remembered while following: more than run at once

traces = typer.Typer(help="Look at sessions and rounds in trace files.", no_args_is_help=True)
out = Console()
err = Console(stderr=True)

PathsArgument = Annotated[
    list[Path] | None,
    typer.Argument(help="Trace files, or folders with one a process; none: traces/ in the data folder."),
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Where models and logs live.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
SessionOption = Annotated[str, typer.Option(help="Its id, or how that begins; none: the newest.")]
SlowOption = Annotated[bool, typer.Option("--slow", help="Only rounds above SDCP_TRACE_SLOW_MS, slowest first.")]


@traces.command("ls")
def ls(
    paths: PathsArgument = None,
    session: Annotated[str, typer.Option(help="Only ids that begin so.")] = "",
    slow: Annotated[bool, typer.Option("--slow", help="Only sessions with a slow round.")] = False,
    limit: Annotated[int, typer.Option(help="Lines of the table; --json has all.")] = 40,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """The sessions in the traces, newest first: tokens, rounds, acceptance, and what went wrong."""
    settings = _settings(data)
    found = _read(paths, settings)
    sessions = [known for known in found.newest_first() if known.id.startswith(session.lower())]
    if slow:
        sessions = [known for known in sessions if _rounds(known, None, True, settings)]
    if as_json:
        told = [waterfall.summary(known) for known in sessions]
        out.print_json(json.dumps({"sessions": told, "dropped": sum(found.dropped.values())}))
    else:
        waterfall.show_sessions(out, found, sessions[:limit])
        if len(sessions) > limit:
            out.print(f"... and {len(sessions) - limit:,} more (--limit)")


@traces.command("show")
def show(
    paths: PathsArgument = None,
    session: SessionOption = "",
    round_: Annotated[int | None, typer.Option("--round", help="This round in full.")] = None,
    slow: SlowOption = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Rounds of all sessions as they come.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """One session as a waterfall, one line a round; with --round, every span of that round and what it says."""
    settings = _settings(data)
    if follow:
        _follow(paths, session, slow, settings, as_json)
        return
    found = _read(paths, settings)
    try:
        chosen = found.session(session)
        rounds = _rounds(chosen, round_, slow, settings)
        if round_ is not None and not rounds:
            raise ValueError(f"round {round_}: not in the traces of session {chosen.id}; it has {len(chosen.rounds)}")
    except ValueError as error:
        _fail(error)
    if as_json:
        picked = [span for one in rounds for span in (one.span, *one.children)]
        spans = picked if slow or round_ is not None else chosen.spans
        out.print_json(json.dumps(waterfall.as_json(chosen, spans) | {"dropped": sum(found.dropped.values())}))
        return
    if round_ is None:
        waterfall.show_session(out, chosen, rounds)
    for one in rounds if round_ is not None else ():
        waterfall.show_round(out, chosen, one)
    waterfall.warn(out, found)


def _rounds(
    session: trace_files.Session, number: int | None, slow: bool, settings: TraceSettings
) -> list[trace_files.Round]:
    rounds = [one for one in session.rounds if number in (None, one.number)]
    if slow:
        rounds = [one for one in rounds if one.span.seconds * 1000 >= settings.trace_slow_ms]
        rounds.sort(key=lambda one: -one.span.seconds)
    return rounds


def _follow(paths: Sequence[Path] | None, prefix: str, slow: bool, settings: TraceSettings, as_json: bool) -> None:
    """Until it is interrupted."""
    follower = trace_files.Follower(_where(paths, settings))
    found, shown = trace_files.Found(), set[bytes]()
    try:
        while True:
            lines = list(follower.look())
            time.sleep(LOOK_SECONDS)  # the other processes' part of the same rounds is there by then
            told = [session for line in (*lines, *follower.look()) for session in found.add(line)]
            for session in {id(one): one for one in told if one.id.startswith(prefix.lower())}.values():
                _show_new(session, shown, slow, settings, as_json)
            found.forget(FOLLOWED)
            out.file.flush()  # into a pipe as well
    except ValueError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        follower.close()


def _show_new(
    session: trace_files.Session, shown: set[bytes], slow: bool, settings: TraceSettings, as_json: bool
) -> None:
    rounds = _rounds(session, None, slow, settings)
    longest = max((one.span.seconds for one in rounds), default=0.0)
    for one in rounds:
        if one.span.span_id in shown:
            continue
        shown.add(one.span.span_id)
        if as_json:
            out.print(json.dumps(waterfall.span_json(one.span)), soft_wrap=True, highlight=False, markup=False)
        else:
            out.print(f"{session.id[:12]} ", end="")
            waterfall.show_line(out, session, one, longest)


def _settings(data: Path | None) -> TraceSettings:
    given: dict[str, Any] = {} if data is None else {"data_dir": data}
    return TraceSettings(**given)


def _where(paths: Sequence[Path] | None, settings: TraceSettings) -> list[Path]:
    return list(paths or [settings.data_dir / "traces"])


def _read(paths: Sequence[Path] | None, settings: TraceSettings) -> trace_files.Found:
    try:
        return trace_files.read(_where(paths, settings))
    except (ValueError, OSError) as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    err.print(f"[red]error[/] {error}")
    raise typer.Exit(1) from None
