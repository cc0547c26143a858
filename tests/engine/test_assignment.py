"""PUT drafter (6.1): whose proposals count, and what a new assignment changes."""

from __future__ import annotations

from typing import Any

import pytest

from sdcp_mono.core.effects import Append, FetchRows, Score
from sdcp_mono.core.messages import Action, SessionState
from sdcp_mono.core.problems import NotAssigned, SessionClosed, StaleEpoch

LOW = [60]  # the target counts up from 4, so this is never right


def test_amb_072_old_values_are_answered_with_the_true_ones(kit: Any) -> None:
    world = kit.assigned()
    kit.verdict(world.propose([5, 6]))
    state = world.assign(kit.A, round=0, committed=0, digest=b"x" * 32)
    assert (state.round, state.committed, state.digest) == (1, 3, world.session.digest)
    assert kit.verdict(world.propose([8], kit.A, drafter=kit.A)).committed == 5


@pytest.mark.parametrize("change", [{"m_max": 4}, {"rule": 2}, {"max_new": 255}, {"low_ratio": 0}])
def test_sdcp_011_amb_073_the_contract_does_not_change(kit: Any, change: dict[str, Any]) -> None:
    world = kit.assigned()
    kit.refused(world.assign(kit.A, contract=kit.contract(**change)), 422, "sdcp-bad-contract")
    kit.verdict(world.propose([5]))  # B's assignment stands


@pytest.mark.parametrize("epoch", [0, 2])
def test_amb_074_another_epoch_is_stale(kit: Any, epoch: int) -> None:
    world = kit.assigned()
    kit.refused(world.assign(kit.A, epoch=epoch), 409, "sdcp-stale-epoch")
    kit.verdict(world.propose([5]))


def test_an_unknown_session_is_not_found(kit: Any) -> None:
    world = kit.assigned()
    kit.refused(world.assign(session=b"x" * 16), 404, None)
    kit.refused(world.propose([5], session=b"x" * 16), 403, "sdcp-not-assigned")  # AMB-050
    kit.refused(world.decline(session=b"x" * 16), 403, "sdcp-not-assigned")


@pytest.mark.parametrize("held", [Score, Append])
def test_amb_075_a_round_in_flight_is_part_of_the_answer(kit: Any, held: type) -> None:
    world = kit.assigned()
    world.hold = (held,)
    proposal = world.proposal([5, 6])
    world.send(proposal)
    drafter = world.last_waiter
    assert world.assign(kit.A) is None
    router = world.last_waiter
    world.resume()
    state = world.replies[router]
    assert (state.round, state.committed) == (1, 3)
    assert world.replies[drafter].committed == 3  # the old drafter gets its verdict
    kit.refused(world.propose([8]), 403, "sdcp-not-assigned")
    kit.verdict(world.propose([8], kit.A, drafter=kit.A))


def test_amb_075_a_round_that_fails_uses_no_number(kit: Any) -> None:
    world = kit.assigned(kit.contract(rule=2))
    world.rows, world.hold = kit.zero_rows, (FetchRows,)
    world.propose([5])
    drafter = world.last_waiter
    world.assign(kit.A)
    router = world.last_waiter
    world.resume()
    kit.refused(world.replies[drafter], 422, "sdcp-bad-proposal")
    assert world.replies[router].round == 0


@pytest.mark.parametrize("end", ["finish", "fence", "close"])
def test_an_assignment_behind_the_last_round_is_refused(kit: Any, end: str) -> None:
    world = kit.assigned(kit.contract(max_new=3))
    world.hold = (Append,)
    world.propose([5, 6])
    world.assign(kit.A)
    router = world.last_waiter
    if end == "fence":
        world.outcome = lambda append: "fenced"
    if end == "close":
        world.run(world.engine.close(kit.SESSION, world.at()))
    world.resume()
    assert isinstance(world.replies[router], StaleEpoch if end == "fence" else SessionClosed)


def test_amb_077_a_repeated_assignment_changes_nothing(kit: Any) -> None:
    world = kit.assigned(kit.contract(low_rounds=1, fallback=(1, 1)))
    assert kit.verdict(world.propose(LOW)).m_cap == 4
    state = world.assign(round=0, m_init=8)  # as the first one was
    assert state.round == 1
    kit.refused(world.propose([6, 7, 8, 9, 10]), 422, "sdcp-limit")
    kit.verdict(world.propose([6, 7, 8, 9]))


@pytest.mark.parametrize(("m_init", "limit"), [(0, 1), (1, 1), (5, 5), (8, 8), (99, 8)])
def test_amb_078_m_init_is_clamped(kit: Any, m_init: int, limit: int) -> None:
    world = kit.assigned(m_init=m_init)
    kit.refused(world.propose(list(range(5, 6 + limit))), 422, "sdcp-limit")
    assert kit.verdict(world.propose(list(range(5, 5 + limit)))).accepted == limit


