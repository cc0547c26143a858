"""The drafter's side of one session (6.2): what to propose next, and what a verdict or a refusal means.

Pure: the role drafts tokens, publishes rows and talks to the verifier; this says when, with which limits, and whether
what it knows of the committed prefix is still true.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum, auto
from typing import Final

from msgspec import UNSET, UnsetType

from sdcp_mono.core import contract as contracts
from sdcp_mono.core import digest as digests
from sdcp_mono.core.messages import (
    Action,
    Assignment,
    Decline,
    Output,
    Proposal,
    Rule,
    Sampling,
    SessionState,
    Status,
    Verdict,
    action_of,
)
from sdcp_mono.core.problems import (
    BadContract,
    BadProposal,
    Conflict,
    LimitExceeded,
    QUnavailable,
    Refusal,
    StaleBase,
    StaleEpoch,
    TooManyRequests,
    Unavailable,
)

MAX_REFUSED: Final = 8  # refusals in a row before a drafter gives a session up; the router will notice and reassign


class Next(Enum):
    """What the role does now."""

    DRAFT = auto()  # prepare the proposal of the next round
    DECLINE = auto()  # let the verifier decode this round by itself
    RETRY = auto()  # send the same proposal again (idempotent, 6.9), after a pause
    RESYNC = auto()  # fetch output from ``resync_from`` (AMB-089)
    STOP = auto()  # drop the session; only a new assignment restarts it


def check_assignment(assignment: Assignment, base: str, model: bytes, verifiers: Container[str]) -> None:
    """What a drafter refuses (AMB-085). The contract's shape was checked when the message was decoded."""
    contracts.validate(assignment.contract)
    permitted = assignment.contract.drafters
    if permitted is not UNSET and model not in permitted:
        raise BadContract("drafters: this drafter's model is not permitted")
    if assignment.drafter != base:
        raise BadContract("drafter: the assignment names another drafter")
    if assignment.verifier not in verifiers:  # AMB-045
        raise BadContract("verifier: not one this drafter works with")


