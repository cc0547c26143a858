"""A verifier's engine under a script: effects are carried out at once, or held where a test wants to look between."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET, structs

from sdcp_mono.core import digest as digests
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
)
from sdcp_mono.core.engine import Engine, Limits, Opening
from sdcp_mono.core.messages import (
    Assignment,
    CommitRecord,
    Contract,
    Decline,
    Event,
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
from sdcp_mono.core.ports import ModelCard, OpenOptions, Scored, ScoreFailure, ScoreRequest, Uniforms
from sdcp_mono.core.problems import BadProposal, Refusal

VECTORS = Path(__file__).parent.parent / "vectors" / "sdcp.json"
TARGET = bytes.fromhex("254e528c669a2084c9727298cacb83e8854e0a6ff80e2bf18096b9dce0f7ebda")
TOKENIZER = bytes.fromhex("9f42a7a29dca3063ad26d7be7fe6a930fa38afb1a703e4f7ff538db4e133b19c")
SESSION = bytes(range(16))
LOG = "mlc://mlc/-/log/1"
A, B = "https://a/", "https://b/"

# Appendix A's contract, with a vocabulary of 64.
CONTRACT = Contract(
    target=TARGET, tokenizer=TOKENIZER, rule=1, m_max=8, max_new=256, stop=(2,), low_rounds=3, fallback=(1, 2, 3, 5)
)


def status(instance: str) -> Status:
    return Status(instance=instance, role=1, load=0, queue=0, ttl_ms=1000)


class World:
    """One verifier, its log, and the router that listens. ``target`` maps the last token to the next one."""

    def __init__(self, contract: Contract = CONTRACT, options: OpenOptions | None = None, **target: Any) -> None:
        self.contract = contract
        self.options = options or OpenOptions()
        self.target: Callable[[int], int] = target.get("target", lambda last: (last + 1) % 64)
        self.trusted = target.get("trusted", frozenset({A, B}))
        self.card = ModelCard("toy", TARGET, TOKENIZER, target.get("vocab", 64), 4096)
        self.engine = Engine(self.card, target.get("limits") or Limits(), self.trusted)
        self.log: list[CommitRecord | FenceRecord] = []
        self.events: list[Event] = []
        self.released: list[bytes] = []
        self.replies: dict[int, Any] = {}
        self.scores: list[Score] = []  # carried out, in order
        self.held: list[Any] = []
        self.hold: tuple[type, ...] = ()  # effects of these types wait in ``held``
        self.outcome: Callable[[Append], str] = lambda append: "ok"
        self.rows: Callable[[FetchRows], Any] = lambda effect: "rows"
        self.score: Callable[[ScoreRequest], Sequence[Scored] | ScoreFailure] = self._score
        self.load = 0
        self.now_ms = 0
        self._waiter = 0

    # ---- calls ---------------------------------------------------------------------------------

    def at(self) -> Moment:
        return Moment(self.now_ms, self.load)

    def open(self, prompt: tuple[int, ...] = (1, 3, 3, 4), resume: Resume | None = None, **changes: Any) -> Any:
        message = SessionOpen(
            session=changes.pop("session", SESSION), epoch=changes.pop("epoch", 1), contract=self.contract,
            prompt=prompt, commit_log=changes.pop("commit_log", LOG), resume=resume or UNSET,
        )  # fmt: skip
        committed = changes.pop("committed", ())
        log = changes.pop("log", tuple(self.log))
        assert not changes
        opening = Opening(message, prompt, committed, log)
        return self.ask(lambda waiter: self.engine.open(opening, self.options, waiter, self.at()))

    def assign(self, drafter: str = B, m_init: int = 8, **changes: Any) -> Any:
        state = self.state
        base = Assignment(
            session=SESSION, epoch=state.epoch, contract=self.contract, verifier="https://v/", drafter=drafter,
            prompt=(1, 3, 3, 4), round=state.round, committed=state.committed, digest=state.digest, m_init=m_init,
        )  # fmt: skip
        assignment = structs.replace(base, **changes)
        return self.ask(lambda waiter: self.engine.assign(assignment, waiter, self.at()))

    def proposal(self, tokens: Sequence[int], **changes: Any) -> Proposal:
        state = self.state
        base = Proposal(
            session=SESSION, epoch=state.epoch, round=state.round + 1, drafter=B, base=state.committed,
            base_digest=state.digest, tokens=tuple(tokens), status=status("b"),
            q_rows="mlc://mlc/-/q_rows/1" if self.contract.rule == 2 else UNSET,
        )  # fmt: skip
        return structs.replace(base, **changes)

    def propose(self, tokens: Sequence[int], caller: str = B, **changes: Any) -> Any:
        return self.send(self.proposal(tokens, **changes), caller)

    def send(self, proposal: Proposal, caller: str = B) -> Any:
        return self.ask(lambda waiter: self.engine.propose(proposal, caller, waiter))

    def decline(self, caller: str = B, **changes: Any) -> Any:
        base = Decline(session=SESSION, epoch=self.state.epoch, round=self.state.round + 1, drafter=B)
        return self.ask(lambda waiter: self.engine.decline(structs.replace(base, **changes), caller, waiter))

    def policy(self, from_round: int, **sampling: int) -> SessionState:
        return self.engine.policy(Policy(session=SESSION, from_round=from_round, sampling=Sampling(**sampling)))

    def ask(self, call: Callable[[int], Effects]) -> Any:
        """The answer, None while it is held, or the refusal."""
        self._waiter += 1
        waiter = self._waiter
        try:
            self.run(call(waiter))
        except Refusal as refusal:
            return refusal
        return self.replies.get(waiter)

    @property
    def last_waiter(self) -> int:
        return self._waiter

    @property
    def session(self) -> Any:
        return self.engine.sessions[SESSION]

    @property
    def state(self) -> SessionState:
        state: SessionState = self.session.state()
        return state

    def output(self, from_: int = 0) -> Any:
        return self.engine.output(SESSION, from_)

    # ---- effects -------------------------------------------------------------------------------

    def run(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, self.hold):
                self.held.append(effect)
            else:
                self.carry_out(effect)

    def resume(self) -> None:
        """Carry out what was held; nothing is held from here on."""
        held, self.held, self.hold = self.held, [], ()
        for effect in held:
            self.carry_out(effect)

    def carry_out(self, effect: Any) -> None:
        engine, at = self.engine, self.at()
        match effect:
            case Reply():
                assert effect.waiter not in self.replies, "answered twice"
                self.replies[effect.waiter] = effect.answer
            case FetchRows():
                try:
                    rows = self.rows(effect)
                except Refusal as refusal:
                    self.run(engine.rows_failed(effect.session, effect.ticket, refusal, at))
                else:
                    self.run(engine.rows_ready(effect.session, effect.ticket, rows))
            case Score():
                self.scores.append(effect)
                request = effect.request
                if effect.fresh_uniforms:
                    m = len(request.tokens)
                    request = structs.replace(request, uniforms=Uniforms((0.5,) * m, (0.5,) * (m + 1)))
                self.run(engine.scored(request.session, effect.ticket, self.score(request), request.uniforms, at))
            case Append():
                outcome = self.outcome(effect)
                if outcome in ("ok", "lost"):
                    assert len(self.log) == effect.append.sequence
                    self.log.append(effect.append.record)
                self.run(engine.appended(effect, "unknown" if outcome == "lost" else outcome, at))
            case ReadLog():
                self.run(engine.log_read(effect.pending, self.log[effect.pending.append.sequence :], at))
            case SendEvent():
                self.events.append(effect.event)
            case Release():
                self.released.append(effect.session)
            case Publish():
                pass

    def _score(self, request: ScoreRequest) -> list[Scored]:
        last = [request.prefix[request.length - 1], *request.tokens]
        return [Scored(self.target(token), self.target(token), 1.0, 1.0) for token in last]

    # ---- checks --------------------------------------------------------------------------------

    @property
    def commits(self) -> list[CommitRecord]:
        return [record for record in self.log if isinstance(record, CommitRecord)]

    def check(self) -> None:
        """Log, digest chain, output and verdicts tell one story (SDCP-062, 111, 174)."""
        d = digests.prefix_digest(digests.contract_digest(self.contract), self.session.prefix[:4])
        tokens: list[int] = []
        for record in self.commits:
            tokens += record.emitted
            d = digests.extend(d, record.emitted)
            assert (record.committed, record.digest) == (len(tokens), d)
        assert tuple(tokens) == self.output().tokens == tuple(self.session.prefix[4:])
        for verdict in self.session.verdicts.values():
            assert 1 <= verdict.m_cap <= self.contract.m_max


def assigned(contract: Contract = CONTRACT, m_init: int = 8, **target: Any) -> World:
    """A session that is open and has B as its drafter."""
    world = World(contract, **target)
    assert isinstance(world.open(), SessionState)
    assert isinstance(world.assign(m_init=m_init), SessionState)
    return world


class Kit:
    """What test modules use: names and builders, as a fixture because tests can't import each other."""

    A, B, SESSION, LOG, CONTRACT, TARGET = A, B, SESSION, LOG, CONTRACT, TARGET
    World = World
    assigned = staticmethod(assigned)
    status = staticmethod(status)

    @staticmethod
    def contract(**changes: Any) -> Contract:
        return structs.replace(CONTRACT, **changes)

    @staticmethod
    def verdict(answer: Any) -> Verdict:
        assert isinstance(answer, Verdict), answer
        return answer

    @staticmethod
    def refused(answer: Any, status: int, suffix: str | None) -> Refusal:
        assert isinstance(answer, Refusal), answer
        assert (answer.status, answer.suffix) == (status, suffix), answer.detail
        return answer

    @staticmethod
    def zero_rows(_: FetchRows) -> Any:
        raise BadProposal("q(x) is 0")


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(VECTORS.read_text())
    return data
