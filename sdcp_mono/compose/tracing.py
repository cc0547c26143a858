"""Where a process's traces go, as its settings say."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry

from sdcp_mono.core.traces import Tracer, Untraced
from sdcp_mono.grpc.calls import Tracing as CallTracing
from sdcp_mono.settings import TraceSettings
from sdcp_mono.telemetry import context, export
from sdcp_mono.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

CALLS: Final = CallTracing(inject=context.inject, extract=context.extract)
"""How a session's trace goes along with calls between roles."""


async def open_tracing(
    settings: TraceSettings, role: str, registry: CollectorRegistry, stack: AsyncExitStack
) -> Tracing | None:
    """None where there is no exporter. What is queued is exported when the stack is left."""
    return await asyncio.to_thread(_open, settings, role, registry, stack)


def _open(settings: TraceSettings, role: str, registry: CollectorRegistry, stack: AsyncExitStack) -> Tracing | None:
    exporters: list[tuple[str, export.Exporter]] = []
    if settings.trace_file_mb or settings.trace_otlp:
        whose = export.resource(role, f"{socket.gethostname()}:{os.getpid()}")
        if settings.trace_otlp:
            exporters.append(("otlp", export.otlp(settings.trace_otlp, whose)))
        if settings.trace_file_mb:
            folder, cap = settings.data_dir / "traces", settings.trace_file_mb * 2**20
            try:
                exporters.append(("file", export.TraceFile(folder, role, cap, whose)))
            except OSError as error:  # no reason not to serve
                log.warning("no traces are written: %s; SDCP_TRACE_FILE_MB=0 says that none are wanted", error)
    if not exporters:
        return None
    pipes = [export.Pipe(name, exporter, settings.trace_queue) for name, exporter in exporters]
    for pipe in pipes:
        stack.push_async_callback(partial(asyncio.to_thread, pipe.close))
    export.TraceMetrics(registry, pipes)
    return Tracing(pipes, sample=settings.trace_sample, slow_seconds=settings.trace_slow_ms / 1000)


def tracer(tracing: Tracing | None, role: str) -> Tracer:
    return Untraced() if tracing is None else tracing.role(role)
