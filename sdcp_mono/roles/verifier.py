"""The verifier role: carries out the engine's effects with a model, a commit log and a row source.

No rule of the protocol lives here. Everything runs on one event loop; the model on its own thread (``batching.py``).
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from msgspec import UNSET, structs

from sdcp_mono.core import contract as contracts
from sdcp_mono.core.effects import (
    Append,
    Effects,
    FetchRows,
    Moment,
    Publish,
    ReadLog,
    Release,
    Reply,
    Score,
    SendEvent,
    Waiter,
)
from sdcp_mono.core.engine import Engine, Opening
from sdcp_mono.core.messages import (
    Assignment,
    Decline,
    Event,
    Output,
    Policy,
    Proposal,
    Role,
    SessionId,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)
from sdcp_mono.core.ports import (
    AppendOutcome,
    Chunk,
    CommitLog,
    ModelLost,
    Observer,
    OpenOptions,
    RouterPort,
    RowSource,
    RowsProblem,
    Scored,
    ScoreFailure,
    ScoreRequest,
    TargetModel,
    Uniforms,
)
from sdcp_mono.core.problems import BadProposal, QUnavailable, Refusal, Unavailable
from sdcp_mono.core.routing import LEAVING_TTL_MS
from sdcp_mono.core.traces import Tracer, Untraced
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.phases import Phases
from sdcp_mono.roles.residency import Residency
from sdcp_mono.roles.restoring import Restorer
from sdcp_mono.roles.tasks import Tasks, repeat

log = logging.getLogger(__name__)
T = TypeVar("T")

STATUS_TTL_MS: Final = 3_000
MAX_WAIT_MS: Final = 20_000  # of a long poll (AMB-166)
UNDRAFTED_AFTER_MS: Final = 250  # a session without a drafter for this long decodes by itself (AMB-124)
SILENT_AFTER_MS: Final = 10_000  # so does one whose drafter is not heard of; a long prompt may keep it busy for seconds
EVENT_TRIES: Final = 8  # about half a minute of back-off; by then the router has noticed by itself
APPEND_BACKOFF_SECONDS: Final = (0.0, 0.01, 0.05, 0.2, 1.0)  # the last one repeats
TICK_SECONDS: Final = 0.1

TokenFetcher = Callable[[str, bytes | None], Awaitable[tuple[int, ...]]]
"""Fetches the token ids behind a cache-ref of a session's scope (AMB-037); raises a ``Refusal``."""


