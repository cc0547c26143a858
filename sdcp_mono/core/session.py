"""One session at the verifier: the nine steps of 6.3, in that order, and self-decoding as rounds without a proposal.

At most one round is in flight. A call that meets it waits behind it: an identical proposal gets the same answer
(step 3), a new assignment is applied when the round has ended (AMB-075, AMB-104), anything else is judged afresh then.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

from msgspec import UNSET, structs

from sdcp_mono.core import accept
from sdcp_mono.core import contract as contracts
from sdcp_mono.core import control as controls
from sdcp_mono.core import digest as digests
from sdcp_mono.core.effects import (
    Append,
    Commit,
    Effects,
    FetchRows,
    Moment,
    Publish,
    ReadLog,
    Release,
    Reply,
    Score,
    SendEvent,
    Ticket,
    Waiter,
)
from sdcp_mono.core.flight import RETRY_AFTER_MS, Flight, Waiting, origins
from sdcp_mono.core.messages import (
    Action,
    Assignment,
    CommitRecord,
    Decline,
    Event,
    FenceRecord,
    Policy,
    Proposal,
    Rule,
    Sampling,
    SessionOpen,
    SessionState,
    Verdict,
)
from sdcp_mono.core.ports import (
    AppendOutcome,
    LogAppend,
    OpenOptions,
    RoundInfo,
    Scored,
    ScoreFailure,
    ScoreRequest,
    Uniforms,
)
from sdcp_mono.core.problems import (
    BadContract,
    BadProposal,
    LimitExceeded,
    NotAssigned,
    QUnavailable,
    Refusal,
    SessionClosed,
    StaleBase,
    StaleEpoch,
    Unavailable,
)

SCORE_RETRIES: Final = 3  # consecutive failed passes before the session fails (AMB-145)
QUIET_APPENDS: Final = 3  # appends of unknown outcome before waiting callers are told to come back (AMB-150)
MAX_POLICIES: Final = 64  # profiles for rounds to come; a person changes a preference a few times


class Session:
    """State of one session; every method returns the effects it asks for. Refusals are raised before any change."""

    def __init__(
        self,
        opening: SessionOpen,
        prompt: Sequence[int],
        options: OpenOptions,
        *,
        at: Moment,
        vocab_size: int,
        trusted: Container[str],
        log_length: int,
        tickets: Iterator[Ticket],
    ) -> None:
        self.opening = opening
        self.id = opening.session
        self.epoch = opening.epoch
        self.contract = opening.contract
        self.options = options
        self.rule = Rule(opening.contract.rule)
        self.scope = None if opening.contract.scope is UNSET else opening.contract.scope
        self.prefix: list[int] = list(prompt)  # prompt, then committed output; append-only, shared with the runner
        self.prompt_length = len(prompt)
        self.contract_digest = digests.contract_digest(opening.contract)
        self.origin = self.digest = digests.prefix_digest(self.contract_digest, prompt)
        self.round = 0
        self.log_length = log_length
        self.control = controls.start(opening.contract, opening.contract.m_max)
        self.assignment: Assignment | None = None
        self.assigned_round = 0  # the last committed round when the assignment was applied
        self.released = False  # the assignment is over, but its drafter may still ask for verdicts (AMB-102, 103)
        self.policies: dict[int, Sampling] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.rounds: list[RoundInfo] = []
        self.ended: Action | None = None
        self.error = ""
        self.fenced = False
        self.flight: Flight | None = None
        self.self_left: int | None = None  # tokens left of an escalated self-decoding period; None outside one
        self.undrafted = options.undrafted
        self.silent = False  # the drafter has not been heard of for long; decode by ourselves until it is
        self.lead = options.lead
        self.failures = 0
        self.touched_ms = at.ms
        self._stop = frozenset(opening.contract.stop)
        self._vocab_size = vocab_size
        self._trusted = trusted
        self._tickets = tickets  # of all sessions: an answer for an earlier session of the same id fits no later one

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """n, the number of committed output tokens (section 2)."""
        return len(self.prefix) - self.prompt_length

    @property
    def m_cap(self) -> int:
        """The limit for the next proposal: what the last verdict said, or the assignment's m_init (6.2)."""
        last = self.verdicts.get(self.round)
        return self.control.cap if last is None or self.assigned_round >= last.round else last.m_cap

    @property
    def over(self) -> bool:
        """Nothing more will be committed here."""
        return self.ended is not None or self.fenced

    @property
    def drafted(self) -> bool:
        """Whether it is a drafter's turn to propose."""
        return self.assignment is not None and not self.released

    def state(self) -> SessionState:
        return SessionState(
            session=self.id, epoch=self.epoch, round=self.round, committed=self.committed, digest=self.digest,
            state=int(self._phase()),
        )  # fmt: skip

    def _phase(self) -> Action:
        """The state member, in action codes (AMB-069)."""
        if self.ended is not None:
            return self.ended
        if self.self_left is not None or self.undrafted:
            return Action.SELF_DECODE
        return Action.CONTINUE if self.drafted else Action.SWITCH

    def sampling_at(self, round_: int) -> Sampling:
        return contracts.policy_at(contracts.sampling_of(self.contract), self.policies, round_)

    # ---- 6.3: a proposal -------------------------------------------------------------------------

    def propose(self, proposal: Proposal, caller: str, waiter: Waiter) -> Effects:
        self._authorise(caller, proposal.drafter, proposal.epoch)  # steps 1 and 2
        done = self.verdicts.get(proposal.round)
        if done is not None:  # step 3, whatever the content (AMB-095)
            return [Reply(waiter, done)]
        if self.flight is not None and self.flight.round == proposal.round:
            self.flight.join(waiter, proposal, caller)
            return []
        self._expect_open()  # AMB-082: closed after replay, before the base check
        if self.released or self._self_decoding():
            raise NotAssigned("the session waits for another drafter")  # AMB-102, AMB-103
        self._check_base(proposal)  # step 4
        if len(proposal.tokens) > self.m_cap:  # AMB-081
            raise LimitExceeded(f"tokens: {len(proposal.tokens)} proposed, at most {self.m_cap} allowed")
        if max(proposal.tokens) >= self._vocab_size:  # AMB-083
            raise BadProposal(f"tokens: an id is not below the vocabulary size {self._vocab_size}")
        if self.rule is Rule.SPECULATIVE_SAMPLING and proposal.q_rows is UNSET:  # AMB-135
            raise QUnavailable("q_rows: rule 2 needs the draft rows")
        flight = self._fly(proposal, waiter)
        if self.rule is Rule.SPECULATIVE_SAMPLING and proposal.q_rows is not UNSET:  # step 5
            return [FetchRows(flight.ticket, self.id, proposal.q_rows, proposal.tokens, self.scope)]
        return [self._score(flight, None)]

    def _authorise(self, caller: str, named: str, epoch: int) -> None:
        if self.assignment is None or caller != self.assignment.drafter or named != caller:  # step 1, AMB-041
            raise NotAssigned("drafter: not the one named in the session's latest assignment")
        if self.fenced or epoch != self.epoch:  # step 2, AMB-157
            raise StaleEpoch(f"epoch: the session's epoch is {self.epoch}" if not self.fenced else "the log is fenced")
        self.silent = False

    def _expect_open(self) -> None:
        if self.fenced:
            raise StaleEpoch("a verifier with a higher epoch has taken over")
        if self.ended is not None:
            raise SessionClosed(f"the session has ended ({self.ended.name.lower()})")

    def _check_base(self, proposal: Proposal) -> None:
        if proposal.base != self.committed or proposal.base_digest != self.digest:
            raise StaleBase(f"base: {self.committed} tokens are committed", self.state())
        if proposal.round != self.round + 1:
            raise StaleBase(f"round: the next round is {self.round + 1}", self.state())

    def _fly(self, proposal: Proposal | None, waiter: Waiter | None) -> Flight:
        assert self.flight is None
        waiters = [] if waiter is None else [waiter]
        self.flight = Flight(next(self._tickets), self.round + 1, proposal, waiters, [])
        return self.flight

    def _score(self, flight: Flight, rows: object) -> Score:
        """Step 6; under rule 2 the draws are decided here, after the rows were obtained and checked (step 5)."""
        tokens = () if flight.proposal is None else flight.proposal.tokens
        sampling = self.sampling_at(flight.round)
        uniforms: Uniforms | None = None
        draws = self.rule is Rule.SPECULATIVE_SAMPLING
        if draws and sampling.seed is not UNSET:
            uniforms = accept.uniforms(sampling.seed, self.id, flight.round, len(tokens))
        request = ScoreRequest(
            session=self.id,
            prefix=self.prefix,
            length=len(self.prefix),
            tokens=tokens,
            rule=self.rule,
            sampling=sampling,
            uniforms=uniforms,
            rows=rows,
            top_logprobs=self.options.top_logprobs,
        )
        return Score(flight.ticket, request, fresh_uniforms=draws and uniforms is None)

    def rows_ready(self, ticket: Ticket, rows: object) -> Effects:
        flight = self._current(ticket)
        return [] if flight is None else [self._score(flight, rows)]

    def rows_failed(self, ticket: Ticket, refusal: Refusal, at: Moment) -> Effects:
        """Step 5: nothing is committed, the round number stays free, identical waiters share the answer (AMB-099)."""
        return [] if self._current(ticket) is None else self._land(refusal, at)

    def scored(
        self,
        ticket: Ticket,
        rows: Sequence[Scored] | ScoreFailure,
        uniforms: Uniforms | None,
        at: Moment,
        wait_seconds: float = 0.0,
        verify_seconds: float = 0.0,
    ) -> Effects:
        """Step 7: apply the rule, truncate, and ask for the append that will release the verdict."""
        flight = self._current(ticket)
        if flight is None or flight.pending is not None:  # decided already: one draw, one record
            return []
        tokens = () if flight.proposal is None else flight.proposal.tokens
        if not isinstance(rows, ScoreFailure) and len(rows) != len(tokens) + 1:
            rows = ScoreFailure(f"the model scored {len(rows)} positions of {len(tokens) + 1}", permanent=True)
        if isinstance(rows, ScoreFailure):
            return self._score_failed(rows, at)
        self.failures = 0
        outcome = accept.accept(self.rule, tokens, rows, uniforms)
        kept = (*tokens[: outcome.accepted], outcome.extra)
        emitted, finished = accept.truncate(kept, self._stop, self.contract.max_new - self.committed)
        commit = self._decide(flight, outcome.accepted, emitted, finished, at.load)
        info = structs.replace(
            commit.info,
            tokens=origins(tokens, outcome.accepted, emitted, rows),
            wait_seconds=wait_seconds,
            verify_seconds=verify_seconds,
        )
        return self._append(flight, structs.replace(commit, info=info))

    def _decide(
        self, flight: Flight, accepted: int, emitted: tuple[int, ...], finished: bool, load: int, error: str = ""
    ) -> Commit:
        """Step 9, decided with the round and applied when the append has succeeded."""
        proposed = 0 if flight.proposal is None else len(flight.proposal.tokens)
        control, action, low, m_cap = self.control, Action.CONTINUE, 0, self.m_cap
        if error:
            action = Action.FAIL
        elif proposed:  # self-decoded rounds are not counted (AMB-114)
            steering = controls.after_round(self.control, self.contract, accepted, proposed, load, finished=finished)
            control, action, low, m_cap = steering.control, steering.action, steering.low, steering.m_cap
        elif finished:
            action = Action.FINISH
        digest = digests.extend(self.digest, emitted)
        verdict = Verdict(
            session=self.id, epoch=self.epoch, round=flight.round, accepted=accepted, emitted=emitted,
            committed=self.committed + len(emitted), digest=digest, action=int(action), m_cap=m_cap, low=low, load=load,
        )  # fmt: skip
        info = RoundInfo(
            round=flight.round, epoch=self.epoch, base=self.committed,
            proposed=() if flight.proposal is None else flight.proposal.tokens,
            accepted=accepted, emitted=emitted, tokens=(), action=int(action), m_cap=m_cap,
            drafter="" if flight.proposal is None else flight.proposal.status.instance,
        )  # fmt: skip
        ended = int(action) if action in (Action.FINISH, Action.FAIL) else None
        return Commit(verdict=verdict, control=control, info=info, digest=digest, ended=ended, error=error)

    def _append(self, flight: Flight, commit: Commit) -> Effects:
        record = CommitRecord(
            epoch=self.epoch,
            round=flight.round,
            emitted=commit.verdict.emitted,
            committed=commit.verdict.committed,
            digest=commit.digest,
            final=UNSET if commit.ended is None else commit.ended,
        )
        append = LogAppend(log=self.opening.commit_log, sequence=self.log_length, record=record)
        flight.pending = Append(flight.ticket, self.id, append, commit)
        return [flight.pending]

    def _score_failed(self, failure: ScoreFailure, at: Moment) -> Effects:
        """AMB-145: nothing is committed; a permanent fault, or one that repeats, ends the session."""
        self.failures += 1
        flight = self.flight
        assert flight is not None
        if failure.permanent or self.failures >= SCORE_RETRIES:
            commit = self._decide(flight, 0, (), finished=False, load=at.load, error=failure.reason)
            return self._append(flight, commit)
        return self._land(Unavailable(failure.reason, retry_after_ms=RETRY_AFTER_MS), at)

    # ---- step 8: the append has an outcome -------------------------------------------------------

    def appended(self, done: Append, outcome: AppendOutcome, at: Moment, commit_seconds: float = 0.0) -> Effects:
        flight = self._current(done.ticket)
        if flight is None or flight.pending != done:
            return []
        if outcome == "unknown":
            return [ReadLog(done)]
        if outcome == "fenced":
            return self.fence(at)
        commit = done.commit
        self.prefix.extend(commit.verdict.emitted)
        self.digest, self.round, self.control = commit.digest, flight.round, commit.control
        self.log_length += 1
        self.touched_ms = at.ms
        self.rounds.append(structs.replace(commit.info, commit_seconds=commit_seconds))
        if flight.proposal is not None:  # a self-decoded round has no verdict (AMB-101)
            self.verdicts[flight.round] = commit.verdict
        elif self.self_left is not None:
            self.self_left -= 1
        self.lead = False
        effects: Effects = [Publish(self.id)]
        if commit.ended is not None:
            effects += self._end(Action(commit.ended), commit.error)
        elif commit.verdict.action == Action.SWITCH:
            self.released = True
            effects.append(self._event(Action.SWITCH))
        elif commit.verdict.action == Action.SELF_DECODE:
            self.released = True
            self.self_left = _self_limit(self.contract.self_max, self.contract.max_new)
        return effects + self._land(commit.verdict if flight.proposal is not None else None, at)

    def log_read(self, pending: Append, records: Sequence[CommitRecord | FenceRecord] | None, at: Moment) -> Effects:
        """What the log holds from the record's place on; None if it couldn't be read (AMB-150, AMB-151)."""
        flight = self._current(pending.ticket)
        if flight is None or flight.pending != pending:
            return []
        if records:
            if records[0] == pending.append.record:
                return self.appended(pending, "ok", at)
            return self.fence(at)  # a fence, or another writer: either way this verifier has lost the session
        flight.pending = structs.replace(pending, attempt=pending.attempt + 1)
        effects: Effects = [ReadLog(flight.pending) if records is None else flight.pending]
        if flight.pending.attempt >= QUIET_APPENDS:  # the result is kept; a retry joins this flight
            busy = Unavailable("the commit log does not answer", retry_after_ms=RETRY_AFTER_MS)
            effects += [Reply(waiter, busy) for waiter in flight.leave()]
        return effects

    def fence(self, at: Moment) -> Effects:
        """Another verifier has the session: discard the round, release nothing, stop serving (6.3 step 8)."""
        self.fenced = True
        refusal = StaleEpoch("a verifier with a higher epoch has taken over")
        return [Publish(self.id), Release(self.id), *self._land(refusal, at)]

    # ---- the round has ended ---------------------------------------------------------------------

    def _land(self, answer: Verdict | Refusal | None, at: Moment) -> Effects:
        """Answer everyone who waited, apply what arrived meanwhile, and go on self-decoding where that is due.

        ``answer`` None: a self-decoded round, whose callers (``decline``) get the session's state.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            return []
        reply = self.state() if answer is None else answer
        effects: Effects = [Reply(waiter, reply) for waiter in flight.identical]
        for waiting in flight.behind:
            try:
                match waiting.call:
                    case Assignment():
                        effects += self.assign(waiting.call, waiting.waiter, at)
                    case Proposal():
                        effects += self.propose(waiting.call, waiting.caller, waiting.waiter)
                    case Decline():
                        effects += self.decline(waiting.call, waiting.caller, waiting.waiter)
            except Refusal as refusal:
                effects.append(Reply(waiting.waiter, refusal))
        return effects + self.proceed(at)

    def proceed(self, at: Moment) -> Effects:
        """Decode one token without a drafter, if that is what the session is waiting for (6.5.2, AMB-124)."""
        if self.flight is not None or self.over:
            return []
        if self.self_left is not None:
            limit = self.contract.self_load
            if self.self_left <= 0 or limit is UNSET or at.load > limit:
                self.self_left = None
                return [self._event(Action.SELF_DECODE)]
        elif not (self.undrafted or self.silent or self.lead):
            return []
        return [self._score(self._fly(None, None), None)]

    def _self_decoding(self) -> bool:
        return self.self_left is not None or self.undrafted

    def _end(self, action: Action, error: str) -> Effects:
        self.ended, self.error = action, error
        self.self_left, self.undrafted = None, False
        return [self._event(action), Release(self.id)]

    def _event(self, kind: Action) -> SendEvent:
        n, digest = self.committed, self.digest
        return SendEvent(Event(session=self.id, epoch=self.epoch, kind=int(kind), committed=n, digest=digest))

    def _current(self, ticket: Ticket) -> Flight | None:
        return self.flight if self.flight is not None and self.flight.ticket == ticket else None

    # ---- the router's calls ----------------------------------------------------------------------

    def assign(self, assignment: Assignment, waiter: Waiter, at: Moment) -> Effects:
        """PUT drafter (6.1). Its round, base and digest are not compared: the answer tells the true ones (AMB-072)."""
        if self.fenced or assignment.epoch != self.epoch:  # AMB-074
            raise StaleEpoch(f"epoch: the session's epoch is {self.epoch}")
        self._expect_open()
        if digests.contract_digest(assignment.contract) != self.contract_digest:  # AMB-073
            raise BadContract("contract: not the one the session was opened with")
        if self.rule is Rule.SPECULATIVE_SAMPLING and assignment.drafter not in self._trusted:  # section 9, AMB-052
            raise BadContract("drafter: rule 2 needs a drafter trusted like the verifier")
        if self.flight is not None:  # AMB-075: the answer includes the round in flight
            self.flight.wait(Waiting(waiter, assignment, ""))
            return []
        old = self.assignment
        repeated = (
            old is not None
            and not (self.released or self._self_decoding())
            and (old.drafter, old.epoch, old.round) == (assignment.drafter, assignment.epoch, assignment.round)
        )
        if not repeated:  # AMB-077: a retry must not reset m_cap
            self.touched_ms = at.ms
            self.silent = self.silent and old is not None and old.drafter == assignment.drafter
            self.control = controls.assigned(self.control, self.contract, assignment.m_init)
            self.assignment, self.assigned_round = assignment, self.round
            if assignment.sampling is not UNSET and not self.policies and self.epoch > 1:  # AMB-065
                self.policies[self.round + 1] = assignment.sampling
        self.released, self.self_left, self.undrafted = False, None, False
        return [Reply(waiter, self.state())]

    def decline(self, decline: Decline, caller: str, waiter: Waiter) -> Effects:
        """The assigned drafter has nothing to propose: decode one token as a round without a proposal."""
        self._authorise(caller, decline.drafter, decline.epoch)
        if self.flight is not None:
            self.flight.wait(Waiting(waiter, decline, caller))
            return []
        self._expect_open()
        if self.released or self._self_decoding():
            raise NotAssigned("the session waits for another drafter")
        if decline.round != self.round + 1:
            raise StaleBase(f"round: the next round is {self.round + 1}", self.state())
        return [self._score(self._fly(None, waiter), None)]

    def policy(self, policy: Policy) -> SessionState:
        """POST policy (6.6). A round that is being verified keeps its profile (AMB-172)."""
        self._expect_open()
        current = self.round if self.flight is None else self.flight.round
        if policy.from_round <= current:
            raise StaleBase(f"from_round: must be above {current}", self.state())
        over = max((key for key in self.policies if key <= self.round + 1), default=0)  # older ones apply no more
        kept = {key: profile for key, profile in self.policies.items() if key >= over}
        if len(kept) >= MAX_POLICIES and policy.from_round not in kept:
            raise Unavailable("too many policies wait for their round", retry_after_ms=RETRY_AFTER_MS)
        self.policies = kept | {policy.from_round: policy.sampling}
        return self.state()

    def close(self, at: Moment) -> Effects:
        """The router gives the session up (AMB-070); readers see it end with fail, waiting callers a 410."""
        if self.over:
            return []
        self.ended, self.error, self.touched_ms = Action.FAIL, "closed by the router", at.ms
        self.self_left, self.undrafted = None, False
        return [Publish(self.id), Release(self.id), *self._land(SessionClosed("the session was closed"), at)]


def _self_limit(self_max: object, max_new: int) -> int:
    return self_max if isinstance(self_max, int) else max_new  # absent: until the load or the end stops it