def test_amb_079_a_new_drafter_starts_from_its_m_init(kit: Any) -> None:
    world = kit.assigned(kit.contract(low_rounds=1, fallback=(1, 1, 2)))
    assert [kit.verdict(world.propose(LOW)).m_cap for _ in range(3)] == [4, 2, 2]
    world.assign(kit.A, m_init=6)
    assert kit.verdict(world.propose([8, 9, 10, 11, 12, 13], kit.A, drafter=kit.A)).accepted == 6


def test_amb_079_a_lower_m_init_holds_too(kit: Any) -> None:
    world = kit.assigned()
    assert kit.verdict(world.propose([5])).m_cap == 8
    world.assign(kit.A, m_init=2)
    kit.refused(world.propose([7, 8, 9], kit.A, drafter=kit.A), 422, "sdcp-limit")


def test_amb_116_counters_survive_a_change_of_drafter(kit: Any) -> None:
    world = kit.assigned()  # three low rounds escalate
    assert [kit.verdict(world.propose(LOW)).low for _ in range(2)] == [1, 2]
    world.assign(kit.A)
    verdict = kit.verdict(world.propose(LOW, kit.A, drafter=kit.A))
    assert (verdict.low, verdict.action) == (3, Action.REDUCE)


def test_amb_096_a_new_drafter_gets_stored_verdicts_too(kit: Any) -> None:
    world = kit.assigned()
    first = world.proposal([5, 6])
    verdict = kit.verdict(world.send(first))
    world.assign(kit.A)
    assert world.propose([9], kit.A, drafter=kit.A, round=1, base=0) is verdict


def test_amb_086_assigned_again_at_a_later_round(kit: Any) -> None:
    world = kit.assigned()
    kit.verdict(world.propose([5, 6]))
    assert world.assign(m_init=3) == world.state
    kit.refused(world.propose([8, 9, 10, 11]), 422, "sdcp-limit")
    kit.verdict(world.propose([8, 9, 10]))


def test_sdcp_200_amb_052_rule_2_needs_a_trusted_drafter(kit: Any) -> None:
    world = kit.World(kit.contract(rule=2), trusted=frozenset({kit.B}))
    world.open()
    kit.refused(world.assign(kit.A), 422, "sdcp-bad-contract")
    kit.refused(world.propose([5], kit.A, drafter=kit.A), 403, "sdcp-not-assigned")
    assert isinstance(world.assign(kit.B), SessionState)
    kit.refused(world.assign(kit.A), 422, "sdcp-bad-contract")
    kit.verdict(world.propose([5]))  # the previous assignment stays


def test_sdcp_200_amb_076_rule_1_takes_any(kit: Any) -> None:
    world = kit.World(trusted=frozenset())
    world.open()
    assert isinstance(world.assign("https://anybody/"), SessionState)


def test_sdcp_189_after_the_end(kit: Any) -> None:
    world = kit.assigned(kit.contract(max_new=1))
    first = world.proposal([5])
    verdict = kit.verdict(world.send(first))
    kit.refused(world.assign(kit.A), 410, "sdcp-session-closed")
    kit.refused(world.propose([6]), 410, "sdcp-session-closed")
    assert world.send(first) is verdict
    length = len(world.log)
    for _ in range(100):  # SDCP-157
        world.propose([6]), world.assign(), world.decline()
    assert len(world.log) == length


def test_amb_070_close_answers_everyone_who_waits(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    world.propose([5])
    world.propose([5])
    world.propose([6])
    waiters = range(world.last_waiter - 2, world.last_waiter + 1)
    world.run(world.engine.close(kit.SESSION, world.at()))
    assert all(isinstance(world.replies[waiter], SessionClosed) for waiter in waiters)
    world.resume()
    assert (world.log, world.released, world.output().finish) == ([], [kit.SESSION], 5)
    world.run(world.engine.close(kit.SESSION, world.at()))  # again
    assert world.released == [kit.SESSION]
    world.engine.forget(kit.SESSION)
    kit.refused(world.ask(lambda _: world.engine.close(kit.SESSION, world.at())), 404, None)


def test_a_late_assignment_finds_the_drafter_unassigned_by_a_switch(kit: Any) -> None:
    world = kit.assigned(kit.contract(low_rounds=1, fallback=(2,)))
    world.hold = (Append,)
    world.propose(LOW)
    world.propose([7])  # behind the round that switches
    waiter = world.last_waiter
    world.resume()
    # It is for the round that was in flight, which has its verdict now (AMB-097).
    assert world.replies[waiter].action == Action.SWITCH
    assert isinstance(world.propose([6]), NotAssigned)
