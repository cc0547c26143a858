"""All sessions of one verifier: opening and resuming, limits, output, policies, epochs (6.1, 6.6, 6.7, 6.9).

A pure machine. Calls and answers to effects come in, effects come out; refusals are raised before any change.
Time and load come in as a ``Moment``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from itertools import count
from typing import Final

from msgspec import UNSET, Struct

from sdcp_mono.core import contract as contracts
from sdcp_mono.core import digest as digests
from sdcp_mono.core.effects import Append, Effects, Moment, Release, Reply, Ticket, Waiter
from sdcp_mono.core.messages import (
    Action,
    Assignment,
    CommitRecord,
    Decline,
    FenceRecord,
    Output,
    Policy,
    Proposal,
    SessionId,
    SessionOpen,
    SessionState,
    Token,
)
from sdcp_mono.core.ports import AppendOutcome, Chunk, ModelCard, OpenOptions, Scored, ScoreFailure, Uniforms
from sdcp_mono.core.problems import (
    Conflict,
    Malformed,
    NotAssigned,
    Refusal,
    StaleEpoch,
    Unavailable,
    UnknownSession,
    Unprocessable,
)
from sdcp_mono.core.session import Session

MAX_OUTPUT_TOKENS: Final = 64 * 1024  # tokens in one output message (AMB-170)


class Limits(Struct, frozen=True):
    """What one verifier holds at most. ``sessions`` counts live ones.

    ``retention_ms``: how long an ended session stays readable (AMB-070, 169), unless ``ended`` later ones push it out.
    """

    sessions: int = 256
    ended: int = 256  # an ended session holds its tokens and verdicts, no KV
    retention_ms: int = 60_000
    idle_ms: int = 600_000  # a session nobody drives is closed after this, so abandoned ones can't pile up


class Opening(Struct, frozen=True):
    """A session-open whose references have been fetched: the prompt, the committed tokens and the commit log."""

    message: SessionOpen
    prompt: tuple[Token, ...]
    committed: tuple[Token, ...] = ()
    log: tuple[CommitRecord | FenceRecord, ...] = ()


class Engine:
    """The verifier's rules over all its sessions. ``trusted``: base URIs of drafters rule 2 may use (section 9)."""

    def __init__(self, card: ModelCard, limits: Limits | None = None, trusted: Container[str] = frozenset()) -> None:
        self.card = card
        self.limits = limits or Limits()
        self.trusted = trusted
        self.sessions: dict[SessionId, Session] = {}
        self._tickets = count(1)

    # ---- opening (6.1, 6.9) ----------------------------------------------------------------------

    def check_open(self, opening: SessionOpen) -> SessionState | None:
        """Judge a session-open before anything is fetched or allocated; a state is the answer to a replay (AMB-054).

        A session that is over here makes way for one of the same id with another log: seeded requests have ids of
        their own, and nobody may have been left to close the earlier one.
        """
        if opening.epoch == 0:
            raise Malformed("epoch: starts at 1")  # AMB-057
        if (opening.epoch > 1) != (opening.resume is not UNSET):
            raise Malformed("resume: required exactly when epoch is above 1")
        length = len(opening.prompt) if isinstance(opening.prompt, tuple) else None
        contracts.validate(opening.contract, self.card, length)
        known = self.sessions.get(opening.session)
        if known is not None and not (known.over and known.opening.commit_log != opening.commit_log):
            if opening.epoch < known.epoch:
                raise StaleEpoch(f"epoch: the session's epoch is {known.epoch}")
            if opening.epoch == known.epoch:
                if opening != known.opening:
                    raise Conflict("session: already open with other contents")
                return known.state()
        elif sum(not session.over for session in self.sessions.values()) >= self.limits.sessions:
            raise Unavailable("the verifier holds as many sessions as it may", retry_after_ms=1000)
        return None

    def open(self, opening: Opening, options: OpenOptions, waiter: Waiter, at: Moment) -> Effects:
        """POST sessions, references fetched. A higher epoch replaces the session of the same id (AMB-056)."""
        message = opening.message
        replay = self.check_open(message)
        if replay is not None:
            return [Reply(waiter, replay)]
        self.check_prompt(message, opening.prompt)
        session = Session(
            message,
            opening.prompt,
            options,
            at=at,
            vocab_size=self.card.vocab_size,
            trusted=self.trusted,
            log_length=len(opening.log),
            tickets=self._tickets,
        )
        if message.resume is UNSET:
            if opening.log:
                raise Conflict("commit_log: not empty, so it belongs to another session")  # AMB-071, AMB-153
        else:
            _resume(session, opening)
        if session.ended is None and session.committed >= message.contract.max_new:  # AMB-017, AMB-061
            session.ended = Action.FINISH
        replaced = self.sessions.get(message.session)
        effects = replaced.fence(at) if replaced is not None and not replaced.fenced else []
        effects = [effect for effect in effects if not isinstance(effect, Release)]  # the new one goes on with the KV
        self._make_room()
        self.sessions[message.session] = session
        effects += [Reply(waiter, session.state()), *session.proceed(at)]
        return effects if session.ended is None else [*effects, Release(message.session)]

    def check_prompt(self, opening: SessionOpen, prompt: Sequence[Token]) -> None:
        """Judge a session-open once its prompt is known, before room or a log is given to it."""
        contracts.validate(opening.contract, self.card, len(prompt))
        if not prompt:
            raise Unprocessable("prompt: empty")  # AMB-035
        if max(prompt) >= self.card.vocab_size:
            raise Unprocessable(f"prompt: an id is not below the vocabulary size {self.card.vocab_size}")  # AMB-036

    # ---- calls on one session --------------------------------------------------------------------

    def propose(self, proposal: Proposal, caller: str, waiter: Waiter) -> Effects:
        session = self.sessions.get(proposal.session)
        if session is None:  # step 1 comes first: no assignment names the caller (AMB-050)
            raise NotAssigned("session: not assigned to this drafter")
        return session.propose(proposal, caller, waiter)

    def decline(self, decline: Decline, caller: str, waiter: Waiter) -> Effects:
        session = self.sessions.get(decline.session)
        if session is None:
            raise NotAssigned("session: not assigned to this drafter")
        return session.decline(decline, caller, waiter)

    def assign(self, assignment: Assignment, waiter: Waiter, at: Moment) -> Effects:
        return self._session(assignment.session).assign(assignment, waiter, at)

    def drafter_of(self, session: SessionId) -> str | None:
        """The drafter that may propose for a session now; None if nobody may, or there is no such session."""
        known = self.sessions.get(session)
        return None if known is None or known.assignment is None or known.released else known.assignment.drafter

    def policy(self, policy: Policy) -> SessionState:
        return self._session(policy.session).policy(policy)

    def close(self, session: SessionId, at: Moment) -> Effects:
        return self._session(session).close(at)

    def undrafted(self, session: SessionId, at: Moment) -> Effects:
        """No drafter has come, or the one assigned is silent: decode token by token until one is heard (AMB-124)."""
        known = self.sessions.get(session)
        if known is None or known.ended is not None:
            return []
        if known.drafted:
            known.silent = True
        else:
            known.undrafted = True
        return known.proceed(at)

    def serves(self, session: SessionId) -> bool:
        known = self.sessions.get(session)
        return known is not None and not known.over

    # ---- answers to effects ----------------------------------------------------------------------

    def rows_ready(self, session: SessionId, ticket: Ticket, rows: object) -> Effects:
        known = self.sessions.get(session)
        return [] if known is None else known.rows_ready(ticket, rows)

    def rows_failed(self, session: SessionId, ticket: Ticket, refusal: Refusal, at: Moment) -> Effects:
        known = self.sessions.get(session)
        return [] if known is None else known.rows_failed(ticket, refusal, at)

    def scored(
        self,
        session: SessionId,
        ticket: Ticket,
        rows: Sequence[Scored] | ScoreFailure,
        uniforms: Uniforms | None,
        at: Moment,
        wait_seconds: float = 0.0,
        verify_seconds: float = 0.0,
    ) -> Effects:
        known = self.sessions.get(session)
        return [] if known is None else known.scored(ticket, rows, uniforms, at, wait_seconds, verify_seconds)

    def appended(self, done: Append, outcome: AppendOutcome, at: Moment, commit_seconds: float = 0.0) -> Effects:
        known = self.sessions.get(done.session)
        return [] if known is None else known.appended(done, outcome, at, commit_seconds)

    def log_read(self, pending: Append, records: Sequence[CommitRecord | FenceRecord] | None, at: Moment) -> Effects:
        known = self.sessions.get(pending.session)
        return [] if known is None else known.log_read(pending, records, at)

    # ---- output (6.7) ----------------------------------------------------------------------------

    def output(self, session: SessionId, from_: int) -> Output:
        """Committed tokens from index ``from_`` (0-based, AMB-162); empty and not final means: wait and ask again."""
        known = self._readable(session)
        start = known.prompt_length + from_
        tokens = tuple(known.prefix[start : start + MAX_OUTPUT_TOKENS])
        final = known.ended is not None and start + len(tokens) >= len(known.prefix)
        finish = int(known.ended) if final and known.ended is not None else UNSET
        return Output(session=session, epoch=known.epoch, from_=from_, tokens=tokens, final=final, finish=finish)

    def chunk(self, session: SessionId, from_: int) -> Chunk:
        """The same for our own front end, with the rounds that committed the tokens (``from_`` at a round's edge)."""
        output = self.output(session, from_)
        known = self.sessions[session]
        first = bisect_right(known.rounds, from_ - 1, key=lambda info: info.base)
        rounds = known.rounds[first:] if output.tokens else []
        return Chunk(
            from_=from_,
            epoch=output.epoch,
            tokens=output.tokens,
            rounds=tuple(rounds),
            final=output.final,
            finish=None if output.finish is UNSET else output.finish,
            error=known.error,
        )

    def _readable(self, session: SessionId) -> Session:
        known = self._session(session)
        if known.fenced:  # AMB-158
            raise StaleEpoch("a verifier with a higher epoch has taken over")
        return known

    def _session(self, session: SessionId) -> Session:
        known = self.sessions.get(session)
        if known is None:
            raise UnknownSession("session: unknown")
        return known

    # ---- housekeeping ----------------------------------------------------------------------------

    def forget(self, session: SessionId) -> None:
        """Drop an ended session before its retention is over (its reader has everything)."""
        known = self.sessions.get(session)
        if known is not None and known.over:
            del self.sessions[session]

    def _make_room(self) -> None:
        over = sorted((s for s in self.sessions.values() if s.over), key=lambda s: s.touched_ms)
        for session in over[: -self.limits.ended or None]:
            del self.sessions[session.id]

    def tick(self, at: Moment) -> Effects:
        """Close sessions nobody drives and forget ended ones; call about once a second."""
        effects: Effects = []
        for session in list(self.sessions.values()):
            if session.over and at.ms - session.touched_ms >= self.limits.retention_ms:
                del self.sessions[session.id]
            elif not session.over and session.flight is None and at.ms - session.touched_ms >= self.limits.idle_ms:
                effects += session.close(at)
        return effects


