"""Spans as data, and their three forms: OTLP JSON lines, what OpenTelemetry's exporters take, and back from a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from sdcp_mono import __version__

SCOPE: Final = "sdcp_mono"
DROPPED: Final = "sdcp.dropped_spans"  # attribute of the scope: how many this process has dropped so far
EARLIER: Final = ".1.jsonl"  # ends the name of a trace file that was full
INTERNAL, ERROR = 1, 2  # SpanKind and StatusCode of OTLP

Attributes = dict[str, Any]


class SpanEvent(Struct, frozen=True):
    time_ns: int
    name: str
    attributes: Attributes


class Span(Struct, frozen=True):
    """One span. ``parent_id`` empty: it is a root. ``service`` and ``process`` are known of those read from a file."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None
    service: str = ""
    process: str = ""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


# ---- OTLP JSON ---------------------------------------------------------------------------------------


def json_line(spans: Sequence[Span], resource: Mapping[str, Any], dropped: int) -> bytes:
    """An ExportTraceServiceRequest in OTLP's JSON, in one line: ids in hex, 64-bit integers as strings."""
    scope = {"name": SCOPE, "version": __version__, "attributes": _pairs({DROPPED: dropped} if dropped else {})}
    scoped = {"scope": scope, "spans": [_to_json(span) for span in spans]}
    request = {"resourceSpans": [{"resource": {"attributes": _pairs(resource)}, "scopeSpans": [scoped]}]}
    return msgspec.json.encode(request) + b"\n"


def _to_json(span: Span) -> dict[str, Any]:
    made = {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _pairs(span.attributes),
    }
    if span.parent_id:
        made["parentSpanId"] = span.parent_id.hex()
    if span.events:
        made["events"] = [
            {"timeUnixNano": str(e.time_ns), "name": e.name, "attributes": _pairs(e.attributes)} for e in span.events
        ]
    if span.error is not None:
        made["status"] = {"code": ERROR, "message": span.error}
    return made


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    kind = type(value)
    if kind is int:
        return {"intValue": str(value)}
    if kind is float:
        return {"doubleValue": value}
    if kind is str:
        return {"stringValue": value}
    if kind is bool:
        return {"boolValue": value}
    if kind in (list, tuple):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}


def read_line(line: bytes) -> Iterator[tuple[Span, int]]:
    """The spans of a line, each with what its process had dropped by then; raises ``ValueError`` if it is no OTLP."""
    try:
        request = msgspec.json.decode(line)
        for of_resource in request["resourceSpans"]:
            resource = _read(of_resource.get("resource", {}).get("attributes", ()))
            for scoped in of_resource["scopeSpans"]:
                dropped = _read(scoped.get("scope", {}).get("attributes", ())).get(DROPPED, 0)
                for span in scoped["spans"]:
                    yield _from_json(span, resource), dropped
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of OTLP JSON: {error}") from None


def _from_json(span: dict[str, Any], resource: Attributes) -> Span:
    status = span.get("status", {})
    return Span(
        span["name"], bytes.fromhex(span["traceId"]), bytes.fromhex(span["spanId"]),
        bytes.fromhex(span.get("parentSpanId", "")), int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]),
        _read(span.get("attributes", ())),
        tuple(
            SpanEvent(int(e["timeUnixNano"]), e["name"], _read(e.get("attributes", ()))) for e in span.get("events", ())
        ),
        status.get("message", "") if status.get("code") == ERROR else None,
        str(resource.get("service.name", "")), str(resource.get("service.instance.id", "")),
    )  # fmt: skip


def _read(pairs: Sequence[dict[str, Any]]) -> Attributes:
    return {pair["key"]: _plain(pair["value"]) for pair in pairs}


def _plain(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_plain(one) for one in value["arrayValue"].get("values", ())]
    return next(iter(value.values()), None)


# ---- OpenTelemetry -----------------------------------------------------------------------------------


def readable(span: Span, resource: Any) -> Any:
    """The same as OpenTelemetry's exporters take it; ``resource`` is an SDK ``Resource``."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: bytes) -> SpanContext:
        trace_id = int.from_bytes(span.trace_id, "big")
        return SpanContext(trace_id, int.from_bytes(span_id, "big"), is_remote=False, trace_flags=TraceFlags(1))

    return ReadableSpan(
        name=span.name, context=context(span.span_id), parent=context(span.parent_id) if span.parent_id else None,
        resource=resource, attributes=span.attributes, kind=SpanKind.INTERNAL,
        events=[Event(e.name, e.attributes, e.time_ns) for e in span.events],
        instrumentation_scope=InstrumentationScope(SCOPE, __version__),
        status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_ns, end_time=span.end_ns,
    )  # fmt: skip
