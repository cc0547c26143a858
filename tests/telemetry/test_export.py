"""Exporters against a real receiver, the file against OTLP's own messages, and what becomes of too much."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry

from sdcp_mono.telemetry import export
from sdcp_mono.telemetry.export import Pipe, TraceFile, TraceMetrics, otlp, resource
from sdcp_mono.telemetry.trace_files import read

WHOSE = {"service.name": "sdcp-verifier", "service.instance.id": "host:1"}


def plain(attributes: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(one) for one in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {pair.key: value(pair.value) for pair in attributes}


def of_otlp(span: Any) -> tuple[Any, ...]:
    """A span of OpenTelemetry's messages as comparable data."""
    events = [(event.name, event.time_unix_nano, plain(event.attributes)) for event in span.events]
    return (
        span.name, span.trace_id, span.span_id, span.parent_span_id, span.start_time_unix_nano,
        span.end_time_unix_nano, plain(span.attributes), events, span.kind, span.status.code,
    )  # fmt: skip


def of_ours(span: Any) -> tuple[Any, ...]:
    events = [(event.name, event.time_ns, event.attributes) for event in span.events]
    status = 0 if span.error is None else 2
    ids = (span.trace_id, span.span_id, span.parent_id)
    return (span.name, *ids, span.start_ns, span.end_ns, span.attributes, events, 1, status)


def parsed(line: bytes) -> ExportTraceServiceRequest:
    """OTLP JSON has ids in hex; protobuf's JSON, which reads the rest, in base64."""
    document = json.loads(line)
    for of_resource in document["resourceSpans"]:
        for scoped in of_resource["scopeSpans"]:
            for span in scoped["spans"]:
                for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return json_format.ParseDict(document, ExportTraceServiceRequest())


def test_a_collector_receives_every_span(kit: Any, collector: Any) -> None:
    endpoint, received = collector
    spans = kit.spans()
    pipe = Pipe("otlp", otlp(endpoint, WHOSE), 100)
    for note in kit.recorded():
        pipe.put(note)
    pipe.close()
    assert (pipe.exported, pipe.dropped) == (len(spans), 0)
    assert [span.name for span in received.spans] == [span.name for span in spans]
    (of_resource,) = received.requests[0].resource_spans
    assert plain(of_resource.resource.attributes) == WHOSE
    assert of_resource.scope_spans[0].scope.name == "sdcp_mono"


def test_a_collector_receives_what_was_meant(kit: Any, collector: Any) -> None:
    endpoint, received = collector
    exporter = otlp(endpoint, WHOSE)
    spans = kit.spans()
    assert exporter.export(spans, 0) == 0
    exporter.close()
    assert [of_otlp(span) for span in received.spans] == [of_ours(span) for span in spans]


def test_what_a_collector_refuses_is_dropped_and_counted(kit: Any, collector: Any) -> None:
    endpoint, received = collector
    received.broken = True
    pipe = Pipe("otlp", otlp(endpoint, WHOSE), 100)
    for note in kit.round(1, 0.0):
        pipe.put(note)
    pipe.close()
    assert (pipe.exported, pipe.dropped) == (0, 4)


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost", ""])
def test_an_endpoint_that_is_none_says_what_is_expected(endpoint: str) -> None:
    with pytest.raises(ValueError, match="trace_otlp: expected http://HOST:4318"):
        otlp(endpoint, WHOSE)


def test_the_file_is_otlp_json(kit: Any, tmp_path: Path) -> None:
    spans = kit.spans()
    file = TraceFile(tmp_path, "verifier", 2**20, WHOSE)
    assert file.export(spans[:3], 0) == file.export(spans[3:], 7) == 0
    file.close()
    lines = (tmp_path / "verifier.jsonl").read_bytes().splitlines()
    assert len(lines) == 2
    requests = [parsed(line) for line in lines]
    found = [span for request in requests for span in request.resource_spans[0].scope_spans[0].spans]
    assert [of_otlp(span) for span in found] == [of_ours(span) for span in spans]
    assert plain(requests[1].resource_spans[0].resource.attributes) == WHOSE
    assert plain(requests[1].resource_spans[0].scope_spans[0].scope.attributes) == {"sdcp.dropped_spans": 7}


