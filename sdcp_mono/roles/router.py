"""The router role: admits requests, carries out the router machine's steps, and hands committed output on.

To the front end it is ``Serving``, to the other roles ``RouterPort``. The order of steps is in ``core/routing.py``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

from msgspec import UNSET, Struct

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import Action, Contract, Event, Role, SessionId, SessionOpen, Status
from sdcp_mono.core.ports import (
    Chunk,
    CommitLog,
    DrafterPort,
    GenerateRequest,
    ModelCard,
    ObjectStore,
    OpenOptions,
    VerifierPort,
)
from sdcp_mono.core.problems import Refusal, SessionClosed, StaleEpoch, TooManyRequests, Unavailable, UnknownSession
from sdcp_mono.core.routing import Assign, Ended, Fence, Inform, Open, ReadRecords, Router, SendPolicy, Stage, Step

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.25
ROOM_RETRY_SECONDS: Final = 0.5  # how often a request that fits no verifier looks again if nothing ended meanwhile


class Terms(Struct, frozen=True):
    """What every session contract of this router says (4.1), and how many requests it takes."""

    m_max: int = 8
    m_init: int = 4
    low_rounds: int = 4
    low_ratio: int = 0
    fallback: tuple[int, ...] = (Action.REDUCE, Action.REDUCE, Action.SELF_DECODE, Action.SELF_DECODE)
    self_load: int = 100
    self_max: int = 32
    active: int = 32  # sessions at work; more wait, so that each one is fast enough to be useful
    queue: int = 256  # waiting requests; more would wait longer than clients do
    wait_seconds: float = 120.0  # of a queued request, then 503


class RouterRole:
    """Implements ``RouterPort`` and ``Serving``. ``drafted`` False: no drafter is configured at all."""

    def __init__(
        self,
        machine: Router,
        card: ModelCard,
        verifiers: Mapping[str, VerifierPort],
        drafters: Mapping[str, DrafterPort],
        commit_log: CommitLog,
        objects: ObjectStore,
        terms: Terms | None = None,
    ) -> None:
        self.machine = machine
        self.terms = terms = terms or Terms()
        self._card = card
        self._verifiers = verifiers
        self._drafters = drafters
        self._log = commit_log
        self._objects = objects
        self._slots = asyncio.Semaphore(terms.active)
        self._waiting = 0
        self._active: dict[SessionId, _Active] = {}
        self._reported = asyncio.Event()  # an instance has told its status
        self._ended = asyncio.Event()  # a session has ended: there may be room again
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._tick())

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ready(self, *, drafters: bool) -> None:
        """Wait until a verifier, and a drafter where there are any, has reported."""
        while not self.machine.alive(Role.VERIFIER, _now_ms()) or (
            drafters and not self.machine.alive(Role.DRAFTER, _now_ms())
        ):
            self._reported.clear()
            await self._reported.wait()

    # ---- RouterPort ------------------------------------------------------------------------------

    async def status(self, status: Status) -> None:
        self.machine.status(status, _now_ms())
        self._reported.set()

    async def event(self, event: Event) -> None:
        self._carry_out(self.machine.event(event, _now_ms()))

    # ---- Serving ---------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        return self._card

    def stats(self) -> dict[str, Any]:
        return {
            "active": len(self._active),
            "waiting": self._waiting,
            "capacity": self.terms.active,
            "instances": [
                {
                    "base": i.base,
                    "role": i.role.name.lower(),
                    "load": i.status.load,
                    "queue": i.status.queue,
                    "sessions": i.sessions,
                    "accept_milli": None if i.status.accept_milli is UNSET else i.status.accept_milli,
                }
                for i in self.machine.instances.values()
            ],
        }

    async def generate(self, request: GenerateRequest) -> Reader:
        """Admit a request; two live requests with the same session id are one session with two readers."""
        live = None if request.session is None else self._active.get(request.session)
        if live is None:
            live = await self._admit(request)
        live.readers += 1
        return Reader(self, live)

    async def _admit(self, request: GenerateRequest) -> _Active:
        if self._slots.locked() and self._waiting >= self.terms.queue:
            raise TooManyRequests("the queue is full", retry_after_ms=1000)
        deadline = time.monotonic() + self.terms.wait_seconds
        self._waiting += 1
        try:
            try:
                await asyncio.wait_for(self._slots.acquire(), self.terms.wait_seconds)
            except TimeoutError:
                raise Unavailable("no slot became free in time", retry_after_ms=5000) from None
            try:
                return await self._open(request, deadline)
            except BaseException:
                self._slots.release()
                raise
        finally:
            self._waiting -= 1

    async def _open(self, request: GenerateRequest, deadline: float) -> _Active:
        while True:
            session = request.session or secrets.token_bytes(16)
            known = self._active.get(session)
            if known is not None:  # an identical request was admitted while this one waited
                self._slots.release()
                return known
            opening = self._opening(request, session)
            drafted = request.speculative and bool(self._drafters)
            options = OpenOptions(lead=True, undrafted=not drafted, top_logprobs=request.top_logprobs)
            steps = self.machine.admit(opening, request.prompt, options, self.terms.m_init, _now_ms(), drafted=drafted)
            active = self._active[session] = _Active(session, opening.commit_log)
            try:
                await self._step(steps.pop())
            except Unavailable:
                self._forget(active)
                if time.monotonic() >= deadline:
                    raise
                self._ended.clear()
                try:
                    await asyncio.wait_for(self._ended.wait(), ROOM_RETRY_SECONDS)
                except TimeoutError:
                    continue
            except BaseException:
                self._forget(active)
                raise
            else:
                return active

    def _opening(self, request: GenerateRequest, session: SessionId) -> SessionOpen:
        terms = self.terms
        contract = Contract(
            target=self._card.target,
            tokenizer=self._card.tokenizer,
            rule=int(request.rule),
            sampling=request.sampling,
            m_max=terms.m_max,
            max_new=request.max_new,
            stop=request.stop,
            low_rounds=terms.low_rounds,
            low_ratio=terms.low_ratio,
            fallback=tuple(int(entry) for entry in terms.fallback),
            self_load=terms.self_load,
            self_max=terms.self_max,
            scope=session,
        )
        name = secrets.token_hex(16)  # a log belongs to one attempt: a later identical request starts another
        return SessionOpen(
            session=session,
            epoch=1,
            contract=contract,
            prompt=request.prompt,
            commit_log=f"mlc://local/{session.hex()}/log/{name}",
        )

    # ---- steps -----------------------------------------------------------------------------------

    def _carry_out(self, steps: list[Step]) -> None:
        for step in steps:
            self._spawn(self._try(step))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a router task failed", exc_info=task.exception())

    async def _try(self, step: Step) -> None:
        try:
            await self._step(step)
        except Refusal as refusal:
            stage = {
                Open: Stage.OPENING,
                Inform: Stage.INFORMING,
                Assign: Stage.ASSIGNING,
                Fence: Stage.FENCING,
                ReadRecords: Stage.READING,
            }.get(type(step))
            if stage is not None:
                self._carry_out(self.machine.failed(step.session, stage, refusal, _now_ms()))

    async def _step(self, step: Step) -> None:
        match step:
            case Open():
                state = await self._verifiers[step.verifier].open(step.message, step.options)
                active = self._active.get(step.session)
                if active is not None:
                    active.verifier, active.epoch = step.verifier, step.message.epoch
                    active.moved.set()
                self._carry_out(self.machine.opened(step.session, state, _now_ms()))
            case Inform():
                state = await self._verifiers[step.verifier].assign(step.assignment)
                self._carry_out(self.machine.informed(step.session, state))
            case Assign():
                await self._drafters[step.drafter].assign(step.assignment)
                self._carry_out(self.machine.assigned(step.session))
            case Fence():
                done = await self._log.fence(step.log, step.epoch)
                highest = (
                    step.epoch if done else max((r.epoch for r in await self._log.read(step.log)), default=step.epoch)
                )
                self._carry_out(self.machine.fenced(step.session, done, highest))
            case ReadRecords():
                records = await self._log.read(step.log)
                tokens = [token for record in records for token in getattr(record, "emitted", ())]
                uri = f"mlc://local/{step.session.hex()}/tokens/{secrets.token_hex(16)}"
                await self._objects.put(uri, cbor.encode_value(tokens))
                self._carry_out(self.machine.records(step.session, records, uri, _now_ms()))
            case SendPolicy():
                await self._verifiers[step.verifier].policy(step.policy)
            case Ended():
                active = self._active.get(step.session)
                if active is not None and step.error:
                    active.error = step.error
                    active.moved.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._carry_out(self.machine.tick(_now_ms()))

    # ---- readers ---------------------------------------------------------------------------------

    async def read(self, active: _Active, from_: int) -> Chunk:
        """The next committed chunk, wherever the session lives now; output of an older epoch is discarded (6.7)."""
        while True:
            if active.error:
                return Chunk(from_, active.epoch, (), (), True, int(Action.FAIL), active.error)
            epoch = active.epoch
            try:
                chunk = await self._verifiers[active.verifier].chunk(active.session, from_)
            except (StaleEpoch, UnknownSession, Unavailable, SessionClosed) as refusal:
                if isinstance(refusal, UnknownSession | SessionClosed) and active.epoch == epoch:
                    active.error = active.error or "the session was closed"
                    continue
                self._carry_out(self.machine.verifier_lost(active.session))
                active.moved.clear()
                await active.moved.wait()
                continue
            if chunk.epoch >= active.epoch and (chunk.tokens or chunk.final):
                return chunk

    async def leave(self, active: _Active) -> None:
        """A reader is done; with the last one the session ends and everything it held is free."""
        active.readers -= 1
        if active.readers > 0 or self._active.get(active.session) is not active:
            return
        self._forget(active)
        self._slots.release()
        verifier = self._verifiers.get(active.verifier)
        if verifier is not None:
            with suppress(Refusal):  # it may have forgotten the session already
                await verifier.close(active.session)
        await self._log.drop(active.commit_log)

    def _forget(self, active: _Active) -> None:
        self.machine.forget(active.session)
        self._active.pop(active.session, None)
        self._ended.set()


class _Active(Struct, eq=False):
    """A live session and who reads it."""

    session: SessionId
    commit_log: str
    verifier: str = ""
    epoch: int = 1
    readers: int = 0
    error: str = ""
    moved: asyncio.Event = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.moved = asyncio.Event()


class Reader:
    """One reader of one session; implements ``Generation``."""

    def __init__(self, router: RouterRole, active: _Active) -> None:
        self._router = router
        self._active = active
        self._open = True

    @property
    def session(self) -> SessionId:
        return self._active.session

    async def chunks(self, from_: int = 0) -> AsyncIterator[Chunk]:
        while True:
            chunk = await self._router.read(self._active, from_)
            yield chunk
            if chunk.final:
                return
            from_ += len(chunk.tokens)

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self._router.leave(self._active)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