class DraftSession:
    """One assigned session. ``prefix`` is prompt plus committed output, append-only and shared with the draft model."""

    def __init__(self, assignment: Assignment, prompt: Sequence[int]) -> None:
        self.assignment = assignment
        self.prefix: list[int] = list(prompt)
        self.prompt_length = len(prompt)
        self.origin = digests.prefix_digest(digests.contract_digest(assignment.contract), prompt)
        self.digest = self.origin
        self.round = assignment.round
        self.m_cap = self._clamp(assignment.m_init)
        self.outstanding: Proposal | None = None
        self.refused = 0
        self._truth = (assignment.committed, assignment.digest)  # (n, d[n]) as last told by the verifier

    @property
    def committed(self) -> int:
        return len(self.prefix) - self.prompt_length

    @property
    def behind(self) -> bool:
        """The verifier has committed something else than what is known here."""
        return (self.committed, self.digest) != self._truth

    @property
    def resync_from(self) -> int:
        return self.committed

    @property
    def rule(self) -> Rule:
        return Rule(self.assignment.contract.rule)

    @property
    def sampling(self) -> Sampling:
        updated = self.assignment.sampling
        return contracts.sampling_of(self.assignment.contract) if updated is UNSET else updated

    @property
    def seeded(self) -> bool:
        return contracts.seeded(self.assignment.contract)

    @property
    def limit(self) -> int:
        """The largest M that is worth proposing now (6.2, AMB-125): m_cap, and what max_new leaves room for."""
        room = self.assignment.contract.max_new - self.committed
        return min(self.m_cap, max(1, room - 1))

    def _clamp(self, m_cap: int) -> int:
        return max(1, min(m_cap, self.assignment.contract.m_max))  # AMB-078, AMB-080

    def propose(self, tokens: tuple[int, ...], q_rows: str | UnsetType, status: Status) -> Proposal:
        assert self.outstanding is None  # 6.2: never more than one outstanding proposal
        assert 1 <= len(tokens) <= self.m_cap
        self.outstanding = Proposal(
            session=self.assignment.session,
            epoch=self.assignment.epoch,
            round=self.round + 1,
            drafter=self.assignment.drafter,
            base=self.committed,
            base_digest=self.digest,
            tokens=tokens,
            q_rows=q_rows,
            status=status,
        )
        return self.outstanding

    def decline(self) -> Decline:
        return Decline(
            session=self.assignment.session,
            epoch=self.assignment.epoch,
            round=self.round + 1,
            drafter=self.assignment.drafter,
        )

    def declined(self, state: SessionState) -> Next:
        """The verifier decoded a token by itself; fetch it."""
        self.refused = 0
        return self._told(state)

    def verdict(self, verdict: Verdict) -> Next:
        """Adopt a verdict (6.3 end). What is valid is what was emitted, not what ``accepted`` says (AMB-090)."""
        self.outstanding, self.refused = None, 0
        self.round = verdict.round
        self.m_cap = self._clamp(verdict.m_cap)
        self._truth = (verdict.committed, verdict.digest)
        digest = digests.extend(self.digest, verdict.emitted)
        if (self.committed + len(verdict.emitted), digest) == self._truth:
            self.prefix.extend(verdict.emitted)
            self.digest = digest
        if action_of(verdict.action) not in (Action.CONTINUE, Action.REDUCE):  # 5.2: unknown means fail
            return Next.STOP
        return self._go_on()

    def refusal(self, refusal: Refusal) -> Next:
        self.refused += 1
        if self.refused > MAX_REFUSED:
            return Next.STOP
        match refusal:
            case StaleBase():
                return self._told(refusal.state)
            case Unavailable() | TooManyRequests() if self.outstanding is not None:
                return Next.RETRY
            case Unavailable() | TooManyRequests():
                return self._go_on()
            case LimitExceeded():
                self.m_cap = max(1, self.m_cap // 2)
            case QUnavailable() | BadProposal():
                pass  # nothing was committed and the round is still free: draft it afresh, once
            case _:
                return Next.STOP  # not assigned, closed, stale epoch, unknown (AMB-084)
        again = isinstance(refusal, LimitExceeded) or self.refused == 1
        self.outstanding = None
        return Next.DRAFT if again else Next.DECLINE

    def _told(self, state: SessionState) -> Next:
        self.outstanding = None
        if state.epoch != self.assignment.epoch or state.round < self.round:
            return Next.STOP  # rounds never go back: it is another session of the same id by now
        self.round = state.round
        self._truth = (state.committed, state.digest)
        return self._go_on()

    def _go_on(self) -> Next:
        return Next.RESYNC if self.behind else Next.DRAFT  # AMB-091

    def resynced(self, output: Output) -> Next:
        """Adopt fetched output; if it doesn't lead to the known digest, start over from index 0 (AMB-089)."""
        if output.epoch != self.assignment.epoch:
            return Next.STOP  # 6.9: somebody else's epoch
        if output.from_ == 0:
            self._forget()
        wanted = self._truth[0] - self.committed
        if wanted < 0 or output.from_ != self.committed or (wanted and not output.tokens):
            return self._start_over()
        tokens = output.tokens[:wanted]
        self.prefix.extend(tokens)
        self.digest = digests.extend(self.digest, tokens)
        if output.final and len(tokens) >= wanted and self.committed == self._truth[0] and not self.behind:
            return Next.STOP
        if self.committed < self._truth[0]:
            return Next.RESYNC
        return Next.DRAFT if not self.behind else self._start_over()

    def _forget(self) -> None:
        self.prefix = self.prefix[: self.prompt_length]  # a new list: a model may still hold the old one
        self.digest = self.origin

    def _start_over(self) -> Next:
        self.refused += 1
        if self.refused > MAX_REFUSED:
            return Next.STOP
        self._forget()
        return Next.RESYNC


def check_newer(new: Assignment, old: Assignment) -> None:
    """Refuse an assignment that is older than the one at work (AMB-086); any other replaces it."""
    if new.epoch < old.epoch:
        raise StaleEpoch(f"epoch: the session's epoch is {old.epoch}")
    if new.epoch == old.epoch and new.verifier == old.verifier and new.round < old.round:
        raise Conflict(f"round: an assignment of round {old.round} is at work")
