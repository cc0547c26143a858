"""From notes to exporters: a bounded queue and a thread for each, a file that stays small, and OTLP.

Nobody waits for an exporter. What doesn't fit into its queue, or can't be exported, is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from filelock import FileLock, Timeout
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from sdcp_mono import __version__
from sdcp_mono.telemetry.spans import EARLIER, Span, json_line, readable
from sdcp_mono.telemetry.tracing import Note, spans_of

log = logging.getLogger(__name__)

EVERY_SECONDS: Final = 0.5  # between two exports: --follow is that late, and a batch is worth its overhead
BATCH: Final = 256  # spans of one line or request: about 150 KB, far below every limit on requests
END_SECONDS: Final = 5.0  # for what is queued when the process ends; a collector that is gone must not hold it up
NAMES: Final = 64  # processes of one role that may share a folder


class Exporter(Protocol):
    """Runs on its own thread. ``export`` answers how many spans it could not export."""

    def export(self, spans: Sequence[Span], dropped: int) -> int: ...
    def close(self) -> None: ...


class Pipe:
    """The way to one exporter. ``spans`` bounds what waits."""

    def __init__(self, name: str, exporter: Exporter, spans: int) -> None:
        self.name = name
        self._exporter = exporter
        self._capacity = spans
        self._notes: deque[Note] = deque()
        self._queued = 0  # spans; written by those who put, read and taken from by the thread, under the lock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ending = False
        self.exported = 0
        self._refused = 0
        self._failed = 0
        self._thread = threading.Thread(target=self._run, name=f"traces to {name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._refused + self._failed

    def put(self, note: Note) -> None:
        with self._lock:
            if self._ending or self._queued + note.count > self._capacity:
                self._refused += note.count
                return
            self._queued += note.count
            self._notes.append(note)
            full = self._queued >= self._capacity // 2
        if full:
            self._wake.set()

    def close(self) -> None:
        """Export what is queued, within ``END_SECONDS``; what comes later is dropped."""
        with self._lock:
            self._ending = True
        self._wake.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()
            self._drain()
        self._drain()  # what was put until the end
        self._exporter.close()

    def _drain(self) -> None:
        while self._notes:
            spans = self._take()
            try:
                failed = self._exporter.export(spans, self.dropped)
            except Exception as error:
                log.warning("traces could not be exported to %s: %s", self.name, error)
                failed = len(spans)
            self._failed += failed
            self.exported += len(spans) - failed

    def _take(self) -> list[Span]:
        offset_ns = time.time_ns() - time.perf_counter_ns()
        spans: list[Span] = []
        while self._notes and len(spans) < BATCH:
            note = self._notes.popleft()
            with self._lock:
                self._queued -= note.count
            try:
                spans += spans_of(note, offset_ns)
            except Exception:
                log.exception("a note could not be made into spans")
                self._failed += note.count
        return spans


class TraceMetrics(Collector):
    """How many spans went out and how many were dropped, by exporter."""

    def __init__(self, registry: CollectorRegistry, pipes: Sequence[Pipe]) -> None:
        self._pipes = pipes
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        exported = CounterMetricFamily("sdcp_trace_spans", "Spans exported.", labels=("exporter",))
        dropped = CounterMetricFamily(
            "sdcp_trace_spans_dropped", "Spans dropped: the queue was full, or they could not be exported.",
            labels=("exporter",),
        )  # fmt: skip
        for pipe in self._pipes:
            exported.add_metric((pipe.name,), pipe.exported)
            dropped.add_metric((pipe.name,), pipe.dropped)
        yield exported
        yield dropped


def resource(role: str, instance: str) -> dict[str, Any]:
    """Who exports, as OpenTelemetry names it; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES may say more."""
    from opentelemetry.sdk.resources import Resource

    name = "sdcp-mono" if role == "serve" else f"sdcp-{role}"
    if os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        told: Mapping[str, Any] = {}
    else:
        told = {"service.name": name}
    made = Resource.create({**told, "service.instance.id": instance, "service.version": __version__})
    return dict(made.attributes)


class TraceFile:
    """OTLP JSON lines in ``folder``, as ``NAME.jsonl`` and, before that, ``NAME.1.jsonl``: together below ``cap``.

    A name belongs to one process at a time; the next one of the same role takes the next name. Raises ``OSError``.
    """

    def __init__(self, folder: Path, name: str, cap: int, whose: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock, self._path = _claim(folder, name)
        self._before = self._path.with_suffix(EARLIER)
        self._half = cap // 2
        self._whose = whose
        self._file = self._path.open("ab")
        self._size = self._file.tell()

    @property
    def path(self) -> Path:
        return self._path

    def export(self, spans: Sequence[Span], dropped: int) -> int:
        if not spans:
            return 0
        line = json_line(spans, self._whose, dropped)
        if len(line) > self._half:
            if len(spans) == 1:
                return 1
            middle = len(spans) // 2
            return self.export(spans[:middle], dropped) + self.export(spans[middle:], dropped)
        if self._size + len(line) > self._half:
            self._rotate()
        self._file.write(line)
        self._file.flush()
        self._size += len(line)
        return 0

    def _rotate(self) -> None:
        self._file.close()
        try:
            self._path.replace(self._before)
        finally:
            self._file = self._path.open("ab")
            self._size = self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._lock.release()


def _claim(folder: Path, name: str) -> tuple[FileLock, Path]:
    for number in range(1, NAMES + 1):
        own = name if number == 1 else f"{name}-{number}"
        lock = FileLock(folder / f"{own}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return lock, folder / f"{own}.jsonl"
    raise OSError(f"{folder}: {NAMES} processes of one role write traces there; give each a data folder of its own")


class Otlp:
    """An exporter of OpenTelemetry's: OTLP over HTTP or gRPC."""

    def __init__(self, exporter: Any, whose: Mapping[str, Any]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._exporter = exporter
        self._resource = Resource(whose)
        self._success = SpanExportResult.SUCCESS

    def export(self, spans: Sequence[Span], dropped: int) -> int:
        result = self._exporter.export([readable(span, self._resource) for span in spans])
        return 0 if result is self._success else len(spans)

    def close(self) -> None:
        self._exporter.shutdown()


def otlp(endpoint: str, whose: Mapping[str, Any]) -> Otlp:
    """``http(s)://…`` is OTLP over HTTP, ``grpc(s)://…`` over gRPC; raises ``ValueError`` saying what is missing."""
    scheme, _, rest = endpoint.partition("://")
    make: Callable[..., Any]
    try:
        if scheme in ("grpc", "grpcs"):
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as make

            return Otlp(make(endpoint=rest, insecure=scheme == "grpc"), whose)
        if scheme in ("http", "https"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as make

            path = "" if "/" in rest.rstrip("/") else "/v1/traces"
            return Otlp(make(endpoint=endpoint.rstrip("/") + path), whose)
    except ImportError:
        raise ValueError("trace_otlp: needs an exporter; install it with: pip install 'sdcp-mono[otlp]'") from None
    raise ValueError("trace_otlp: expected http://HOST:4318, https://…, grpc://HOST:4317 or grpcs://…")
