"""What a router notes of one session for traces: who works on it, who was lost, and what its readers got."""

from __future__ import annotations

import time

from sdcp_mono.core.messages import Action, Event, SessionId
from sdcp_mono.core.ports import Chunk
from sdcp_mono.core.steps import Fence, Inform, Step
from sdcp_mono.core.traces import Outcome, Tracer, Wish


class Journey:
    """From admission to the last reader."""

    def __init__(self, tracer: Tracer, session: SessionId, wish: Wish) -> None:
        self._tracer = tracer
        self._session = session
        self._verifier = ""
        self._drafter = ""  # the one at work
        self._released = False  # the verifier has let it go
        self._fenced = 0  # the epoch of the last fence
        self._outcome = Outcome(0)
        tracer.opened(session, wish)

    def admitted(self) -> None:
        self._tracer.event(self._session, "sdcp.admitted")

    def begins(self, step: Step) -> None:
        """A verifier or a drafter that is replaced, and was not let go, was lost."""
        self._tracer.follow(self._session)
        if isinstance(step, Fence) and step.epoch > self._fenced:
            self._fenced, self._drafter = step.epoch, ""
            self._tracer.event(self._session, "sdcp.failover", step.epoch, role="verifier", lost=self._verifier)
        elif isinstance(step, Inform) and self._drafter:
            lost, self._drafter = self._drafter, ""
            if not self._released:
                self._tracer.event(self._session, "sdcp.failover", step.assignment.epoch, role="drafter", lost=lost)

    def opened(self, verifier: str, epoch: int) -> None:
        self._verifier = verifier
        self._tracer.event(self._session, "sdcp.opened", epoch, verifier=verifier)

    def assigned(self, drafter: str, epoch: int) -> None:
        self._drafter, self._released = drafter, False
        self._tracer.event(self._session, "sdcp.assigned", epoch, drafter=drafter)

    def told(self, event: Event) -> None:
        if event.kind in (Action.SWITCH, Action.SELF_DECODE) and not self._released:  # AMB-180: it may be repeated
            self._released = True
            action = Action(event.kind).name.lower()
            self._tracer.event(self._session, "sdcp.escalation", event.epoch, action=action, committed=event.committed)

    def read(self, chunk: Chunk) -> None:
        last = self._outcome
        first = time.perf_counter() if chunk.tokens and last.first_token is None else last.first_token
        tokens = max(last.tokens, chunk.from_ + len(chunk.tokens))
        self._outcome = Outcome(tokens, first, chunk.finish if chunk.final else last.finish, chunk.error)

    def ended(self, error: str) -> None:
        """``error`` says why it failed, empty if it didn't."""
        last = self._outcome
        self._tracer.closed(self._session, Outcome(last.tokens, last.first_token, last.finish, error or last.error))