def _resume(session: Session, opening: Opening) -> None:
    """Take over where the log ends (6.9). The router's word is checked against the digest chain and the log."""
    resume = opening.message.resume
    assert resume is not UNSET
    if len(opening.committed) != resume.committed:
        raise Unprocessable(f"resume.committed_tokens: {len(opening.committed)} tokens, not {resume.committed}")
    digest = digests.extend(session.digest, opening.committed)
    if digest != resume.digest:
        raise Unprocessable("resume.digest: not the digest of prompt and committed tokens")  # AMB-059
    fences = [record.epoch for record in opening.log if isinstance(record, FenceRecord)]
    if max(fences, default=0) > session.epoch:
        raise StaleEpoch(f"epoch: the log is fenced at {max(fences)}")
    if max(fences, default=0) < session.epoch:
        raise Unprocessable("commit_log: not fenced at the session's epoch")  # AMB-060
    commits = [record for record in opening.log if isinstance(record, CommitRecord)]
    last = commits[-1] if commits else None
    found = (0, 0, session.digest) if last is None else (last.round, last.committed, last.digest)
    if found != (resume.round, resume.committed, resume.digest):
        raise Unprocessable("resume: not the last commit record of the log")
    session.prefix.extend(opening.committed)
    session.digest, session.round = digest, resume.round
    session.lead = session.lead and last is None  # what was cut short before its first round starts as it would have
    if last is not None and last.final is not UNSET:  # AMB-062
        session.ended = Action.FAIL if last.final != Action.FINISH else Action.FINISH
    elif opening.committed and opening.committed[-1] in opening.message.contract.stop:  # AMB-061
        session.ended = Action.FINISH
