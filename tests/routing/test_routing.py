"""Admission, selection, statuses and policies (6.1, 6.6)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core.messages import Policy, Role, Sampling, SessionOpen
from sdcp_mono.core.problems import BadContract, Conflict, Refusal, SessionClosed, Unavailable, UnknownSession
from sdcp_mono.core.routing import AVOID_MS, MAX_INSTANCES, MAX_TRIES, MAX_TTL_MS, Candidate, Stage, prefer_idle
from sdcp_mono.core.steps import Assign, Ended, Inform, Open, SendPolicy

# ---- a session's life (6.1) ------------------------------------------------------------------------------


def test_sdcp_009_074_080_081_the_order_of_steps_and_what_they_carry(kit: Any) -> None:
    world = kit.World()
    (step,) = world.admit()
    assert isinstance(step, Open)
    assert (step.verifier, step.message.epoch, step.message.commit_log, step.options) == (
        kit.V,
        1,
        kit.LOG,
        kit.OPTIONS,
    )
    (inform,) = world.router.opened(kit.SESSION, kit.state(), 0)
    assert isinstance(inform, Inform)  # the verifier hears of it first
    assert (inform.verifier, inform.assignment.drafter, inform.assignment.m_init) == (kit.V, kit.A, 4)
    (assign,) = world.router.informed(kit.SESSION, kit.state((9,), 1))
    assert isinstance(assign, Assign)
    assert (assign.drafter, assign.assignment.verifier) == (kit.A, kit.V)
    told = assign.assignment  # as the verifier answered, not as the router knew
    assert (told.round, told.committed, told.digest, told.contract) == (1, 1, kit.digest((9,)), kit.CONTRACT)
    assert world.router.assigned(kit.SESSION, 0) == []
    assert world.stage is Stage.RUNNING


@pytest.mark.parametrize("stage", ["opened", "informed", "assigned"])
def test_late_answers_change_nothing(kit: Any, stage: str) -> None:
    world = kit.World()
    world.running()
    late = {
        "opened": lambda: world.router.opened(kit.SESSION, kit.state(), 0),
        "informed": lambda: world.router.informed(kit.SESSION, kit.state()),
        "assigned": lambda: world.router.assigned(kit.SESSION, 0),
    }[stage]
    assert late() == []
    assert world.stage is Stage.RUNNING
    assert world.failed(Stage.OPENING, Unavailable("late")) == []


def test_sdcp_078_another_digest_ends_the_request_before_any_assignment(kit: Any) -> None:
    world = kit.World()
    world.admit()
    (ended,) = world.router.opened(kit.SESSION, kit.state(digest=b"?" * 32), 0)
    assert isinstance(ended, Ended)
    assert ended.error


def test_an_undrafted_session_gets_no_drafter(kit: Any) -> None:
    world = kit.World()
    world.admit(drafted=False)
    assert world.router.opened(kit.SESSION, kit.state(), 0) == []
    assert world.tick(100_000) != []  # the verifier's status has expired by then, which still matters
    assert world.stage is Stage.FENCING


def test_admission(kit: Any) -> None:
    world = kit.World()
    with pytest.raises(BadContract):
        world.admit(structs.replace(kit.CONTRACT, m_max=0))
    world.admit()
    with pytest.raises(Conflict):
        world.admit()
    with pytest.raises(Unavailable):
        kit.World(verifiers=()).admit()


def test_sdcp_079_a_verifier_of_the_contracts_target(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.status(kit.V, Role.VERIFIER, models=(b"x" * 32,))
    world.status(kit.W, Role.VERIFIER, models=(kit.TARGET,), load=99, queue=9)
    (step,) = world.admit()
    assert isinstance(step, Open)
    assert step.verifier == kit.W


@pytest.mark.parametrize("refusal", [SessionClosed("over"), UnknownSession("gone")])
def test_a_session_that_ended_before_it_was_assigned_is_fine(kit: Any, refusal: Refusal) -> None:
    world = kit.World()
    world.admit()
    world.router.opened(kit.SESSION, kit.state(), 0)
    assert world.failed(Stage.INFORMING, refusal) == [Ended(kit.SESSION, "")]


def test_sdcp_080_a_refused_put_sends_no_assignment_and_amb_087_tries_another(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B))
    world.admit()
    (first,) = world.router.opened(kit.SESSION, kit.state(), 0)
    assert isinstance(first, Inform)
    (second,) = world.failed(Stage.INFORMING, BadContract("rule 2 needs a trusted drafter"))
    assert isinstance(second, Inform)
    assert second.assignment.drafter != first.assignment.drafter
    world.router.informed(kit.SESSION, kit.state())
    (third,) = world.failed(Stage.ASSIGNING, Unavailable("full"))  # begins again with the verifier
    assert isinstance(third, Inform)
    assert third.assignment.drafter == first.assignment.drafter


def test_amb_087_a_single_drafter_that_refuses_is_not_stormed(kit: Any) -> None:
    world = kit.World(patience_ms=10_000)
    world.admit()
    world.router.opened(kit.SESSION, kit.state(), 0)
    puts = 0
    while world.stage is not Stage.ENDED:
        if world.stage is Stage.INFORMING:
            puts += 1
            world.router.informed(kit.SESSION, kit.state())
            assert world.failed(Stage.ASSIGNING, Unavailable("full")) == []
            assert world.stage is Stage.WAITING
        world.report()
        world.tick(250)
    assert world.now_ms == 10_000
    assert puts == 10_000 // AVOID_MS


def test_a_session_stops_trying_and_waits(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B))
    world.admit()
    world.router.opened(kit.SESSION, kit.state(), 0)
    for _ in range(MAX_TRIES - 1):
        assert world.failed(Stage.INFORMING, Unavailable("no answer")) != []
        world.now_ms += AVOID_MS  # so that there is always another one
        world.report()
    assert world.failed(Stage.INFORMING, Unavailable("no answer")) == []
    assert world.stage is Stage.WAITING


# ---- selection (6.1) ---------------------------------------------------------------------------------------


def test_sdcp_083_idle_drafters_are_preferred(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B, kit.C))
    for base, load in ((kit.A, 90), (kit.B, 10), (kit.C, 50)):
        world.status(base, load=load)
    assert world.running() == kit.B


def test_sdcp_083_the_default_policy(kit: Any) -> None:
    def rank(**changes: int) -> Any:
        members = {"load": 50, "queue": 0, "accept_milli": 500, "sessions": 2} | changes
        return prefer_idle(Candidate("x", **members))

    assert rank(sessions=1) < rank() < rank(queue=1)
    assert rank(load=10) < rank()
    assert rank(accept_milli=900) < rank()
    assert rank(sessions=1, load=99) < rank(load=0)


def test_sdcp_083_the_policy_is_pluggable(kit: Any) -> None:
    world = kit.World(
        drafters=(kit.A, kit.B, kit.C),
        prefer=lambda candidate: (0, 0, 0, "" if candidate.base == kit.C else candidate.base),
    )
    assert world.running() == kit.C


def test_sdcp_083_sessions_are_spread_and_counts_come_back_to_0(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B, kit.C), verifiers=(kit.V, kit.W))
    names = [bytes([i]) * 16 for i in range(6)]
    for name in names:
        opening = SessionOpen(session=name, epoch=1, contract=kit.CONTRACT, prompt=kit.PROMPT, commit_log=kit.LOG)
        world.router.admit(opening, kit.PROMPT, kit.OPTIONS, 4, 0)
        world.router.opened(name, kit.state(), 0)
    assert world.counts() == {kit.A: 2, kit.B: 2, kit.C: 2, kit.V: 3, kit.W: 3}
    for name in names:
        world.router.forget(name)
    assert set(world.counts().values()) == {0}


def test_sdcp_034_amb_033_only_permitted_models(kit: Any) -> None:
    contract = structs.replace(kit.CONTRACT, drafters=(kit.MODEL, b"n" * 32))
    world = kit.World(drafters=(kit.A, kit.B, kit.C))
    world.status(kit.A, models=(kit.MODEL, b"?" * 32))  # it may draft with any of them
    world.status(kit.B)  # says nothing
    assert world.router.drafter_for(contract, 0) is None
    assert world.router.drafter_for(kit.CONTRACT, 0) is not None
    world.status(kit.C, models=(b"n" * 32, kit.MODEL))
    chosen = world.router.drafter_for(contract, 0)
    assert chosen is not None
    assert chosen.base == kit.C


def test_amb_033_configuration_wins(kit: Any) -> None:
    contract = structs.replace(kit.CONTRACT, drafters=(kit.MODEL,))
    world = kit.World(drafters=(kit.A,), models={kit.A: (kit.MODEL,)})
    world.status(kit.A, models=(b"?" * 32,))
    assert world.router.drafter_for(contract, 0) is not None
    world = kit.World(drafters=(kit.A,), models={kit.A: (b"?" * 32,)})
    world.status(kit.A, models=(kit.MODEL,))
    assert world.router.drafter_for(contract, 0) is None


def test_sdcp_200_rule_2_goes_to_trusted_drafters_only(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B), trusted=frozenset({kit.B}))
    sampled = structs.replace(kit.CONTRACT, rule=2)
    assert world.running(sampled) == kit.B
    world = kit.World(drafters=(kit.A,), trusted=frozenset({kit.B}))
    assert world.router.drafter_for(sampled, 0) is None
    assert world.router.drafter_for(kit.CONTRACT, 0) is not None


def test_another_tokenizer_is_no_drafter(kit: Any) -> None:
    world = kit.World()
    world.status(kit.A, tokenizer=b"?" * 32)
    assert world.router.drafter_for(kit.CONTRACT, 0) is None


# ---- statuses (6.1) ----------------------------------------------------------------------------------------


def test_sdcp_084_amb_183_an_expired_status_gets_nothing(kit: Any) -> None:
    world = kit.World()
    world.now_ms = 2999
    assert world.router.drafter_for(kit.CONTRACT, world.now_ms) is not None
    world.now_ms = 3000
    assert world.router.drafter_for(kit.CONTRACT, world.now_ms) is None
    with pytest.raises(Unavailable):
        world.admit()
    world.report()
    assert world.admit()


def test_amb_184_ttl_0_withdraws_and_huge_ones_are_cut(kit: Any) -> None:
    world = kit.World()
    world.status(kit.A, ttl_ms=0)
    assert world.router.alive(Role.DRAFTER, 0) == []
    world.status(kit.A, ttl_ms=10**9)
    assert len(world.router.alive(Role.DRAFTER, MAX_TTL_MS - 1)) == 1
    assert world.router.alive(Role.DRAFTER, MAX_TTL_MS) == []


def test_amb_047_048_base_and_role_name_an_instance(kit: Any) -> None:
    world = kit.World(drafters=(), verifiers=())
    world.status("drafter-1", base=kit.A)
    world.status(kit.A, Role.VERIFIER)
    assert [i.base for i in world.router.alive(Role.DRAFTER, 0)] == [kit.A]
    assert [i.base for i in world.router.alive(Role.VERIFIER, 0)] == [kit.A]


def test_instances_do_not_pile_up(kit: Any) -> None:
    world = kit.World(drafters=(), verifiers=())
    for i in range(MAX_INSTANCES):
        world.status(f"https://{i}/")
    with pytest.raises(Unavailable):
        world.status("https://one-more/")
    world.status("https://0/")  # known ones still report
    world.tick(3000 + MAX_TTL_MS)
    assert world.router.instances == {}


# ---- policies (6.6) ------------------------------------------------------------------------------------------


def test_sdcp_162_later_assignments_carry_the_profile(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B))
    world.running()
    policy = Policy(session=kit.SESSION, from_round=3, sampling=Sampling(seed=1))
    assert world.router.policy(policy) == [SendPolicy(kit.SESSION, kit.V, policy)]
    (inform,) = world.event(kit.event(2, (7,)))
    assert isinstance(inform, Inform)
    assert (inform.assignment.sampling, inform.assignment.contract) == (Sampling(seed=1), kit.CONTRACT)
