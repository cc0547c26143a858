"""When a router calls it a failover."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core.messages import Action, Assignment, Contract, Event, Rule, Sampling
from sdcp_mono.core.ports import Chunk, GenerateRequest
from sdcp_mono.core.steps import Fence, Inform
from sdcp_mono.core.traces import Outcome, Untraced, Wish
from sdcp_mono.roles.journey import Journey

SESSION = bytes(16)
CONTRACT = Contract(
    target=b"t" * 32, tokenizer=b"k" * 32, rule=1, m_max=8, max_new=9, stop=(), low_rounds=1, fallback=(1,)
)
ASSIGNMENT = Assignment(
    session=SESSION, epoch=1, contract=CONTRACT, verifier="https://v/", drafter="https://d/", prompt=(1,), round=0,
    committed=0, digest=bytes(32), m_init=4,
)  # fmt: skip
INFORM = Inform(SESSION, "https://v/", ASSIGNMENT)
SWITCH = Event(session=SESSION, epoch=1, kind=int(Action.SWITCH), committed=5, digest=bytes(32))


class Told(Untraced):
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.outcome: Outcome | None = None

    def event(self, session: bytes, name: str, epoch: int = 0, round_: int = 0, **facts: Any) -> None:
        self.events.append((name, facts))

    def closed(self, session: bytes, outcome: Outcome | None = None) -> None:
        self.outcome = outcome


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def journey(told: Told) -> Journey:
    request = GenerateRequest((1,), 9, (), Rule.GREEDY, Sampling())
    return Journey(told, SESSION, Wish(request, "toy"))


def failovers(told: Told) -> list[dict[str, Any]]:
    return [facts for name, facts in told.events if name == "sdcp.failover"]


def test_the_first_drafter_replaces_nobody(told: Told, journey: Journey) -> None:
    journey.begins(INFORM)
    journey.begins(INFORM)  # the one that was chosen has not taken it
    assert failovers(told) == []


def test_a_drafter_that_is_replaced_was_lost(told: Told, journey: Journey) -> None:
    journey.begins(INFORM)
    journey.assigned("https://d/", 1)
    journey.begins(INFORM)
    journey.begins(INFORM)
    assert failovers(told) == [{"role": "drafter", "lost": "https://d/"}]


def test_a_drafter_that_was_let_go_was_not_lost(told: Told, journey: Journey) -> None:
    journey.assigned("https://d/", 1)
    journey.told(SWITCH)
    journey.told(SWITCH)  # AMB-180: at least once
    journey.begins(INFORM)
    assert failovers(told) == []
    assert [facts["action"] for name, facts in told.events if name == "sdcp.escalation"] == ["switch"]


def test_events_that_end_a_session_are_no_escalation(told: Told, journey: Journey) -> None:
    journey.told(structs.replace(SWITCH, kind=int(Action.FINISH)))
    assert told.events == []


def test_a_fence_that_is_tried_again_is_one_failover(told: Told, journey: Journey) -> None:
    journey.opened("https://v/", 1)
    journey.assigned("https://d/", 1)
    journey.begins(Fence(SESSION, "log", 2))
    journey.begins(Fence(SESSION, "log", 2))
    journey.begins(INFORM)  # at the new verifier; its drafter was not at fault
    assert failovers(told) == [{"role": "verifier", "lost": "https://v/"}]


def test_the_outcome_is_what_readers_got(told: Told, journey: Journey) -> None:
    journey.read(Chunk(0, 1, (5, 6), (), False))
    journey.read(Chunk(0, 1, (5,), (), False))  # another reader
    journey.read(Chunk(2, 1, (7,), (), True, int(Action.FINISH)))
    journey.ended("")
    assert told.outcome is not None
    assert (told.outcome.tokens, told.outcome.finish, told.outcome.error) == (3, 4, "")
    assert told.outcome.first_token is not None


def test_why_it_failed_is_kept(told: Told, journey: Journey) -> None:
    journey.read(Chunk(0, 1, (), (), True, int(Action.FAIL), "the model failed"))
    journey.ended("")
    assert told.outcome == Outcome(0, None, int(Action.FAIL), "the model failed")