def test_the_file_reads_back(kit: Any, tmp_path: Path) -> None:
    spans = kit.spans()
    file = TraceFile(tmp_path, "verifier", 2**20, WHOSE)
    file.export(spans, 7)
    file.close()
    with file.path.open("ab") as torn:
        torn.write(b'not json\n{"resourceSpans": [1]}\n{"half a li')
    found = read([tmp_path])
    (session,) = found.sessions.values()
    assert [of_ours(span) for span in session.spans] == [of_ours(span) for span in spans]
    assert (found.damaged, sum(found.dropped.values())) == (2, 7)


def test_the_file_is_rotated_and_stays_below_its_cap(kit: Any, tmp_path: Path) -> None:
    cap = 40_000
    file = TraceFile(tmp_path, "verifier", cap, WHOSE)
    for number in range(1, 101):
        assert file.export(kit.spans(kit.round(number, float(number))), 0) == 0
        assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= cap
    file.close()
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["verifier.1.jsonl", "verifier.jsonl"]
    (session,) = read([tmp_path]).sessions.values()
    numbers = [one.number for one in session.rounds]
    assert numbers == list(range(numbers[0], 101))  # the newest, none missing
    assert len(numbers) > 5


def test_a_batch_above_the_cap_is_written_in_parts_and_a_span_above_it_dropped(kit: Any, tmp_path: Path) -> None:
    file = TraceFile(tmp_path, "verifier", 4000, WHOSE)
    spans = kit.spans(kit.round(1, 0.0))
    assert file.export(spans, 0) == 0
    file.close()
    tiny = TraceFile(tmp_path / "tiny", "verifier", 200, WHOSE)
    assert tiny.export(spans, 0) == len(spans)
    tiny.close()


def test_a_restart_goes_on_in_the_same_file_and_a_second_process_takes_another(kit: Any, tmp_path: Path) -> None:
    first = TraceFile(tmp_path, "serve", 2**20, WHOSE)
    second = TraceFile(tmp_path, "serve", 2**20, WHOSE)
    first.export(kit.spans(kit.round(1, 0.0)), 0)
    first.close()
    again = TraceFile(tmp_path, "serve", 2**20, WHOSE)
    again.export(kit.spans(kit.round(2, 1.0)), 0)
    assert [file.path.name for file in (first, second, again)] == ["serve.jsonl", "serve-2.jsonl", "serve.jsonl"]
    assert len(again.path.read_bytes().splitlines()) == 2
    for file in (second, again):
        file.close()


class Stuck:
    """An exporter that hangs until it is let go."""

    def __init__(self) -> None:
        self.called, self.go = threading.Event(), threading.Event()
        self.told: list[int] = []

    def export(self, spans: Any, dropped: int) -> int:
        self.called.set()
        assert self.go.wait(30)
        self.told.append(dropped)
        return 0

    def close(self) -> None: ...


def test_a_full_queue_drops_and_counts_and_never_waits(kit: Any) -> None:
    stuck, registry = Stuck(), CollectorRegistry()
    pipe = Pipe("file", stuck, 16)
    TraceMetrics(registry, [pipe])
    for note in kit.round(1, 0.0):
        pipe.put(note)
    assert stuck.called.wait(30)  # the queue is empty, and the exporter hangs
    for number in range(2, 12):  # 40 spans, of which 16 fit
        for note in kit.round(number, 0.0):
            pipe.put(note)

    def count(name: str) -> float | None:
        return registry.get_sample_value(name, {"exporter": "file"})

    assert count("sdcp_trace_spans_dropped_total") == 24
    stuck.go.set()
    pipe.close()
    assert count("sdcp_trace_spans_total") == 4 + 16
    assert stuck.told == [0, 24]  # which the file then says


def test_an_exporter_that_raises_loses_its_batch_only(kit: Any, caplog: Any) -> None:
    class Raises:
        def export(self, spans: Any, dropped: int) -> int:
            raise OSError("no space left on device")

        def close(self) -> None: ...

    pipe = Pipe("file", Raises(), 100)
    for note in kit.round(1, 0.0):
        pipe.put(note)
    pipe.close()
    assert (pipe.exported, pipe.dropped) == (0, 4)
    assert "no space left on device" in caplog.text


def test_a_process_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    assert resource("serve", "a:1")["service.name"] == "sdcp-mono"
    assert resource("router", "a:1")["service.name"] == "sdcp-router"
    assert resource("router", "a:1")["service.instance.id"] == "a:1"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert resource("router", "a:1")["service.name"] == "mine"


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"pip install 'sdcp-mono\[otlp\]'"):
        export.otlp("http://localhost:4318", WHOSE)
