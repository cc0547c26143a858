"""The router role: admits requests, carries out the router machine's steps, and hands committed output on.

To the front end it is ``Serving``, to the other roles ``RouterPort``. The order of steps is in ``core/routing.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from msgspec import UNSET, Struct, field

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import Action, Event, Role, SessionId, SessionOpen, Status
from sdcp_mono.core.names import MlcUri
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
from sdcp_mono.core.problems import (
    Conflict,
    Forbidden,
    Refusal,
    SessionClosed,
    StaleEpoch,
    TooManyRequests,
    Unavailable,
    UnknownSession,
    Unprocessable,
)
from sdcp_mono.core.routing import Router, Stage
from sdcp_mono.core.steps import Assign, Ended, Fence, Inform, Open, ReadRecords, SendPolicy, Step
from sdcp_mono.core.traces import Tracer, Untraced, Wish
from sdcp_mono.roles.journey import Journey
from sdcp_mono.roles.tasks import Tasks, repeat
from sdcp_mono.roles.terms import Terms

log = logging.getLogger(__name__)

SCOPE: Final = hashlib.sha256(b"sdcp-mono front end").digest()[:16]
"""Cache scope of this front end's sessions: they share the KV of equal prefixes, other scopes' don't (section 9)."""

TICK_SECONDS: Final = 0.25
ROOM_RETRY_SECONDS: Final = 0.5  # how often a request that fits no verifier looks again if nothing ended meanwhile
READ_MS: Final = 2_000  # of one poll, so also how late a reader may notice that its session lives elsewhere by now
TOKENS_TTL_MS: Final = 60_000  # of the committed tokens for a new verifier, which reads them at once
STEP_RETRY_MS: Final = 100  # before a step of a failover is repeated
STAGES: Final[Mapping[type[Any], Stage]] = {
    Open: Stage.OPENING,
    Inform: Stage.INFORMING,
    Assign: Stage.ASSIGNING,
    Fence: Stage.FENCING,
    ReadRecords: Stage.READING,
}


