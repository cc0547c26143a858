"""The roles' notes become spans: ``sdcp.session`` > ``sdcp.round`` > ``sdcp.draft``, ``sdcp.verify``, ``sdcp.commit``.

The law of this module: on the event loop a note costs a look-up, and where it is kept, one object in a queue. Spans
are made from it later, on the exporters' threads. Kept is what belongs to a session of the sample, and of all others
what was slow or went wrong.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, Protocol

from msgspec import UNSET, Struct, field, structs

from sdcp_mono.core.messages import Action, Rule, SessionId
from sdcp_mono.core.ports import RoundInfo
from sdcp_mono.core.traces import DraftPhases, Fact, ModelPass, Outcome, RoundPhases, Wish
from sdcp_mono.telemetry import context as contexts
from sdcp_mono.telemetry.context import Context
from sdcp_mono.telemetry.spans import Attributes, Span, SpanEvent

log = logging.getLogger(__name__)
P = ParamSpec("P")

MAX_EVENTS: Final = 64  # of one session between two spans: a drafter that is refused again and again says no more
MAX_OPEN: Final = 16_384  # sessions of one role; four times what it may be set to serve
PROVIDER: Final = "sdcp_mono"
ESCALATIONS: Final = (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL)
NOTABLE: Final = (
    "sdcp.rejected",
    "sdcp.fenced",
    "sdcp.escalation",
    "sdcp.failover",
)  # kept whether the session is sampled or not
OVER: Final = "sdcp-session-closed"  # a proposal that meets its session's end is nobody's fault


class Queue(Protocol):
    """What takes notes to an exporter; must not block."""

    def put(self, note: Note) -> None: ...


class _Event(Struct, frozen=True):
    at: float
    name: str
    facts: dict[str, Any]


class Note(Struct, frozen=True):
    """Something to be made into ``count`` spans."""

    session: SessionId
    role: str
    context: Context
    parent: bytes
    events: tuple[_Event, ...]
    began: float
    ended: float
    about: tuple[RoundInfo, RoundPhases] | DraftPhases | tuple[Wish, Outcome] | tuple[int, int]

    @property
    def count(self) -> int:
        return 3 if isinstance(self.about, tuple) and isinstance(self.about[0], RoundInfo) else 1


class _Open(Struct):
    """A session that a role works on."""

    context: Context
    sampled: bool
    began: float
    parent: bytes = b""
    wish: Wish | None = None
    at: tuple[int, int] = (0, 0)  # epoch and round of the last event
    notable: bool = False
    events: list[_Event] = field(default_factory=list)


def _quietly(method: Callable[P, None]) -> Callable[P, None]:
    """Nothing that goes wrong here may reach a round."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            log.exception("a trace is incomplete")

    return guarded


class Tracing:
    """All of one process: what is in the sample, what is slow, and where notes go. ``slow_seconds`` 0: nothing is."""

    def __init__(self, queues: Sequence[Queue], *, sample: float = 1.0, slow_seconds: float = 0.0) -> None:
        self.queues = queues
        self.sample = sample
        self.slow_seconds = slow_seconds or float("inf")

    def role(self, name: str) -> RoleTracer:
        return RoleTracer(self, name)


