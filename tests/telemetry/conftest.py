"""Notes as roles make them, with known times, and an OTLP collector of the real messages and services."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import GenerateRequest, RoundInfo
from sdcp_mono.core.traces import DraftPhases, ModelPass, Outcome, RoundPhases, Wish
from sdcp_mono.telemetry.context import of_session
from sdcp_mono.telemetry.spans import Span
from sdcp_mono.telemetry.tracing import Note, _Event, spans_of

SESSION = bytes(range(16))
WALL_NS = 1_700_000_000 * 10**9  # what the wall clock shows when the performance counter is at 0
HANG_SECONDS = 30


class Kit:
    SESSION = SESSION
    HANG_SECONDS = HANG_SECONDS

    @staticmethod
    def note(role: str, began: float, ended: float, about: Any, *events: tuple[float, str, dict[str, Any]]) -> Note:
        told = tuple(_Event(*event) for event in events)
        return Note(SESSION, role, of_session(SESSION), b"", told, began, ended, about)

    @classmethod
    def round(cls, number: int, began: float, *, m: int = 4, accepted: int = 3, action: int = 0) -> list[Note]:
        """A round of 60 ms: 20 to draft, 25 in the queue and the pass, 10 to append; its draft's note first."""
        scored = ModelPass(began + 0.025, began + 0.05, 0.02, 40, 8, 2)
        phases = RoundPhases(began, scored, began + 0.05, began + 0.06, 8)
        emitted = tuple(range(accepted + 1))
        info = RoundInfo(
            number, 1, 4 * (number - 1), tuple(range(m)), accepted, emitted, (), action, 8, "toy" if m else ""
        )
        notes = []
        if m:
            model = ModelPass(began + 0.004, began + 0.018, 0.012, 12, 3)
            draft = DraftPhases(1, number, "toy", m, began, began + 0.02, began + 0.061, model, accepted)
            notes.append(cls.note("drafter", began, began + 0.02, draft))
        event = [(began + 0.06, "sdcp.escalation", {"action": "switch", "m_cap": 2})] if action == 2 else []
        return [*notes, cls.note("verifier", began, began + 0.06, (info, phases), *event)]

    @classmethod
    def recorded(cls) -> list[Note]:
        """A session of three rounds: the lead token, a good one, and one after which the drafter is let go."""
        request = GenerateRequest((1, 2, 3), 32, (2,), Rule.GREEDY, Sampling(top_k=40, seed=7))
        root = cls.note(
            "router", 0.0, 0.25, (Wish(request, "toy"), Outcome(9, 0.09, 4)), (0.001, "sdcp.admitted", {}),
            (0.02, "sdcp.opened", {"epoch": 1, "verifier": "v"}), (0.24, "sdcp.failover", {"epoch": 2, "lost": "v"}),
        )  # fmt: skip
        rounds = (*cls.round(1, 0.02, m=0, accepted=0), *cls.round(2, 0.08), *cls.round(3, 0.14, action=2))
        return [*rounds, root]

    @classmethod
    def spans(cls, notes: list[Note] | None = None) -> list[Span]:
        return [span for note in notes or cls.recorded() for span in spans_of(note, WALL_NS)]


@pytest.fixture
def kit() -> Kit:
    return Kit()


class Collector:
    """What arrived. ``broken``: every export is refused for good."""

    def __init__(self) -> None:
        self.requests: list[messages.ExportTraceServiceRequest] = []
        self.arrived = threading.Event()
        self.broken = False

    def take(self, request: messages.ExportTraceServiceRequest) -> messages.ExportTraceServiceResponse:
        self.requests.append(request)
        self.arrived.set()
        return messages.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for scoped in of_resource.scope_spans
            for span in scoped.spans
        ]


@pytest.fixture(params=["http", "grpc"])
def collector(request: pytest.FixtureRequest) -> Iterator[tuple[str, Collector]]:
    """An endpoint as settings name it, and what arrives there."""
    made = Collector()
    yield from (over_http if request.param == "http" else over_grpc)(made)


def over_http(made: Collector) -> Iterator[tuple[str, Collector]]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            known = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            status = 400 if made.broken or not known else 200
            answer = b""
            if status == 200:
                answer = made.take(messages.ExportTraceServiceRequest.FromString(body)).SerializeToString()
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", made
        server.shutdown()
        thread.join()


def over_grpc(made: Collector) -> Iterator[tuple[str, Collector]]:
    class Servicer(services.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            if made.broken:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
            return made.take(request)

    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        services.add_TraceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}", made
        server.stop(None).wait()
