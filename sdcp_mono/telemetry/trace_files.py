"""Trace files read back: of one process or of many, while they are being written, and whatever is in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct, field

from sdcp_mono.telemetry.spans import EARLIER, Span, SpanEvent, read_line


class Session(Struct):
    """What there is of one session in one trace, rounds in order."""

    id: str
    trace_id: bytes
    root: Span | None = None
    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        self.spans.append(span)
        if span.name == "sdcp.session":
            self.root = span

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        return max(span.end_ns for span in self.spans)

    @property
    def rounds(self) -> list[Round]:
        found = [Round(span) for span in self.spans if span.name == "sdcp.round"]
        by_id = {round_.span.span_id: round_ for round_ in found}
        for span in self.spans:
            if (above := by_id.get(span.parent_id)) is not None:
                above.children.append(span)
        for round_ in found:
            round_.children.sort(key=lambda span: span.start_ns)
        return sorted(found, key=lambda round_: (round_.epoch, round_.number, round_.span.start_ns))

    def events(self, name: str = "") -> list[SpanEvent]:
        found = [event for span in self.spans for event in span.events if name in ("", event.name)]
        return sorted(found, key=lambda event: event.time_ns)


class Round(Struct):
    """A round and what it was made of."""

    span: Span
    children: list[Span] = field(default_factory=list)

    @property
    def number(self) -> int:
        return int(self.span.attributes.get("sdcp.round", 0))

    @property
    def epoch(self) -> int:
        return int(self.span.attributes.get("sdcp.epoch", 0))

    def child(self, name: str) -> Span | None:
        """The last one of its name: a round may have been drafted more than once."""
        return next((span for span in reversed(self.children) if span.name == name), None)


class Found(Struct):
    """All that was read. ``damaged`` counts lines that are no OTLP JSON."""

    sessions: dict[tuple[str, bytes], Session] = field(default_factory=dict)
    dropped: dict[tuple[str, str], int] = field(default_factory=dict)  # spans, by service and process
    files: int = 0
    damaged: int = 0

    def add(self, line: bytes) -> list[Session]:
        """Take a line in; answers the sessions it tells of."""
        told: dict[tuple[str, bytes], Session] = {}
        try:
            spans = list(read_line(line))
        except ValueError:
            self.damaged += 1
            return []
        for span, dropped in spans:
            key = (str(span.attributes.get("sdcp.session_id", "")), span.trace_id)
            session = told[key] = self.sessions.setdefault(key, Session(*key))
            session.add(span)
            who = (span.service, span.process)
            self.dropped[who] = max(self.dropped.get(who, 0), int(dropped))
        return list(told.values())

    def newest_first(self) -> list[Session]:
        return sorted(self.sessions.values(), key=lambda session: -session.start_ns)

    def session(self, prefix: str) -> Session:
        """The newest one whose id begins so; raises ``ValueError`` where there is none."""
        for session in self.newest_first():
            if session.id.startswith(prefix.lower()):
                return session
        known = "; sdcp-mono trace ls lists them" if self.sessions else ""
        raise ValueError(f"no session {prefix or 'at all'} in {self.files} trace files{known}")

    def forget(self, but: int) -> None:
        """Keep the newest sessions only."""
        for session in self.newest_first()[but:]:
            del self.sessions[session.id, session.trace_id]


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Trace files, older ones of a process first. A folder stands for all below it; raises ``ValueError``."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder; traces are written to traces/ in a data folder")
        found += sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def read(paths: Sequence[Path]) -> Found:
    """All spans in these files and folders."""
    found = Found()
    for path in files_in(paths):
        found.files += 1
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # otherwise it is being written
                    found.add(line)
    return found


class Follower:
    """Whole lines as they come from now on, also from files that appear or are rotated. ``look`` never waits."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open = {path: path.open("rb") for path in files_in(paths) if not path.name.endswith(EARLIER)}
        for file in self._open.values():
            file.seek(0, os.SEEK_END)

    def look(self) -> Iterator[bytes]:
        for path in [*self._open, *(path for path in files_in(self._paths) if path not in self._open)]:
            if path.name.endswith(EARLIER):
                continue  # it was read under its earlier name, or is from before
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = path.open("rb")
            yield from _lines(file)
            if not _same(path, file):  # rotated: what was written until then has been read
                file.close()
                del self._open[path]
                if path.exists():
                    file = self._open[path] = path.open("rb")
                    yield from _lines(file)

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(at)
            return
        yield line


def _same(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