class RoleTracer:
    """Implements ``Tracer`` for one role of this process."""

    def __init__(self, tracing: Tracing, role: str) -> None:
        self._tracing = tracing
        self._role = role
        self._open: dict[SessionId, _Open] = {}

    @_quietly
    def opened(self, session: SessionId, wish: Wish | None = None) -> None:
        self._fail(session)  # what was open under this id is replaced
        parent = b""
        if wish is None:
            known = contexts.current()
            context = contexts.of_session(session) if known is None else known
        else:
            client = contexts.parse(wish.request.trace)
            parent = b"" if client is None else client.span_id
            named = wish.request.session is not None or client is not None
            context = contexts.of_session(session, client, wish.attempt.encode() if named else b"")
            if wish.request.resume:  # the earlier attempt has, or would have had, a root of its own
                context = structs.replace(context, span_id=contexts.fresh_span_id())
        if len(self._open) < MAX_OPEN:
            sampled = contexts.sampled(session, self._tracing.sample)
            self._open[session] = _Open(context, sampled, time.perf_counter(), parent, wish)

    @_quietly
    def follow(self, session: SessionId) -> None:
        known = self._open.get(session)
        if known is not None:
            contexts.enter(known.context.traceparent(known.sampled))

    @_quietly
    def event(self, session: SessionId, name: str, epoch: int = 0, round_: int = 0, **facts: Fact) -> None:
        known = self._open.get(session)
        if known is None:
            return
        known.notable = known.notable or name in NOTABLE
        if round_:
            known.at = (epoch, round_)
            facts = {"round": round_, **facts}
        if epoch:
            facts = {"epoch": epoch, **facts}
        if len(known.events) < MAX_EVENTS:
            known.events.append(_Event(time.perf_counter(), name, facts))

    @_quietly
    def round(self, session: SessionId, info: RoundInfo, phases: RoundPhases) -> None:
        known = self._open.get(session)
        if known is None:
            return
        escalated = info.action in ESCALATIONS
        slow = phases.append_ended - phases.began >= self._tracing.slow_seconds
        if not (known.sampled or known.notable or escalated or slow):
            return
        events, known.events, known.notable = known.events, [], False
        if escalated:
            facts = {"action": Action(info.action).name.lower(), "m_cap": info.m_cap}
            events.append(_Event(phases.append_ended, "sdcp.escalation", facts))
        self._keep(session, known, phases.began, phases.append_ended, (info, phases), events)

    @_quietly
    def draft(self, session: SessionId, phases: DraftPhases) -> None:
        known = self._open.get(session)
        if known is None:
            return
        slow = phases.answered - phases.began >= self._tracing.slow_seconds
        if known.sampled or slow or phases.problem not in ("", OVER):
            events = [_Event(phases.answered, "sdcp.rejected", {"problem": phases.problem})] if phases.problem else []
            self._keep(session, known, phases.began, phases.drafted, phases, events)

    @_quietly
    def closed(self, session: SessionId, outcome: Outcome | None = None) -> None:
        self._fail(session, outcome)

    def _fail(self, session: SessionId, outcome: Outcome | None = None) -> None:
        """Forget a session: where it began here it has a span, elsewhere its last round may have failed."""
        known = self._open.pop(session, None)
        if known is None:
            return
        if known.wish is not None:
            outcome = outcome or Outcome(0)
            if known.sampled or known.notable or outcome.error:
                self._keep(session, known, known.began, time.perf_counter(), (known.wish, outcome), known.events)
        elif known.notable:
            at = [event.at for event in known.events]
            self._keep(session, known, at[0], at[-1], known.at, known.events)

    def _keep(
        self, session: SessionId, known: _Open, began: float, ended: float, about: Any, events: list[_Event]
    ) -> None:
        note = Note(session, self._role, known.context, known.parent, tuple(events), began, ended, about)
        for queue in self._tracing.queues:
            queue.put(note)


# ---- on the exporters' threads -----------------------------------------------------------------------


def spans_of(note: Note, offset_ns: int) -> list[Span]:
    """The spans of a note. ``offset_ns`` is what the wall clock shows beyond the performance counter."""
    maker = _Maker(note, offset_ns)
    match note.about:
        case DraftPhases():
            return [maker.draft(note.about)]
        case (RoundInfo() as info, RoundPhases() as phases):
            return maker.round(info, phases)
        case (Wish() as wish, Outcome() as outcome):
            return [maker.session(wish, outcome)]
        case (int() as epoch, int() as round_):
            return [maker.failed(epoch, round_)]
    raise AssertionError(note)


