"""The router's machine: who is alive, who gets a session, and the order of steps when something dies (6.1, 6.9).

Calls and answers come in, steps to carry out go out. Each session follows one line of steps; an answer is matched to
the step that asked for it, so a late one changes nothing:

    Open -> Inform (PUT drafter) -> Assign (POST assignments) -> running
    drafter lost, or event 2 or 3:   Inform -> Assign -> running
    verifier lost, or taken up again from its log:
                                     Fence -> ReadRecords -> Open (epoch + 1, resume) -> Inform -> Assign -> running
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from enum import Enum, auto
from typing import Final

from msgspec import UNSET, Struct, UnsetType, structs

from sdcp_mono.core import contract as contracts
from sdcp_mono.core import digest as digests
from sdcp_mono.core.messages import (
    Action,
    Assignment,
    CommitRecord,
    Contract,
    Event,
    FenceRecord,
    Policy,
    Resume,
    Role,
    Rule,
    Sampling,
    SessionId,
    SessionOpen,
    SessionState,
    Status,
    Token,
    action_of,
)
from sdcp_mono.core.ports import OpenOptions
from sdcp_mono.core.problems import Conflict, Refusal, SessionClosed, StaleEpoch, Unavailable, UnknownSession
from sdcp_mono.core.steps import Assign, Ended, Fence, Inform, Open, ReadRecords, SendPolicy, Step

MAX_TTL_MS: Final = 60_000  # a longer promise than this would hide a death for too long (AMB-184)
LEAVING_TTL_MS: Final = 1  # of the reports of an instance that is about to stop; 0: it is of no use already
LEAVING_MS: Final = 2_000  # from its last report, until it has stopped; it reports ten times a second
MAX_INSTANCES: Final = 1024  # those that came and went are forgotten; more than this within a minute are a fault
MAX_TRIES: Final = 5  # drafters or verifiers that are tried for one session before it waits or is given up
STRANDED_MS: Final = 60_000  # without any verifier alive a session is kept this long: a restart takes less
AVOID_MS: Final = 1_000  # a drafter that was just left is taken again only if no other has come by then (AMB-117)


class Instance(Struct):
    """A drafter or verifier as last reported."""

    base: str
    role: Role
    status: Status
    expires_ms: int
    heard_ms: int
    sessions: int = 0


class Candidate(Struct, frozen=True):
    """What a selection policy looks at."""

    base: str
    load: int
    queue: int
    accept_milli: int
    sessions: int


def prefer_idle(candidate: Candidate) -> tuple[int, int, int, str]:
    """The default policy (6.1): fewest sessions and shortest queue, then low load, then high acceptance."""
    return (candidate.sessions + candidate.queue, candidate.load, -candidate.accept_milli, candidate.base)


class Stage(Enum):
    OPENING = auto()
    INFORMING = auto()
    ASSIGNING = auto()
    RUNNING = auto()
    WAITING = auto()  # for a permitted drafter
    FENCING = auto()
    READING = auto()
    STRANDED = auto()  # fenced, and no verifier is alive
    ENDED = auto()


class Routed(Struct):
    """One session as the router knows it: enough to open it again elsewhere."""

    opening: SessionOpen
    prompt: tuple[Token, ...]
    options: OpenOptions
    verifier: str
    stage: Stage
    drafted: bool
    m_init: int
    epoch: int = 1
    drafter: str = ""
    avoid: str = ""  # the drafter that was just left
    avoid_until_ms: int = 0
    pending: Assignment | None = None
    profile: Sampling | UnsetType = UNSET
    state: SessionState | None = None
    missed: Event | None = None  # it came while a drafter was being assigned
    tries: int = 0
    waiting_since_ms: int | None = None  # without a drafter at work
    stranded_since_ms: int = 0


class Router:
    """All instances and sessions of one router. Time is a monotonic millisecond argument.

    ``patience_ms``: how long a session waits for a permitted drafter before it is ended with an error (AMB-117); None
    where verifiers decode by themselves meanwhile (AMB-124), as ours do.
    """

    def __init__(
        self,
        *,
        models: dict[str, tuple[bytes, ...]] | None = None,
        trusted: Container[str] = frozenset(),
        prefer: Callable[[Candidate], tuple[int | str, ...]] = prefer_idle,
        patience_ms: int | None = None,
    ) -> None:
        self.models = models or {}  # configured draft models by base URI; wins over what a status says (AMB-033)
        self.trusted = trusted
        self.prefer = prefer
        self.patience_ms = patience_ms
        self.instances: dict[tuple[str, Role], Instance] = {}
        self.sessions: dict[SessionId, Routed] = {}

    # ---- instances (6.1) -------------------------------------------------------------------------

    def status(self, status: Status, now_ms: int) -> None:
        """PUT status. The clock is ours: a report is good for ttl_ms from now (AMB-183)."""
        base = status.base if status.base is not UNSET else status.instance
        key = (base, Role(status.role))
        expires = now_ms + min(status.ttl_ms, MAX_TTL_MS)
        known = self.instances.get(key)
        if known is None:
            if len(self.instances) >= MAX_INSTANCES:
                raise Unavailable("too many instances report to this router")
            self.instances[key] = Instance(base, key[1], status, expires, now_ms)
        else:  # a report says everything, so one is enough after a gap
            known.status, known.expires_ms, known.heard_ms = status, expires, now_ms

    def alive(self, role: Role, now_ms: int) -> list[Instance]:
        return [i for i in self.instances.values() if i.role is role and now_ms < i.expires_ms]

    def _choose(self, instances: Sequence[Instance]) -> Instance | None:
        def rank(instance: Instance) -> tuple[int | str, ...]:
            status = instance.status
            milli = status.accept_milli if status.accept_milli is not UNSET else 0
            return self.prefer(Candidate(instance.base, status.load, status.queue, milli, instance.sessions))

        return min(instances, key=rank, default=None)

    def drafter_for(self, contract: Contract, now_ms: int, avoid: str = "") -> Instance | None:
        """A live drafter that the contract permits (6.1, SDCP-034), trusted if rule 2 needs it (section 9)."""
        drafters = self.alive(Role.DRAFTER, now_ms)
        return self._choose([i for i in drafters if i.base != avoid and self._permits(contract, i)])

    def _verifier_for(self, contract: Contract, now_ms: int, avoid: str = "") -> Instance | None:
        """A live verifier, of the contract's target where it says what it serves; ``avoid`` only if it is the last."""
        alive = self.alive(Role.VERIFIER, now_ms)
        able = [i for i in alive if i.status.models is UNSET or contract.target in i.status.models]
        return self._choose([i for i in able if i.base != avoid] or able)

    def _permits(self, contract: Contract, drafter: Instance) -> bool:
        if contract.rule == Rule.SPECULATIVE_SAMPLING and drafter.base not in self.trusted:
            return False
        if drafter.status.tokenizer is not UNSET and drafter.status.tokenizer != contract.tokenizer:
            return False
        if contract.drafters is UNSET:
            return True
        reported = () if drafter.status.models is UNSET else drafter.status.models
        models = self.models.get(drafter.base, reported)
        return bool(models) and set(contract.drafters).issuperset(models)  # it may draft with any of its models

    # ---- a session's life (6.1) ------------------------------------------------------------------

    def admit(
        self,
        opening: SessionOpen,
        prompt: tuple[Token, ...],
        options: OpenOptions,
        m_init: int,
        now_ms: int,
        *,
        drafted: bool = True,
    ) -> list[Step]:
        """Open a session at a verifier; ``drafted`` False: no drafter will be assigned."""
        if opening.session in self.sessions:
            raise Conflict("session: already open")
        contracts.validate(opening.contract)
        verifier = self._verifier_for(opening.contract, now_ms)
        if verifier is None:
            raise Unavailable("no verifier of this model is alive", retry_after_ms=1000)
        routed = Routed(opening, prompt, options, verifier.base, Stage.OPENING, drafted, m_init)
        self.sessions[opening.session] = routed
        verifier.sessions += 1
        return [Open(opening.session, verifier.base, opening, options)]

    def recover(
        self,
        opening: SessionOpen,
        prompt: tuple[Token, ...],
        options: OpenOptions,
        m_init: int,
        *,
        drafted: bool = True,
    ) -> list[Step]:
        """Take a session up again from its log, after its router or its reader was gone; nothing else is needed.

        ``opening`` must be what it was opened with; the new verifier checks it against the digests in the log.
        """
        if opening.session in self.sessions:
            raise Conflict("session: already open")
        contracts.validate(opening.contract)
        self.sessions[opening.session] = Routed(opening, prompt, options, "", Stage.RUNNING, drafted, m_init)
        return self.verifier_lost(opening.session, opening.epoch)

    def opened(self, session: SessionId, state: SessionState, now_ms: int) -> list[Step]:
        """The verifier answered; its digest must be the one computed here (SDCP-078)."""
        routed = self._at(session, Stage.OPENING)
        if routed is None:
            return []
        expected = routed.opening.resume
        digest = (
            expected.digest
            if expected is not UNSET
            else digests.prefix_digest(digests.contract_digest(routed.opening.contract), routed.prompt)
        )
        if state.digest != digest and state.committed == (0 if expected is UNSET else expected.committed):
            return self._finish(session, "the verifier computed another digest of the prompt")
        routed.state, routed.tries = state, 0
        steps: list[Step] = []
        if expected is not UNSET and routed.profile is not UNSET:  # AMB-065
            policy = Policy(session=session, from_round=state.round + 1, sampling=routed.profile)
            steps.append(SendPolicy(session, routed.verifier, policy))
        if not routed.drafted:
            routed.stage = Stage.RUNNING
            return steps
        return steps + self._inform(session, routed, now_ms)

    def _inform(self, session: SessionId, routed: Routed, now_ms: int) -> list[Step]:
        avoid = routed.avoid if now_ms < routed.avoid_until_ms else ""
        drafter = self.drafter_for(routed.opening.contract, now_ms, avoid)
        self._leave_drafter(routed)
        if drafter is None or routed.tries >= MAX_TRIES:
            routed.stage, routed.tries = Stage.WAITING, 0
            if routed.waiting_since_ms is None:
                routed.waiting_since_ms = now_ms
            return []
        state = routed.state
        assert state is not None
        routed.drafter, routed.stage = drafter.base, Stage.INFORMING
        drafter.sessions += 1
        routed.pending = Assignment(
            session=session, epoch=routed.epoch, contract=routed.opening.contract, verifier=routed.verifier,
            drafter=drafter.base, prompt=routed.opening.prompt, round=state.round, sampling=routed.profile,
            committed=state.committed, digest=state.digest, m_init=routed.m_init,
        )  # fmt: skip
        return [Inform(session, routed.verifier, routed.pending)]

    def informed(self, session: SessionId, state: SessionState) -> list[Step]:
        routed = self._at(session, Stage.INFORMING)
        if routed is None:
            return []
        assert routed.pending is not None
        routed.state, routed.stage = state, Stage.ASSIGNING
        if routed.missed is not None and routed.missed.committed <= state.committed:
            routed.missed = None  # it asked for this very assignment
        routed.pending = structs.replace(
            routed.pending, round=state.round, committed=state.committed, digest=state.digest
        )
        return [Assign(session, routed.drafter, routed.pending)]

    def assigned(self, session: SessionId, now_ms: int) -> list[Step]:
        routed = self._at(session, Stage.ASSIGNING)
        if routed is None:
            return []
        routed.stage, routed.tries, routed.waiting_since_ms = Stage.RUNNING, 0, None
        missed, routed.missed = routed.missed, None
        return [] if missed is None else self.event(missed, now_ms)

    def failed(self, session: SessionId, stage: Stage, refusal: Refusal, now_ms: int) -> list[Step]:
        """A step was refused or got no answer (then ``refusal`` is ``Unavailable``)."""
        routed = self._at(session, stage)
        if routed is None:
            return []
        match stage:
            case Stage.OPENING if self._again(routed, refusal) and routed.epoch > 1:
                return self.verifier_lost(session, routed.epoch)
            case Stage.FENCING if self._again(routed, refusal):  # SDCP-179
                return [Fence(session, routed.opening.commit_log, routed.epoch)]
            case Stage.READING if self._again(routed, refusal):
                return [ReadRecords(session, routed.opening.commit_log)]
            case Stage.INFORMING | Stage.ASSIGNING:
                if isinstance(refusal, SessionClosed | UnknownSession) and stage is Stage.INFORMING:
                    return self._finish(session, "")  # it ended before a drafter was needed; output tells how
                if isinstance(refusal, StaleEpoch) and stage is Stage.INFORMING:
                    return self._finish(session, refusal.detail)
                routed.tries += 1
                self._avoid(routed, now_ms)  # AMB-087: choose another, starting again with PUT drafter
                return self._inform(session, routed, now_ms)
            case _:
                return self._finish(session, refusal.detail)

    @staticmethod
    def _again(routed: Routed, refusal: Refusal) -> bool:
        routed.tries += 1
        return isinstance(refusal, Unavailable) and routed.tries < MAX_TRIES

    def event(self, event: Event, now_ms: int) -> list[Step]:
        """POST events. Repeated and old ones change nothing (AMB-180)."""
        routed = self.sessions.get(event.session)
        if routed is None:
            raise UnknownSession("session: unknown")  # AMB-182
        if event.epoch < routed.epoch or routed.stage is Stage.ENDED:
            return []
        if routed.state is not None and event.committed < routed.state.committed:
            return []
        match action_of(event.kind):
            case Action.SWITCH | Action.SELF_DECODE:
                if routed.stage in (Stage.INFORMING, Stage.ASSIGNING):
                    routed.missed = event
                if routed.stage is not Stage.RUNNING or routed.state is None:
                    return []
                if event.committed == routed.state.committed:
                    return []  # a repetition: whoever asks for a drafter has committed since it got the last one
                if event.kind == Action.SWITCH:
                    self._avoid(routed, now_ms)
                routed.state = structs.replace(routed.state, committed=event.committed, digest=event.digest)
                return self._inform(event.session, routed, now_ms)
            case Action.FINISH | Action.FAIL if event.kind <= Action.FAIL:
                return self._finish(event.session, "")  # its output says how, after the tokens it still has
            case Action.FAIL:
                return self._finish(event.session, f"the verifier sent an event of unknown kind {event.kind}")
        return []

    def policy(self, policy: Policy) -> list[Step]:
        """Change the sampling profile from a later round on (6.6); later assignments carry it."""
        routed = self.sessions.get(policy.session)
        if routed is None:
            raise UnknownSession("session: unknown")
        routed.profile = policy.sampling
        return [SendPolicy(policy.session, routed.verifier, policy)]

    def forget(self, session: SessionId) -> None:
        """The request is over and read to its end."""
        if session in self.sessions:
            self._finish(session, "")
            self._leave_verifier(self.sessions.pop(session))

    # ---- when something dies (6.9) ---------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Step]:
        """Reassign sessions of expired drafters, fail over those of expired verifiers, end those that wait too long."""
        steps: list[Step] = []
        drafters = {i.base for i in self.alive(Role.DRAFTER, now_ms)}
        verifiers = {i.base for i in self.alive(Role.VERIFIER, now_ms)}
        for session, routed in list(self.sessions.items()):
            if routed.stage is Stage.ENDED:
                continue
            if routed.stage is Stage.STRANDED:
                if self._verifier_for(routed.opening.contract, now_ms) is not None:
                    routed.stage = Stage.READING
                    steps.append(ReadRecords(session, routed.opening.commit_log))
                elif now_ms - routed.stranded_since_ms >= STRANDED_MS:
                    steps += self._finish(session, "no verifier is alive")
            elif routed.verifier not in verifiers and routed.stage not in (Stage.FENCING, Stage.READING):
                if not self._stays(routed, now_ms):
                    steps += self.verifier_lost(session, routed.epoch)
            elif routed.stage is Stage.WAITING:
                waited = now_ms - (now_ms if routed.waiting_since_ms is None else routed.waiting_since_ms)
                if self.patience_ms is not None and waited >= self.patience_ms:
                    steps += self._finish(session, "no drafter that the contract permits is available")
                else:
                    steps += self._inform(session, routed, now_ms)
            elif routed.stage is Stage.RUNNING and routed.drafted and routed.drafter not in drafters:
                steps += self._inform(session, routed, now_ms)
        gone = [key for key, i in self.instances.items() if now_ms >= i.expires_ms + MAX_TTL_MS and i.sessions <= 0]
        for key in gone:
            del self.instances[key]
        return steps

    def _stays(self, routed: Routed, now_ms: int) -> bool:
        """Whether a session may end where it is: its verifier only leaves, and no other could take it."""
        at = self.instances.get((routed.verifier, Role.VERIFIER))
        leaving = at is not None and at.status.ttl_ms == LEAVING_TTL_MS and now_ms - at.heard_ms < LEAVING_MS
        return leaving and self._verifier_for(routed.opening.contract, now_ms) is None

    def verifier_lost(self, session: SessionId, epoch: int) -> list[Step]:
        """Fence first, so that the old verifier, even if only cut off, commits nothing more.

        ``epoch`` is the one that was lost; if the session has moved on, nothing is. A session that has ended moves too:
        its last tokens may still have to be read (AMB-061).
        """
        routed = self.sessions.get(session)
        moving = (Stage.FENCING, Stage.READING, Stage.STRANDED)
        if routed is None or routed.epoch != epoch or routed.stage in moving:
            return []
        if routed.stage is not Stage.OPENING:
            routed.tries = 0
        routed.stage, routed.missed = Stage.FENCING, None
        routed.epoch += 1
        return [Fence(session, routed.opening.commit_log, routed.epoch)]

    def fenced(self, session: SessionId, done: bool, highest: int) -> list[Step]:
        """The fence's outcome; ``highest`` is the highest fence in the log (AMB-154: another router was faster)."""
        routed = self._at(session, Stage.FENCING)
        if routed is None:
            return []
        if not done:  # SDCP-179: no fence, no opening elsewhere
            routed.tries += 1
            if routed.tries >= MAX_TRIES:
                return self._finish(session, "the commit log can't be fenced")
            routed.epoch = max(routed.epoch, highest + 1)
            return [Fence(session, routed.opening.commit_log, routed.epoch)]
        routed.stage = Stage.READING
        return [ReadRecords(session, routed.opening.commit_log)]

    def records(
        self,
        session: SessionId,
        records: Sequence[CommitRecord | FenceRecord],
        committed_tokens: str,
        now_ms: int,
    ) -> list[Step]:
        """Open the session at another verifier, at the last commit record. ``committed_tokens``: URI of its tokens."""
        routed = self._at(session, Stage.READING)
        if routed is None:
            return []
        verifier = self._verifier_for(routed.opening.contract, now_ms, routed.verifier)
        if verifier is None:
            routed.stage, routed.stranded_since_ms = Stage.STRANDED, now_ms
            return []
        commits = [record for record in records if isinstance(record, CommitRecord)]
        origin = digests.prefix_digest(digests.contract_digest(routed.opening.contract), routed.prompt)
        last = commits[-1] if commits else None
        resume = Resume(
            round=0 if last is None else last.round,
            committed=0 if last is None else last.committed,
            digest=origin if last is None else last.digest,
            committed_tokens=committed_tokens,
        )
        self._leave_verifier(routed)
        verifier.sessions += 1
        routed.verifier, routed.stage, routed.state = verifier.base, Stage.OPENING, None
        routed.opening = structs.replace(routed.opening, epoch=routed.epoch, resume=resume)
        return [Open(session, verifier.base, routed.opening, routed.options)]

    def _at(self, session: SessionId, stage: Stage) -> Routed | None:
        routed = self.sessions.get(session)
        return routed if routed is not None and routed.stage is stage else None

    def _finish(self, session: SessionId, error: str) -> list[Step]:
        routed = self.sessions[session]
        if routed.stage is Stage.ENDED:
            return []
        routed.stage = Stage.ENDED
        self._leave_drafter(routed)
        return [Ended(session, error)]

    def _avoid(self, routed: Routed, now_ms: int) -> None:
        routed.avoid, routed.avoid_until_ms = routed.drafter, now_ms + AVOID_MS

    def _leave_drafter(self, routed: Routed) -> None:
        instance = self.instances.get((routed.drafter, Role.DRAFTER))
        if instance is not None:
            instance.sessions -= 1
        routed.drafter = ""

    def _leave_verifier(self, routed: Routed) -> None:
        instance = self.instances.get((routed.verifier, Role.VERIFIER))
        if instance is not None:
            instance.sessions -= 1