class RouterRole:
    """Implements ``RouterPort`` and ``Serving``.

    ``verifiers`` and ``drafters`` are all it may call, by base URI. ``reference`` is how others name an object of this
    process.
    """

    def __init__(
        self,
        machine: Router,
        card: ModelCard,
        verifiers: Mapping[str, VerifierPort],
        drafters: Mapping[str, DrafterPort],
        commit_log: CommitLog,
        objects: ObjectStore,
        terms: Terms | None = None,
        reference: Callable[[MlcUri], str] = str,
        tracer: Tracer | None = None,
    ) -> None:
        self.machine = machine
        self._tracer = tracer or Untraced()
        self.terms = terms = terms or Terms()
        self._card = card
        self._verifiers = verifiers
        self._drafters = drafters
        self._log = commit_log
        self._objects = objects
        self._reference = reference
        self._slots = asyncio.Semaphore(terms.active)
        self._waiting = 0
        self._active: dict[SessionId, _Active] = {}
        self._reported = asyncio.Event()  # an instance has told its status
        self._ended = asyncio.Event()  # a session has ended: there may be room again
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.start(repeat(TICK_SECONDS, self._tick))

    async def stop(self) -> None:
        await self._tasks.stop()

    async def ready(self, *, drafters: bool) -> None:
        """Wait until a verifier, and a drafter where there are any, has reported."""
        while not self.machine.alive(Role.VERIFIER, _now_ms()) or (
            drafters and not self.machine.alive(Role.DRAFTER, _now_ms())
        ):
            self._reported.clear()
            await self._reported.wait()

    # ---- RouterPort ------------------------------------------------------------------------------

    async def status(self, status: Status) -> None:
        """Raises ``Forbidden`` for an instance that is not to be called: it must not be chosen either."""
        known = self._verifiers if status.role == Role.VERIFIER else self._drafters
        if (status.instance if status.base is UNSET else status.base) not in known:
            raise Forbidden("base: not an instance that this router works with")
        self.machine.status(status, _now_ms())
        self._reported.set()

    async def event(self, event: Event) -> None:
        steps = self.machine.event(event, _now_ms())
        active = self._active.get(event.session)
        if active is not None:
            active.journey.told(event)
        self._carry_out(steps)

    def verifier_of(self, session: SessionId) -> str | None:
        routed = self.machine.sessions.get(session)
        return None if routed is None else routed.verifier

    # ---- Serving ---------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        return self._card

    def stats(self) -> dict[str, Any]:
        now_ms = _now_ms()
        return {
            "active": len(self._active) - self._waiting,
            "waiting": self._waiting,
            "capacity": self.terms.active,
            "instances": [
                {
                    "base": i.base,
                    "alive": now_ms < i.expires_ms,
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
        session = request.session or secrets.token_bytes(16)
        if request.resume and not request.session:
            raise Unprocessable("resume: of which session?")
        while (active := self._active.get(session)) is not None and active.ending is not None:
            await asyncio.wait((active.ending,))  # the id is free when nothing of it is left
        if active is None:
            if self._slots.locked() and self._waiting >= self.terms.queue:
                raise TooManyRequests("the queue is full", retry_after_ms=1000)
            # A log belongs to one attempt: a later identical request starts another.
            commit_log = self._reference(_local("log", request.resume))
            wish = Wish(request, self._card.name, commit_log.rpartition("/")[2])
            active = _Active(session, commit_log, Journey(self._tracer, session, wish))
            self._active[session] = active
            self._waiting += 1
            active.opening = self._tasks.start(self._admit(active, request))
        active.readers += 1
        reader = Reader(self, active)
        assert active.opening is not None
        try:
            await asyncio.shield(active.opening)  # who leaves leaves the other readers their session
        except BaseException:
            await reader.close()
            raise
        return reader

    async def _admit(self, active: _Active, request: GenerateRequest) -> None:
        """Wait for a slot, then for a verifier with room; bounded by ``wait_seconds``."""
        deadline = time.monotonic() + self.terms.wait_seconds
        try:
            try:
                async with asyncio.timeout(self.terms.wait_seconds):
                    await self._slots.acquire()
            except TimeoutError:
                raise Unavailable("no slot became free in time", retry_after_ms=5000) from None
            active.slot = True
            active.journey.admitted()
            if request.resume:
                await self._recover(active, request)
                return
            while not await self._open(active, request, last=time.monotonic() >= deadline):
                self._ended.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(ROOM_RETRY_SECONDS):
                        await self._ended.wait()
        finally:
            self._waiting -= 1

    def _wanted(self, request: GenerateRequest) -> tuple[OpenOptions, bool]:
        """How to open, and whether it will be drafted."""
        expected = self.terms.drafted or bool(self.machine.alive(Role.DRAFTER, _now_ms()))
        drafted = request.speculative and expected
        options = OpenOptions(lead=True, undrafted=not drafted, transient=True, top_logprobs=request.top_logprobs)
        return options, drafted

    async def _recover(self, active: _Active, request: GenerateRequest) -> None:
        """Go on where an earlier attempt's log ends; it can't be an attempt at anything else (AMB-059)."""
        options, drafted = self._wanted(request)
        opening = self._opening(request, active)
        moved = active.moved
        self._carry_out(
            self.machine.recover(opening, request.prompt, options, self.terms.first_limit(request), drafted=drafted)
        )
        await asyncio.wait((moved,))
        if active.error:
            raise UnknownSession(f"resume: {active.error}")

    async def _open(self, active: _Active, request: GenerateRequest, *, last: bool) -> bool:
        """Open the session at a verifier; False if none has room now, which ``last`` turns into a refusal."""
        options, drafted = self._wanted(request)
        opening = self._opening(request, active)
        m_init = self.terms.first_limit(request)
        (step,) = self.machine.admit(opening, request.prompt, options, m_init, _now_ms(), drafted=drafted)
        try:
            await self._step(step)
        except BaseException as error:
            if isinstance(error, Refusal) and self._moved_on(active.session, opening.epoch):
                return True
            self.machine.forget(active.session)
            # An earlier session of the same id, whose router died, is waited for: it ends by itself.
            if last or not isinstance(error, Unavailable | Conflict | StaleEpoch):
                raise
            return False
        return True

    def _moved_on(self, session: SessionId, epoch: int) -> bool:
        """Whether the verifier that was asked with ``epoch`` has been given up meanwhile."""
        routed = self.machine.sessions.get(session)
        return routed is not None and routed.epoch > epoch

    def _opening(self, request: GenerateRequest, active: _Active) -> SessionOpen:
        contract = self.terms.contract(request, self._card, SCOPE)
        return SessionOpen(
            session=active.session, epoch=1, contract=contract, prompt=request.prompt, commit_log=active.commit_log
        )

    # ---- steps -----------------------------------------------------------------------------------

    def _carry_out(self, steps: list[Step]) -> None:
        for step in steps:
            task = self._tasks.start(self._try(step))
            active = self._active.get(step.session)
            if active is not None:
                active.steps.add(task)
                task.add_done_callback(active.steps.discard)

    async def _try(self, step: Step) -> None:
        try:
            await self._step(step)
        except Refusal as refusal:
            await self._failed(step, refusal)
        except Exception as error:  # a fault here is no answer there
            log.exception("a step of a session failed")
            await self._failed(step, Unavailable(f"{type(step).__name__.lower()}: {type(error).__name__}"))

    async def _failed(self, step: Step, refusal: Refusal) -> None:
        stage = STAGES.get(type(step))
        if stage is None or (isinstance(step, Open) and self._moved_on(step.session, step.message.epoch)):
            return
        if stage in (Stage.OPENING, Stage.FENCING, Stage.READING):
            await asyncio.sleep((refusal.retry_after_ms or STEP_RETRY_MS) / 1000)
        self._carry_out(self.machine.failed(step.session, stage, refusal, _now_ms()))

    async def _step(self, step: Step) -> None:
        routed = self._active.get(step.session)
        if routed is not None:
            routed.journey.begins(step)
        match step:
            case Open():
                active = self._active[step.session]
                active.asked = step.verifier
                if step.message.resume is UNSET:
                    await self._log.create(active.commit_log)  # AMB-071
                state = await self._verifiers[step.verifier].open(step.message, step.options)
                if self._moved_on(step.session, step.message.epoch):
                    return  # a late answer: the session was given up there, and lives or will live elsewhere
                active.verifier, active.epoch = step.verifier, step.message.epoch
                active.moves()
                active.journey.opened(active.verifier, active.epoch)
                self._carry_out(self.machine.opened(step.session, state, _now_ms()))
            case Inform():
                state = await self._verifiers[step.verifier].assign(step.assignment)
                self._carry_out(self.machine.informed(step.session, state))
            case Assign():
                await self._drafters[step.drafter].assign(step.assignment)
                if routed is not None:
                    routed.journey.assigned(step.drafter, step.assignment.epoch)
                self._carry_out(self.machine.assigned(step.session, _now_ms()))
            case Fence():
                done = await self._log.fence(step.log, step.epoch)
                highest = (
                    step.epoch if done else max((r.epoch for r in await self._log.read(step.log)), default=step.epoch)
                )
                self._carry_out(self.machine.fenced(step.session, done, highest))
            case ReadRecords():
                records = await self._log.read(step.log)
                tokens = [token for record in records for token in getattr(record, "emitted", ())]
                uri = _local("tokens")
                await self._objects.put(str(uri), cbor.encode_value(tokens), ttl_ms=TOKENS_TTL_MS)
                self._carry_out(self.machine.records(step.session, records, self._reference(uri), _now_ms()))
            case SendPolicy():
                await self._verifiers[step.verifier].policy(step.policy)
            case Ended():
                ended = self._active.get(step.session)
                if ended is not None and step.error:
                    ended.error = step.error
                    ended.moves()

    async def _tick(self) -> None:
        self._carry_out(self.machine.tick(_now_ms()))

    # ---- readers ---------------------------------------------------------------------------------

    async def read(self, active: _Active, from_: int) -> Chunk:
        """The next committed chunk, wherever the session lives now; output of an older epoch is discarded (6.7)."""
        while True:
            if active.error:
                return Chunk(from_, active.epoch, (), (), True, int(Action.FAIL), active.error)
            epoch, moved = active.epoch, active.moved
            if not active.verifier:  # it was given up before it had opened the session
                await asyncio.wait((moved,))
                continue
            asking = asyncio.ensure_future(self._verifiers[active.verifier].chunk(active.session, from_, READ_MS))
            try:
                # A verifier that is paused or cut off doesn't answer; the reader must not wait for that.
                await asyncio.wait((asking, moved), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    continue
                chunk = asking.result()
            except (StaleEpoch, UnknownSession, Unavailable, SessionClosed) as refusal:
                if active.epoch != epoch or active.error:
                    continue  # it moved while we asked
                if isinstance(refusal, UnknownSession | SessionClosed):
                    active.error = "the session was closed"
                    continue
                self._carry_out(self.machine.verifier_lost(active.session, epoch))
                await asyncio.wait((moved,))
            else:
                if chunk.epoch >= active.epoch and (chunk.tokens or chunk.final):
                    active.journey.read(chunk)
                    return chunk
            finally:
                asking.cancel()

    async def leave(self, active: _Active) -> None:
        """A reader is done; with the last one the session ends and everything it held is free."""
        active.readers -= 1
        if active.readers == 0:
            active.ending = self._tasks.start(self._end(active))
            await asyncio.shield(active.ending)  # a second cancellation must not leave half of it

    async def _end(self, active: _Active) -> None:
        assert active.opening is not None
        running = [active.opening, *active.steps]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            if active.asked in self._verifiers:
                with suppress(Refusal):  # it may have forgotten the session already
                    await self._verifiers[active.asked].close(active.session)
            with suppress(Refusal):
                await self._log.drop(active.commit_log)
        finally:
            self.machine.forget(active.session)
            del self._active[active.session]
            active.journey.ended(active.error or _failure(active.opening))
            if active.slot:
                self._slots.release()
            self._ended.set()


class _Active(Struct, eq=False):
    """A live session and who reads it."""

    session: SessionId
    commit_log: str
    journey: Journey
    opening: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    steps: set[asyncio.Task[None]] = field(default_factory=set)
    slot: bool = False
    asked: str = ""  # the verifier that was last asked to open it
    verifier: str = ""  # the one that has opened it
    epoch: int = 1
    readers: int = 0
    error: str = ""
    moved: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def moves(self) -> None:
        """Wake whoever waits for the session to live elsewhere, or to be given up."""
        before, self.moved = self.moved, asyncio.get_running_loop().create_future()
        before.set_result(None)


class Reader:
    """One reader of one session; implements ``Generation``."""

    def __init__(self, router: RouterRole, active: _Active) -> None:
        self._router = router
        self._active = active
        self._open = True

    @property
    def session(self) -> SessionId:
        return self._active.session

    @property
    def log(self) -> str:
        return self._active.commit_log.rpartition("/")[2]

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


def _local(kind: str, name: str = "") -> MlcUri:
    """An object of this process, a new one without ``name``; raises ``Malformed`` for a name that can't be."""
    return MlcUri("local", SCOPE, kind, name or secrets.token_hex(16))


def _failure(opening: asyncio.Task[None]) -> str:
    """Why a session could not be opened; empty if it was, or if nobody waited for it."""
    error = None if opening.cancelled() else opening.exception()
    return error.detail if isinstance(error, Refusal) else "" if error is None else type(error).__name__


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
