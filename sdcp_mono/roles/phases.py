"""What a verifier remembers of the rounds in flight, until they are committed and can be told whole."""

from __future__ import annotations

import time

from sdcp_mono.core.effects import Append
from sdcp_mono.core.messages import SessionId
from sdcp_mono.core.ports import PassCost
from sdcp_mono.core.problems import Refusal
from sdcp_mono.core.session import Session
from sdcp_mono.core.traces import ModelPass, RoundPhases, Tracer


class Phases:
    """The rounds of all sessions of one verifier; one is in flight in each."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._ended: dict[SessionId, float] = {}  # when the last round ended, or the session was opened
        self._scored: dict[SessionId, ModelPass] = {}

    def opened(self, session: SessionId) -> None:
        self._tracer.opened(session)
        self._ended[session] = time.perf_counter()

    def scored(self, session: SessionId, asked: float, cost: PassCost, restored: int) -> None:
        self._scored[session] = ModelPass(asked, time.perf_counter(), cost.seconds, cost.rows, cost.requests, restored)

    def committed(self, append: Append, began: float, appends: int) -> None:
        """A round is durable; its append began at ``began`` and shared a transaction with ``appends`` in all."""
        session, now = append.session, time.perf_counter()
        scored = self._scored.pop(session, None) or ModelPass(began, began)  # none: it failed before it was scored
        phases = RoundPhases(self._ended.get(session, scored.asked), scored, began, now, appends)
        if session in self._ended:
            self._ended[session] = now
        self._tracer.round(session, append.commit.info, phases)

    def refused(self, session: SessionId, epoch: int, round_: int, refusal: Refusal) -> None:
        problem = refusal.suffix or str(refusal.status)
        self._tracer.event(session, "sdcp.rejected", epoch, round_, problem=problem)

    def closed(self, session: SessionId, known: Session | None = None) -> None:
        """A session is over here; where another verifier has it, the round that found that out was discarded."""
        if known is not None and known.fenced:
            self._tracer.event(session, "sdcp.fenced", known.epoch, known.round + 1, problem="fenced")
        self._ended.pop(session, None)
        self._scored.pop(session, None)
        self._tracer.closed(session)
