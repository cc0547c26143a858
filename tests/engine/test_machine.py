"""The engine under random interleavings: calls of all kinds, effects carried out in any order, with any outcome.

What must hold (design, section 10): output is a prefix of the log, an index never changes its token, one verdict per
round and the same on retry, every waiter answered exactly once, nothing appended after the end or a fence, the counters
of 6.5.2, room released exactly once, greedy output equal to the target's.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import UNSET, structs

from sdcp_mono.core import digest as digests
from sdcp_mono.core.effects import Append, Moment, ReadLog, Release, Reply, Score
from sdcp_mono.core.engine import Engine, Limits, Opening
from sdcp_mono.core.messages import (
    Assignment,
    CommitRecord,
    Contract,
    Decline,
    FenceRecord,
    Policy,
    Proposal,
    Resume,
    Sampling,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)
from sdcp_mono.core.ports import ModelCard, OpenOptions, Scored, ScoreFailure
from sdcp_mono.core.problems import Refusal

CARD = ModelCard("toy", b"t" * 32, b"k" * 32, 64, 256)
SESSIONS = [b"a" * 16, b"b" * 16]
DRAFTERS = ["https://a/", "https://b/"]
PROMPT = (1, 3)
STATUS = Status(instance="d", role=1, load=0, queue=0, ttl_ms=1000)


def following(token: int) -> int:
    return (5 * token + 7) % 64  # one cycle through all ids


def chain(count: int) -> tuple[int, ...]:
    tokens = [PROMPT[-1]]
    for _ in range(count):
        tokens.append(following(tokens[-1]))
    return tuple(tokens[1:])


class Reference:
    """The counters of 6.5.2, written down again."""

    def __init__(self, contract: Contract) -> None:
        self.contract, self.c, self.g, self.j = contract, 0, 0, 0

    def round(self, a: int, m: int, load: int, finished: bool) -> int:
        contract = self.contract
        ratio = 0 if contract.low_ratio is UNSET else contract.low_ratio
        if (100 * a < ratio * m) if ratio else a == 0:
            self.c, self.g = self.c + 1, 0
        else:
            self.c, self.g = 0, self.g + 1
            self.j = 0 if self.g >= contract.low_rounds else self.j
        if finished:
            return 4
        if self.c < contract.low_rounds:
            return 0
        self.c = 0
        while self.j < len(contract.fallback):
            entry, self.j = contract.fallback[self.j], self.j + 1
            if entry != 3 or (contract.self_load is not UNSET and load <= contract.self_load):
                return entry
        return 5


class Life:
    """One session from its first opening on, over all its epochs: what the world outside knows of it."""

    def __init__(self, contract: Contract, log: str) -> None:
        self.contract = contract
        self.log = log
        self.opening: SessionOpen | None = None
        self.records: list[CommitRecord | FenceRecord] = []
        self.tokens: dict[int, int] = {}  # output index -> the token that was read there
        self.verdicts: dict[tuple[int, int], Verdict] = {}  # epoch, round
        self.proposals: list[tuple[Proposal, str]] = []
        self.reference = Reference(contract)
        self.epoch = 1

    @property
    def commits(self) -> list[CommitRecord]:
        return [r for r in self.records if isinstance(r, CommitRecord)]

    @property
    def committed(self) -> tuple[int, ...]:
        return tuple(token for r in self.commits for token in r.emitted)

    @property
    def fence(self) -> int:
        return max((r.epoch for r in self.records if isinstance(r, FenceRecord)), default=0)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(CARD, Limits(sessions=4, retention_ms=50_000, idle_ms=100_000))
        self.now_ms = self.load = self.waiter = 0
        self.lives: dict[bytes, Life] = {}
        self.ended_lives: list[Life] = []
        self.held: dict[bytes, int] = {}  # room at the model
        self.pending: list[Any] = []
        self.done: list[Any] = []  # effects carried out; their answers may come a second time
        self.waiting: set[int] = set()
        self.answers: dict[int, Any] = {}
        self.logs = 0

    # ---- machinery -----------------------------------------------------------------------------

    def at(self) -> Moment:
        return Moment(self.now_ms, self.load)

    def ask(self, call: Any) -> Any:
        self.waiter += 1
        waiter = self.waiter
        self.waiting.add(waiter)
        try:
            self.take(call(waiter))
        except Refusal as refusal:
            self.answer(waiter, refusal)
        return self.answers.get(waiter)

    def answer(self, waiter: int, answer: Any) -> None:
        assert waiter in self.waiting, "answered twice, or never asked"
        self.waiting.discard(waiter)
        self.answers[waiter] = answer
        if isinstance(answer, Verdict):
            life = self.lives[answer.session]
            assert life.verdicts.setdefault((answer.epoch, answer.round), answer) == answer
            assert 1 <= answer.m_cap <= life.contract.m_max
            record = next(r for r in life.commits if r.round == answer.round)  # durable before it is told
            assert (record.emitted, record.digest) == (answer.emitted, answer.digest)

    def take(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Reply():
                    self.answer(effect.waiter, effect.answer)
                case Score() | Append() | ReadLog():
                    self.pending.append(effect)
                case Release():
                    assert self.held[effect.session] == 1, "released twice"
                    self.held[effect.session] = 0

    def life_of(self, effect: Append) -> Life:
        return next(life for life in [*self.lives.values(), *self.ended_lives] if life.log == effect.append.log)

    def store(self, effect: Append, life: Life) -> bool:
        """What an enforcing log does with an append."""
        record = effect.append.record
        if life.fence > record.epoch or len(life.records) != effect.append.sequence:
            return False
        assert all(r.final is UNSET for r in life.commits), "appended after the end"
        life.records.append(record)
        return True

    # ---- calls -----------------------------------------------------------------------------------

    ladders = st.sampled_from([(1, 2, 3, 5), (3, 3, 3, 3), (3, 2, 1, 3), (2, 2)])

    @initialize(low_ratio=st.sampled_from([0, 50, 100]), ladder=ladders)
    def start(self, low_ratio: int, ladder: tuple[int, ...]) -> None:
        for index, drafter in enumerate(DRAFTERS):
            self.open(index, 30, low_ratio, ladder, False)
            self.assign(index, drafter, 4, False)

    sessions = st.integers(0, len(SESSIONS) - 1)
    drafters = st.sampled_from(DRAFTERS)
    seldom = st.integers(0, 9).map(lambda n: n == 7)  # what ends a session must not end every one at once

    @rule(
        index=sessions,
        max_new=st.sampled_from([0, 1, 30, 30]),
        low_ratio=st.sampled_from([0, 50, 100]),
        ladder=ladders,
        lead=st.booleans(),
    )
    def open(self, index: int, max_new: int, low_ratio: int, ladder: tuple[int, ...], lead: bool) -> None:
        session, known = SESSIONS[index], self.engine.sessions.get(SESSIONS[index])
        if known is not None and (known.ended is not None or known.fenced):
            self.engine.forget(session)
            known = None
        if known is not None:  # a replay
            life = self.lives[session]
            assert (
                self.ask(lambda w: self.engine.open(self.material(life), OpenOptions(), w, self.at())) == known.state()
            )
            return
        self.logs += 1
        contract = Contract(
            target=CARD.target, tokenizer=CARD.tokenizer, rule=1, m_max=4, max_new=max_new, stop=(chain(27)[-1],),
            low_rounds=2 if low_ratio else 1, low_ratio=low_ratio, fallback=ladder, self_load=50, self_max=3,
        )  # fmt: skip
        if session in self.lives:
            self.ended_lives.append(self.lives[session])
        life = self.lives[session] = Life(contract, f"mlc://m/-/log/{self.logs}")
        life.opening = SessionOpen(session=session, epoch=1, contract=contract, prompt=PROMPT, commit_log=life.log)
        self.held[session] = 1
        state = self.ask(lambda w: self.engine.open(self.material(life), OpenOptions(lead=lead), w, self.at()))
        assert isinstance(state, SessionState)

    def material(self, life: Life) -> Opening:
        assert life.opening is not None
        committed = () if life.opening.resume is UNSET else life.committed
        return Opening(life.opening, PROMPT, committed, () if life.opening.resume is UNSET else tuple(life.records))

    @rule(index=sessions, drafter=drafters, m_init=st.integers(0, 5), stale=seldom)
    def assign(self, index: int, drafter: str, m_init: int, stale: bool) -> None:
        life = self.lives.get(SESSIONS[index])
        if life is None:
            return
        epoch = life.epoch + 1 if stale else life.epoch
        assignment = Assignment(
            session=SESSIONS[index], epoch=epoch, contract=life.contract, verifier="https://v/", drafter=drafter,
            prompt=PROMPT, round=len(life.commits), committed=0, digest=b"?" * 32, m_init=m_init,
        )  # fmt: skip
        self.ask(lambda w: self.engine.assign(assignment, w, self.at()))

    @rule(
        index=sessions, anybody=st.none() | drafters, right=st.integers(0, 5), wrong=st.integers(0, 2),
        round_=st.integers(-2, 2), odd_base=seldom, caller=st.none() | drafters, then=st.integers(0, 3),
    )  # fmt: skip
    def propose(
        self,
        index: int,
        anybody: str | None,
        right: int,
        wrong: int,
        round_: int,
        odd_base: bool,
        caller: str | None,
        then: int,
    ) -> None:
        """Right, wrong, too long, stale, ahead of its time, by the wrong one."""
        session, life = SESSIONS[index], self.lives.get(SESSIONS[index])
        known = self.engine.sessions.get(session)
        if life is None or known is None or right + wrong == 0:
            return
        round_, base = 0 if abs(round_) < 2 else round_, int(odd_base)
        drafter = anybody or (known.assignment.drafter if known.assignment is not None else DRAFTERS[0])
        n = known.committed
        tokens = chain(n + right)[n:] + (63 - chain(n + right + 1)[-1],) * wrong
        proposal = Proposal(
            session=session, epoch=life.epoch, round=max(0, known.round + 1 + round_), drafter=drafter,
            base=max(0, n + base), base_digest=known.digest, tokens=tokens, status=STATUS,
        )  # fmt: skip
        life.proposals.append((proposal, caller or drafter))
        self.ask(lambda w: self.engine.propose(proposal, caller or drafter, w))
        for _ in range(then):  # as far as scored, appended, and one further
            if self.pending:
                self.carry_out(len(self.pending) - 1, "ok")

    @rule(index=sessions, rounds=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=6))
    def play(self, index: int, rounds: list[tuple[int, int]]) -> None:
        """Some rounds to their end, as a drafter would; so that ladders are climbed."""
        for right, wrong in rounds:
            self.propose(index, None, right, wrong, 0, False, None, 2)

    @rule(index=sessions, which=st.integers(0, 5))
    def propose_again(self, index: int, which: int) -> None:
        life = self.lives.get(SESSIONS[index])
        if life is None or not life.proposals:
            return
        proposal, caller = life.proposals[-1 - which % len(life.proposals)]
        retry = structs.replace(proposal, status=structs.replace(STATUS, load=9))
        answer = self.ask(lambda w: self.engine.propose(retry, caller, w))
        told = life.verdicts.get((proposal.epoch, proposal.round))
        known = self.engine.sessions.get(proposal.session)
        assigned = "" if known is None or known.assignment is None else known.assignment.drafter
        if known is not None and told is not None and caller == proposal.drafter == assigned:
            assert known.fenced or known.epoch != proposal.epoch or answer == told

    @rule(index=sessions, drafter=drafters, ahead=seldom)
    def decline(self, index: int, drafter: str, ahead: bool) -> None:
        known = self.engine.sessions.get(SESSIONS[index])
        if known is not None:
            epoch, round_ = known.epoch, known.round + 1 + ahead
            decline = Decline(session=SESSIONS[index], epoch=epoch, round=round_, drafter=drafter)
            self.ask(lambda w: self.engine.decline(decline, drafter, w))

    @rule(index=sessions, ahead=st.integers(0, 3))
    def policy(self, index: int, ahead: int) -> None:
        known = self.engine.sessions.get(SESSIONS[index])
        if known is None:
            return
        try:
            self.engine.policy(
                Policy(session=SESSIONS[index], from_round=known.round + ahead, sampling=Sampling(seed=ahead))
            )
        except Refusal:
            return
        assert ahead > (known.flight is not None)

    @rule(index=sessions, really=seldom)
    def undrafted(self, index: int, really: bool) -> None:
        if really:
            self.take(self.engine.undrafted(SESSIONS[index], self.at()))

    @rule(index=sessions, really=seldom)
    def close(self, index: int, really: bool) -> None:
        if really and SESSIONS[index] in self.engine.sessions:
            self.take(self.engine.close(SESSIONS[index], self.at()))

    @rule(index=sessions, really=seldom, drafter=drafters, right=st.integers(1, 4), more=st.integers(0, 4))
    def begin_again(self, index: int, really: bool, drafter: str, right: int, more: int) -> None:
        """Another session of the same id, while the model still computes for the first one (C-41)."""
        session = SESSIONS[index]
        if not really or session not in self.engine.sessions:
            return
        self.propose(index, None, right, 1, 0, False, None, 0)
        late = [effect for effect in self.pending if isinstance(effect, Score) and effect.request.session == session]
        self.take(self.engine.close(session, self.at()))
        self.open(index, 30, 0, (1, 1, 1), False)
        self.assign(index, drafter, 4, False)
        self.propose(index, drafter, more, 1, 0, False, None, 0)
        for effect in late:
            self.score(effect, "ok")

    @rule(index=sessions, really=seldom, reopen=st.booleans())
    def fail_over(self, index: int, really: bool, reopen: bool) -> None:
        """A fence; and perhaps this very verifier is the next one (AMB-056)."""
        session, life = SESSIONS[index], self.lives.get(SESSIONS[index])
        known = self.engine.sessions.get(session)
        if not really or life is None or known is None:
            return
        life.epoch += 1
        life.records.append(FenceRecord(epoch=life.epoch))
        if not reopen:
            return
        if known.fenced or known.ended is not None:
            self.held[session] = 1
        commits, opening = life.commits, life.opening
        assert opening is not None
        digest = digests.prefix_digest(digests.contract_digest(life.contract), PROMPT)
        resume = Resume(
            round=commits[-1].round if commits else 0, committed=len(life.committed),
            digest=digests.extend(digest, life.committed), committed_tokens="mlc://m/-/tokens/1",
        )  # fmt: skip
        life.opening = structs.replace(opening, epoch=life.epoch, resume=resume)
        life.reference = Reference(life.contract)
        state = self.ask(lambda w: self.engine.open(self.material(life), OpenOptions(), w, self.at()))
        assert isinstance(state, SessionState), state

    @rule(load=st.sampled_from([0, 50, 51, 90, 100]))
    def busy(self, load: int) -> None:
        self.load = load

    @rule(ms=st.sampled_from([10, 10, 10, 1_000, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.take(self.engine.tick(self.at()))

    # ---- answers to effects ------------------------------------------------------------------------

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 20), outcome=st.sampled_from(["ok"] * 12 + ["lost", "unknown", "unknown", "failure"]))
    def carry_out(self, which: int, outcome: str) -> None:
        effect = self.pending.pop(which % len(self.pending))
        self.done.append(effect)
        match effect:
            case Score():
                self.score(effect, outcome)
            case Append():
                self.append(effect, outcome)
            case ReadLog():
                self.read(effect, outcome)

    @precondition(lambda self: self.done)
    @rule(which=st.integers(0, 20))
    def answer_twice(self, which: int) -> None:
        effect = self.done[-1 - which % len(self.done)]
        if isinstance(effect, Score):
            self.score(effect, "ok")

    def score(self, effect: Score, outcome: str) -> None:
        request = effect.request
        if outcome != "ok":
            rows: Any = ScoreFailure("no memory", permanent=outcome == "failure")
        else:
            last = [request.prefix[request.length - 1], *request.tokens]
            rows = [Scored(following(token), following(token)) for token in last]
        self.take(self.engine.scored(request.session, effect.ticket, rows, request.uniforms, self.at()))

    def append(self, effect: Append, outcome: str) -> None:
        life = self.life_of(effect)
        stored = outcome not in ("unknown", "failure") and self.store(effect, life)
        known = self.engine.sessions.get(effect.session)
        mine = known is not None and known.flight is not None and known.flight.pending == effect
        if mine and outcome == "ok" and life.fence <= effect.append.record.epoch:
            assert stored, "the only writer has lost its place"
        told = "unknown" if outcome != "ok" else "ok" if stored else "fenced"
        if told == "ok" and mine:
            self.count(effect, life)
        self.take(self.engine.appended(effect, told, self.at()))  # type: ignore[arg-type]

    def read(self, effect: ReadLog, outcome: str) -> None:
        life = self.life_of(effect.pending)
        records = life.records[effect.pending.append.sequence :]
        known = self.engine.sessions.get(effect.pending.session)
        mine = known is not None and known.flight is not None and known.flight.pending == effect.pending
        if outcome != "ok":
            self.take(self.engine.log_read(effect.pending, None, self.at()))
            return
        stored = bool(records) and records[0] == effect.pending.append.record
        if mine and stored:
            self.count(effect.pending, life)
        self.take(self.engine.log_read(effect.pending, records, self.at()))
        assert known is None or not (mine and stored and known.fenced), "its own record is no foreign one"

    def count(self, append: Append, life: Life) -> None:
        """A drafted round is durable: the reference says what it means."""
        info, verdict = append.commit.info, append.commit.verdict
        if not info.proposed or append.commit.error:
            return
        right = chain(info.base + len(info.proposed))[info.base :]
        accepted = next((i for i, t in enumerate(info.proposed) if t != right[i]), len(info.proposed))
        finished = verdict.committed == life.contract.max_new or verdict.emitted[-1] in life.contract.stop
        action = life.reference.round(accepted, len(info.proposed), verdict.load, finished)
        assert (verdict.accepted, verdict.action) == (accepted, action)

    # ---- what must always hold -----------------------------------------------------------------

    @invariant()
    def output_is_a_prefix_of_the_log_and_of_the_target(self) -> None:
        for session, life in self.lives.items():
            committed = life.committed
            assert committed == chain(len(committed))
            known = self.engine.sessions.get(session)
            if known is None or known.fenced:
                continue
            output = self.engine.output(session, 0)
            assert output.tokens == committed[: len(output.tokens)]
            for i, token in enumerate(output.tokens):
                assert life.tokens.setdefault(i, token) == token
            if known.epoch == life.epoch and known.ended is None:
                reference, control = life.reference, known.control
                assert (control.c, control.g, control.j) == (reference.c, reference.g, reference.j)
            assert 1 <= known.m_cap <= life.contract.m_max
            assert known.round <= (life.commits[-1].round if life.commits else 0)

    @invariant()
    def logs_are_chains(self) -> None:
        for life in self.lives.values():
            digest = digests.prefix_digest(digests.contract_digest(life.contract), PROMPT)
            n = 0
            for round_, record in enumerate(life.commits, 1):
                n, digest = n + len(record.emitted), digests.extend(digest, record.emitted)
                assert (record.round, record.committed, record.digest) == (round_, n, digest)
            assert n <= life.contract.max_new

    @invariant()
    def nothing_piles_up(self) -> None:
        assert len(self.engine.sessions) <= 4
        for session, known in self.engine.sessions.items():
            live = known.ended is None and not known.fenced
            assert self.held[session] == live

    def teardown(self) -> None:
        for _ in range(2_000):
            if not self.pending:
                break
            self.carry_out(0, "ok")
        assert self.pending == [], "it never comes to rest"
        for session in list(self.engine.sessions):
            self.take(self.engine.close(session, self.at()))
        assert self.waiting == set(), "callers who were never answered"
        assert set(self.held.values()) <= {0}


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestMachine = Machine.TestCase