class Verifier:
    """Implements ``VerifierPort``. ``base`` is its own base URI."""

    def __init__(
        self,
        base: str,
        engine: Engine,
        model: TargetModel,
        batcher: Batcher[ScoreRequest, Any],
        commit_log: CommitLog,
        rows: RowSource,
        router: RouterPort,
        tokens: TokenFetcher,
        observer: Observer,
        *,
        restore: Restorer | None = None,
        self_decode_idle: bool = True,
        fault: Callable[[], str] = str,
        tracer: Tracer | None = None,
    ) -> None:
        """``fault`` says why the model can't be used any more, empty while it can; it is asked once a second."""
        self.base = base
        self.engine = engine
        self.residency = Residency(model, batcher.call, restore)
        self._batcher = batcher
        self._log = commit_log
        self._rows = rows
        self._router = router
        self._tokens = tokens
        self._observer = observer
        self._phases = Phases(tracer or Untraced())
        self._self_decode_idle = self_decode_idle
        self._fault = fault
        self._waiters: dict[Waiter, asyncio.Future[Any]] = {}
        self._next_waiter = 0
        self._news: dict[SessionId, asyncio.Event] = {}
        self._opening: set[SessionId] = set()
        self._scores: dict[SessionId, asyncio.Task[None]] = {}
        self._appends: list[Append] = []
        self._flushing: asyncio.Task[None] | None = None
        self._draining = False
        self.lost = ""  # why the model is of no use any more
        self._tasks = Tasks()

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._batcher.start()
        self._tasks.start(repeat(STATUS_TTL_MS / 3000, self._report))
        self._tasks.start(repeat(TICK_SECONDS, self._tick))

    async def stop(self) -> None:
        await self._tasks.stop()
        await self._batcher.stop()
        for waiting in self._waiters.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("the verifier is stopping"))

    async def drain(self, seconds: float) -> None:
        """Take no new sessions and hand the present ones over, within ``seconds``: a report that expires at once.

        The router then fences their logs and opens them elsewhere; what has no other verifier finishes here.
        """
        self._draining = True
        deadline = time.monotonic() + seconds
        await self._report()  # even without sessions: nobody may be sent here any more
        while self._busy() and not self.lost and time.monotonic() < deadline:
            await asyncio.sleep(TICK_SECONDS)
            await self._report()

    def _busy(self) -> bool:
        """Sessions run here, or the last tokens of one may not have been read: its router closes it then."""
        return any(not s.fenced and (s.ended is None or s.options.transient) for s in self.engine.sessions.values())

    def _lose(self, why: str) -> None:
        """The model is gone, but not this process: no session can go on or be opened here."""
        if not self.lost:
            log.error("this verifier can't go on: %s", why)
            self.lost, self._draining = why, True

    def moment(self) -> Moment:
        return Moment(ms=time.monotonic_ns() // 1_000_000, load=self.load())

    def load(self) -> int:
        """Percent of the session slots in use (AMB-186); busy time says little where drafter and target share cores."""
        active = sum(not s.over for s in self.engine.sessions.values())
        return min(100, 100 * active // self.engine.limits.sessions)

    # ---- VerifierPort ----------------------------------------------------------------------------

    async def open(self, opening: SessionOpen, options: OpenOptions | None = None) -> SessionState:
        replay = self.engine.check_open(opening)
        if replay is not None:
            return replay
        if self._draining:
            raise Unavailable("the verifier is about to stop", retry_after_ms=1000)
        if opening.session in self._opening:  # its answer is a replay for this caller, once it is there
            raise Unavailable("session: it is being opened", retry_after_ms=100)
        self._opening.add(opening.session)
        try:
            return await self._open(opening, options or OpenOptions())
        finally:
            self._opening.discard(opening.session)

    async def _open(self, opening: SessionOpen, options: OpenOptions) -> SessionState:
        scope = None if opening.contract.scope is UNSET else opening.contract.scope
        prompt = opening.prompt if isinstance(opening.prompt, tuple) else await self._tokens(opening.prompt, scope)
        self.engine.check_prompt(opening, prompt)
        committed: tuple[int, ...] = ()
        records: tuple[Any, ...] = ()
        if opening.resume is not UNSET:
            committed = await self._tokens(opening.resume.committed_tokens, scope)
            records = tuple(await self._log.read(opening.commit_log))
        try:
            limit = len(prompt) + opening.contract.max_new
            await self.residency.open(opening.session, prompt + committed, limit, scope)
            if opening.resume is UNSET:
                await self._log.create(opening.commit_log)
            material = Opening(opening, prompt, committed, records)
            self._phases.opened(opening.session)
            state: SessionState = await self._ask(
                lambda waiter: self.engine.open(material, options, waiter, self.moment())
            )
        except BaseException:  # a cancelled caller too: the model's thread admits all the same, and then releases
            if not self.engine.serves(opening.session):
                self._phases.closed(opening.session)
                self._release(opening.session)
            raise
        self._count_sessions()
        return state

    async def assign(self, assignment: Assignment) -> SessionState:
        state: SessionState = await self._ask(lambda waiter: self.engine.assign(assignment, waiter, self.moment()))
        return state

    async def propose(self, proposal: Proposal, caller: str) -> Verdict:
        try:
            verdict: Verdict = await self._ask(lambda waiter: self.engine.propose(proposal, caller, waiter))
        except Refusal as refusal:
            self._phases.refused(proposal.session, proposal.epoch, proposal.round, refusal)
            raise
        return verdict

    async def decline(self, decline: Decline, caller: str) -> SessionState:
        state: SessionState = await self._ask(lambda waiter: self.engine.decline(decline, caller, waiter))
        return state

    async def output(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Output:
        return await self._read(session, lambda: self.engine.output(session, from_), wait_ms)

    async def chunk(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Chunk:
        return await self._read(session, lambda: self.engine.chunk(session, from_), wait_ms)

    async def policy(self, policy: Policy) -> SessionState:
        return self.engine.policy(policy)

    async def close(self, session: SessionId) -> None:
        self._carry_out(self.engine.close(session, self.moment()))
        if self.engine.sessions[session].options.transient:
            self.engine.forget(session)

    # ---- calls and answers -----------------------------------------------------------------------

    async def _ask(self, call: Callable[[Waiter], Effects]) -> Any:
        """Make a call on the engine and wait for its reply. A caller that goes away changes nothing (AMB-147)."""
        self._next_waiter += 1
        waiter = self._next_waiter
        future = self._waiters[waiter] = asyncio.get_running_loop().create_future()
        try:
            self._carry_out(call(waiter))
            return await future
        except Refusal as refusal:
            self._observer.rejected(refusal.suffix or str(refusal.status))
            raise
        finally:
            self._waiters.pop(waiter, None)

    async def _read(self, session: SessionId, read: Callable[[], T], wait_ms: int | None) -> T:
        """Long poll (6.7): answer at once if there is something, else wait for news."""
        deadline = time.monotonic() + min(MAX_WAIT_MS if wait_ms is None else wait_ms, MAX_WAIT_MS) / 1000
        while True:
            answer = read()
            left = deadline - time.monotonic()
            if answer.tokens or answer.final or left <= 0:  # type: ignore[attr-defined]
                return answer
            news = self._news.setdefault(session, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await news.wait()

    def _carry_out(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Reply():
                    future = self._waiters.get(effect.waiter)
                    if future is None or future.done():
                        continue
                    if isinstance(effect.answer, Refusal):
                        future.set_exception(effect.answer)
                    else:
                        future.set_result(effect.answer)
                case Score():
                    self._drop_score(effect.request.session)
                    self._scores[effect.request.session] = self._tasks.start(self._score(effect))
                case Append():
                    self._append_soon(effect)
                case Publish():
                    news = self._news.pop(effect.session, None)
                    if news is not None:
                        news.set()
                case FetchRows():
                    self._tasks.start(self._fetch(effect))
                case ReadLog():
                    self._tasks.start(self._reread(effect.pending))
                case SendEvent():
                    self._tasks.start(self._send(effect.event))
                case Release():
                    self._phases.closed(effect.session, self.engine.sessions.get(effect.session))
                    self._drop_score(effect.session)
                    self._release(effect.session)
                    self._count_sessions()

    # ---- effects ---------------------------------------------------------------------------------

    async def _fetch(self, effect: FetchRows) -> None:
        try:
            rows = await self._rows.fetch(effect.uri, effect.tokens, effect.scope)
        except RowsProblem as problem:
            refusal = QUnavailable(problem.detail) if problem.unavailable else BadProposal(problem.detail)
            self._carry_out(self.engine.rows_failed(effect.session, effect.ticket, refusal, self.moment()))
        except Exception:  # whatever it is, the round must end
            log.exception("draft rows could not be fetched")
            refusal = QUnavailable("q_rows: they could not be fetched")
            self._carry_out(self.engine.rows_failed(effect.session, effect.ticket, refusal, self.moment()))
        else:
            self._carry_out(self.engine.rows_ready(effect.session, effect.ticket, rows))

    async def _score(self, effect: Score) -> None:
        request = effect.request
        if effect.fresh_uniforms:
            request = structs.replace(request, uniforms=fresh_uniforms(len(request.tokens)))
        asked = time.perf_counter()
        answer: list[Scored] | ScoreFailure
        end = request.length + len(request.tokens)
        try:
            async with self.residency.hold(request.session, end, request.prefix, request.length):
                answer, cost = await self._batcher.submit(request)
            seconds = cost.seconds
            self._phases.scored(request.session, asked, cost, self.residency.restored(request.session))
        except ModelLost as error:  # no answer: the round is not over, it goes on at another verifier
            self._lose(str(error))
            del self._scores[request.session]
            await self._report()
            return
        except Exception as error:
            log.exception("a model pass failed")
            answer, seconds = ScoreFailure(f"the model failed: {type(error).__name__}"), 0.0
        del self._scores[request.session]
        wait = max(0.0, time.perf_counter() - asked - seconds)
        self._carry_out(
            self.engine.scored(request.session, effect.ticket, answer, request.uniforms, self.moment(), wait, seconds)
        )

    def _append_soon(self, append: Append) -> None:
        """Rounds of one pass share one transaction: the flush runs after all their effects."""
        self._appends.append(append)
        if self._flushing is None or self._flushing.done():
            self._flushing = self._tasks.start(self._flush())

    async def _flush(self) -> None:
        while self._appends:
            batch, self._appends = self._appends, []
            started = time.perf_counter()
            outcomes: Sequence[AppendOutcome]
            try:
                outcomes = await self._log.append([append.append for append in batch])
            except Exception:
                log.exception("the commit log failed")
                outcomes = ["unknown"] * len(batch)
            seconds = time.perf_counter() - started
            for append, outcome in zip(batch, outcomes, strict=True):
                effects = self.engine.appended(append, outcome, self.moment(), seconds)
                if outcome == "ok":
                    self._tell(append, started, seconds, len(batch))
                self._carry_out(effects)

    async def _reread(self, pending: Append) -> None:
        await asyncio.sleep(APPEND_BACKOFF_SECONDS[min(pending.attempt, len(APPEND_BACKOFF_SECONDS) - 1)])
        try:
            records = await self._log.read(pending.append.log, pending.append.sequence)
        except Exception as error:
            log.warning("the commit log can't be read: %s", error)
            self._carry_out(self.engine.log_read(pending, None, self.moment()))
        else:
            effects = self.engine.log_read(pending, records, self.moment())
            if records and records[0] == pending.append.record:  # it was made after all (AMB-150)
                self._tell(pending, time.perf_counter(), 0.0, 1)
            self._carry_out(effects)

    def _tell(self, append: Append, began: float, seconds: float, appends: int) -> None:
        """A round is durable: tell whoever watches."""
        self._observer.round(append.session, structs.replace(append.commit.info, commit_seconds=seconds))
        self._phases.committed(append, began, appends)

    async def _send(self, event: Event) -> None:
        for attempt in range(EVENT_TRIES):
            try:
                await self._router.event(event)
            except Unavailable:
                await asyncio.sleep(0.1 * 2**attempt * random.uniform(0.5, 1.0))
            except Refusal:
                return  # the router doesn't know the session: nothing to tell it (AMB-182)
            else:
                return

    def _drop_score(self, session: SessionId) -> None:
        """A session has one request at the model: what it asked for in a round that is over is not wanted any more."""
        task = self._scores.pop(session, None)
        if task is not None:
            task.cancel()

    def _release(self, session: SessionId) -> None:
        self.residency.close(session).add_done_callback(_released)

    def _count_sessions(self) -> None:
        active = sum(s.ended is None for s in self.engine.sessions.values())
        self._observer.sessions(active, self._batcher.queue)

    # ---- loops -----------------------------------------------------------------------------------

    async def _report(self) -> None:
        if problem := self._fault():
            self._lose(problem)
        card, leaving = self.engine.card, 0 if self.lost else LEAVING_TTL_MS
        await self._router.status(
            Status(
                instance=self.base,
                role=int(Role.VERIFIER),
                load=self.load(),
                queue=self._batcher.queue,
                ttl_ms=leaving if self._draining else STATUS_TTL_MS,
                models=(card.target,),
                tokenizer=card.tokenizer,
                base=self.base,
            )
        )

    async def _tick(self) -> None:
        at = self.moment()
        self._carry_out(self.engine.tick(at))
        if not self._self_decode_idle:
            return
        for session in list(self.engine.sessions.values()):
            seeded = contracts.seeded(session.contract)
            expected = session.drafted or (seeded and not session.undrafted)
            # One that was moved while we drain finds that out when it next commits.
            patience = SILENT_AFTER_MS if expected and not self._draining else UNDRAFTED_AFTER_MS
            if session.flight is None and at.ms - session.touched_ms >= patience:
                self._carry_out(self.engine.undrafted(session.id, at))


def _released(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("the model could not release a session", exc_info=error)


def fresh_uniforms(m: int) -> Uniforms:
    """Values for one round without a seed, from the system's secure generator (6.4), 53 bits each."""
    bits = [secrets.randbits(53) / 2**53 for _ in range(2 * m + 1)]
    return Uniforms(accept=tuple(bits[:m]), extra=tuple(bits[m:]))
