"""What the settings make of traces."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from sdcp_mono.compose.tracing import open_tracing, tracer
from sdcp_mono.core.traces import Untraced
from sdcp_mono.settings import TraceSettings
from sdcp_mono.telemetry.tracing import Tracing


def opened(registry: CollectorRegistry, **settings: Any) -> Tracing | None:
    async def main() -> Tracing | None:
        async with AsyncExitStack() as stack:
            return await open_tracing(TraceSettings(**settings), "verifier", registry, stack)

    return asyncio.run(main())


def test_by_default_every_session_goes_into_a_file_of_the_process(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    tracing = opened(registry, data_dir=tmp_path)
    assert tracing is not None
    assert (tracing.sample, tracing.slow_seconds) == (1.0, 1.0)
    assert (tmp_path / "traces" / "verifier.jsonl").exists()
    assert (tmp_path / "traces").stat().st_mode & 0o777 == 0o700
    assert registry.get_sample_value("sdcp_trace_spans_dropped_total", {"exporter": "file"}) == 0


def test_a_collector_is_asked_as_well(kit: Any, tmp_path: Path, collector: Any) -> None:
    endpoint, _ = collector
    tracing = opened(CollectorRegistry(), data_dir=tmp_path, trace_otlp=endpoint, trace_slow_ms=0)
    assert tracing is not None
    assert [queue.name for queue in tracing.queues] == ["otlp", "file"]  # type: ignore[attr-defined]
    assert tracing.slow_seconds == float("inf")


def test_without_an_exporter_nothing_is_traced(tmp_path: Path) -> None:
    assert opened(CollectorRegistry(), data_dir=tmp_path, trace_file_mb=0) is None
    assert not (tmp_path / "traces").exists()
    assert isinstance(tracer(None, "verifier"), Untraced)


def test_a_folder_that_cant_be_written_is_no_reason_not_to_serve(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "traces").write_text("a file is in the way")
    assert opened(CollectorRegistry(), data_dir=tmp_path) is None
    assert "SDCP_TRACE_FILE_MB=0 says that none are wanted" in caplog.text