class _Maker:
    def __init__(self, note: Note, offset_ns: int) -> None:
        self._note = note
        self._offset_ns = offset_ns
        self._whose = {"sdcp.session_id": note.session.hex(), "sdcp.role": note.role}

    def _ns(self, at: float) -> int:
        return self._offset_ns + round(at * 1e9)

    def _span(
        self, name: str, span_id: bytes, parent: bytes, began: float, ended: float, attributes: Attributes,
        *, events: bool = False, error: str | None = None,
    ) -> Span:  # fmt: skip
        told = tuple(
            SpanEvent(self._ns(event.at), event.name, {f"sdcp.{key}": value for key, value in event.facts.items()})
            for event in (self._note.events if events else ())
        )
        return Span(
            name, self._note.context.trace_id, span_id, parent, self._ns(began), self._ns(max(began, ended)),
            {**self._whose, **attributes}, told, error,
        )  # fmt: skip

    def session(self, wish: Wish, outcome: Outcome) -> Span:
        note, error = self._note, outcome.error or None
        attributes = _gen_ai(wish, outcome)
        if outcome.first_token is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = outcome.first_token - note.began
        root = note.context.span_id
        return self._span(
            "sdcp.session", root, note.parent, note.began, note.ended, attributes, events=True, error=error
        )

    def round(self, info: RoundInfo, phases: RoundPhases) -> list[Span]:
        note = self._note
        this = note.context.round_id(info.epoch, info.round)
        facts: Attributes = {
            "sdcp.round": info.round, "sdcp.epoch": info.epoch, "sdcp.base": info.base, "sdcp.m": len(info.proposed),
            "sdcp.accepted": info.accepted, "sdcp.emitted": len(info.emitted),
            "sdcp.action": Action(info.action).name.lower(), "sdcp.m_cap": info.m_cap,
        }  # fmt: skip
        if info.drafter:
            facts["sdcp.drafter"] = info.drafter
        failed = "the session failed" if info.action == Action.FAIL else None
        where = {"sdcp.round": info.round, "sdcp.epoch": info.epoch}
        append = {
            **where, "sdcp.append_seconds": phases.append_ended - phases.append_began,
            "sdcp.append_rounds": phases.appends,
        }  # fmt: skip
        scored = phases.scored
        return [
            self._span(
                "sdcp.round", this, note.context.span_id, note.began, note.ended, facts, events=True, error=failed
            ),
            self._span(
                "sdcp.verify", contexts.fresh_span_id(), this, scored.asked, scored.answered,
                where | _of_pass(scored) | {"sdcp.tier_hits": scored.restored},
            ),
            self._span(
                "sdcp.commit", contexts.fresh_span_id(), this, phases.append_began, phases.append_ended, append
            ),
        ]  # fmt: skip

    def draft(self, phases: DraftPhases) -> Span:
        note = self._note
        facts: Attributes = {
            "sdcp.round": phases.round, "sdcp.epoch": phases.epoch, "sdcp.m": phases.m, "sdcp.drafter": phases.source,
            "sdcp.answer_seconds": phases.answered - phases.drafted,
        }  # fmt: skip
        if not phases.problem:
            facts["sdcp.accepted"] = phases.accepted
        if phases.model is not None:
            facts |= _of_pass(phases.model)
        return self._span(
            "sdcp.draft", contexts.fresh_span_id(), note.context.round_id(phases.epoch, phases.round),
            phases.began, phases.drafted, facts, events=True, error=phases.problem or None,
        )  # fmt: skip

    def failed(self, epoch: int, round_: int) -> Span:
        """A round that was never committed here."""
        note = self._note
        problem = str(note.events[-1].facts.get("problem", note.events[-1].name))
        return self._span(
            "sdcp.round", note.context.round_id(epoch, round_), note.context.span_id, note.began, note.ended,
            {"sdcp.round": round_, "sdcp.epoch": epoch}, events=True, error=problem,
        )  # fmt: skip


def _of_pass(of: ModelPass) -> Attributes:
    return {
        "sdcp.batch.requests": of.requests,
        "sdcp.batch.rows": of.rows,
        "sdcp.pass_seconds": of.seconds,
        "sdcp.queue_seconds": max(0.0, of.answered - of.asked - of.seconds),
    }


def _gen_ai(wish: Wish, outcome: Outcome) -> Attributes:
    """OpenTelemetry's names for generative AI, as they are now."""
    request = wish.request
    sampling = request.sampling
    temperature = 1000 if sampling.temperature_milli is UNSET else sampling.temperature_milli
    attributes: Attributes = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": wish.model,
        "gen_ai.response.model": wish.model,
        "gen_ai.request.max_tokens": request.max_new,
        "gen_ai.request.temperature": 0.0 if request.rule is Rule.GREEDY else temperature / 1000,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": outcome.tokens,
        "gen_ai.response.finish_reasons": [_reason(request.max_new, outcome)],
    }
    if sampling.top_k is not UNSET:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.top_p_milli is not UNSET:
        attributes["gen_ai.request.top_p"] = sampling.top_p_milli / 1000
    if sampling.seed is not UNSET:
        attributes["gen_ai.request.seed"] = sampling.seed
    if outcome.error:
        attributes["error.type"] = "generation_failed"
    return attributes


def _reason(max_new: int, outcome: Outcome) -> str:
    if outcome.error or outcome.finish == Action.FAIL:
        return "error"
    if outcome.finish is None:
        return "stop" if outcome.tokens else "cancelled"  # a reader that found a stop string leaves
    return "length" if outcome.tokens >= max_new else "stop"
