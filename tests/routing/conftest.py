"""A router's machine under a script, and builders of what it is told."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core import digest as digests
from sdcp_mono.core.messages import CommitRecord, Contract, Event, Role, SessionOpen, SessionState, Status
from sdcp_mono.core.ports import OpenOptions
from sdcp_mono.core.problems import Refusal
from sdcp_mono.core.routing import Router, Stage
from sdcp_mono.core.steps import Inform, Step

SESSION, PROMPT = b"s" * 16, (1, 2, 3)
LOG, TOKENS = "mlc://m/-/log/1", "mlc://m/-/tokens/1"
V, W = "https://v/", "https://w/"
A, B, C = "https://a/", "https://b/", "https://c/"
TARGET, TOKENIZER, MODEL = b"t" * 32, b"k" * 32, b"m" * 32
CONTRACT = Contract(
    target=TARGET, tokenizer=TOKENIZER, rule=1, m_max=8, max_new=100, stop=(), low_rounds=3, fallback=(1, 2, 5)
)
OPTIONS = OpenOptions(top_logprobs=3)


def digest(tokens: tuple[int, ...] = (), contract: Contract = CONTRACT) -> bytes:
    return digests.extend(digests.prefix_digest(digests.contract_digest(contract), PROMPT), tokens)


def state(tokens: tuple[int, ...] = (), round_: int = 0, **changes: Any) -> SessionState:
    base = SessionState(session=SESSION, epoch=1, round=round_, committed=len(tokens), digest=digest(tokens))
    return structs.replace(base, **changes)


def event(kind: int, tokens: tuple[int, ...], epoch: int = 1) -> Event:
    return Event(session=SESSION, epoch=epoch, kind=kind, committed=len(tokens), digest=digest(tokens))


class World:
    """A router, and the steps that it asked for."""

    def __init__(self, drafters: tuple[str, ...] = (A,), verifiers: tuple[str, ...] = (V,), **options: Any) -> None:
        self.router = Router(**{"trusted": frozenset({A, B, C})} | options)
        self.now_ms = 0
        self.drafters, self.verifiers = drafters, verifiers
        self.report()

    def report(self, *bases: str) -> None:
        for base in bases or (*self.drafters, *self.verifiers):
            self.status(base, Role.VERIFIER if base in (V, W) else Role.DRAFTER)

    def status(self, instance: str, role: Role = Role.DRAFTER, **changes: Any) -> None:
        members: dict[str, Any] = {"instance": instance, "role": int(role), "load": 0, "queue": 0, "ttl_ms": 3000}
        self.router.status(Status(**members | changes), self.now_ms)

    def admit(self, contract: Contract = CONTRACT, **changes: Any) -> list[Step]:
        opening = SessionOpen(session=SESSION, epoch=1, contract=contract, prompt=PROMPT, commit_log=LOG)
        return self.router.admit(opening, PROMPT, OPTIONS, 4, self.now_ms, **changes)

    def running(self, contract: Contract = CONTRACT) -> str:
        """Through the whole line of steps; the drafter that got the session."""
        self.admit(contract)
        (inform,) = self.router.opened(SESSION, state(digest=digest((), contract)), self.now_ms)
        assert isinstance(inform, Inform)
        self.router.informed(SESSION, state(digest=digest((), contract)))
        self.router.assigned(SESSION, self.now_ms)
        assert self.stage is Stage.RUNNING
        return inform.assignment.drafter

    def event(self, event: Event) -> list[Step]:
        return self.router.event(event, self.now_ms)

    def failed(self, stage: Stage, refusal: Refusal) -> list[Step]:
        return self.router.failed(SESSION, stage, refusal, self.now_ms)

    def tick(self, ms: int = 0) -> list[Step]:
        self.now_ms += ms
        return self.router.tick(self.now_ms)

    @property
    def routed(self) -> Any:
        return self.router.sessions[SESSION]

    @property
    def stage(self) -> Stage:
        stage: Stage = self.routed.stage
        return stage

    def counts(self) -> dict[str, int]:
        return {i.base: i.sessions for i in self.router.instances.values()}


COMMITS = [
    CommitRecord(epoch=1, round=1, emitted=(7, 8), committed=2, digest=digest((7, 8))),
    CommitRecord(epoch=1, round=2, emitted=(9,), committed=3, digest=digest((7, 8, 9))),
]


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """This module: tests can't import each other."""
    return sys.modules[__name__]
