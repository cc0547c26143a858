"""Instances that come and go, and who of them gets a session (6.1, C-43)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core.messages import Role, SessionOpen
from sdcp_mono.core.routing import LEAVING_MS, MAX_TTL_MS, Stage
from sdcp_mono.core.steps import Fence, Inform, Open

OTHER_MODEL = b"n" * 32


def opened(kit: Any, world: Any, name: bytes, contract: Any = None) -> tuple[str, str]:
    """Verifier and drafter of a new session."""
    opening = SessionOpen(
        session=name, epoch=1, contract=contract or kit.CONTRACT, prompt=kit.PROMPT, commit_log=kit.LOG
    )
    (step,) = world.router.admit(opening, kit.PROMPT, kit.OPTIONS, 4, world.now_ms)
    assert isinstance(step, Open)
    (inform,) = world.router.opened(name, kit.state(digest=kit.digest((), opening.contract)), world.now_ms)
    assert isinstance(inform, Inform)
    return step.verifier, inform.assignment.drafter


def test_an_instance_that_reports_gets_sessions_and_one_that_is_silent_is_forgotten(kit: Any) -> None:
    world = kit.World(drafters=(kit.A,))
    world.status(kit.B)
    assert {opened(kit, world, bytes([i]) * 16)[1] for i in range(2)} == {kit.A, kit.B}
    world.drafters = (kit.A,)
    for i in range(2):
        world.router.forget(bytes([i]) * 16)
    world.tick(3000 + MAX_TTL_MS)
    assert world.router.instances == {}
    world.report()
    assert opened(kit, world, b"x" * 16)[1] == kit.A


def test_c_43_after_a_gap_one_report_says_everything(kit: Any) -> None:
    world = kit.World()
    world.status(kit.A, load=90, queue=7, accept_milli=900, models=(kit.MODEL,))
    world.now_ms += 10_000
    assert world.router.alive(Role.DRAFTER, world.now_ms) == []
    world.status(kit.A, load=1)
    (after,) = world.router.alive(Role.DRAFTER, world.now_ms)
    fresh = kit.World()
    fresh.now_ms = world.now_ms
    fresh.status(kit.A, load=1)
    assert after == fresh.router.alive(Role.DRAFTER, world.now_ms)[0]  # nothing is left of the older report


@pytest.mark.parametrize(
    ("better", "worse"),
    [({"queue": 0}, {"queue": 1}), ({"load": 10}, {"load": 11}), ({"accept_milli": 801}, {"accept_milli": 800})],
)
def test_sdcp_083_queue_load_and_acceptance_decide(kit: Any, better: Any, worse: Any) -> None:
    for role, pair in ((Role.DRAFTER, (kit.A, kit.B)), (Role.VERIFIER, (kit.V, kit.W))):
        for good, bad in (pair, pair[::-1]):
            world = kit.World(verifiers=(kit.V, kit.W), drafters=(kit.A, kit.B))
            world.status(good, role, **better)
            world.status(bad, role, **worse)
            assert good in opened(kit, world, b"x" * 16)


def test_a_pool_may_mix_models(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B, kit.C))
    world.status(kit.A, models=(kit.MODEL,), accept_milli=400)
    world.status(kit.B, models=(OTHER_MODEL,), accept_milli=800)
    world.status(kit.C, models=(kit.MODEL, OTHER_MODEL), accept_milli=600)
    assert opened(kit, world, b"1" * 16)[1] == kit.B  # any will do: the one that is accepted most
    only = structs.replace(kit.CONTRACT, drafters=(kit.MODEL,))
    assert opened(kit, world, b"2" * 16, only)[1] == kit.A
    assert opened(kit, world, b"3" * 16, only)[1] == kit.A


def test_any_drafter_works_with_any_verifier(kit: Any) -> None:
    """M:N: six sessions over two verifiers and three drafters are six different pairs."""
    world = kit.World(drafters=(kit.A, kit.B, kit.C), verifiers=(kit.V, kit.W))
    pairs = {opened(kit, world, bytes([i]) * 16) for i in range(6)}
    assert pairs == {(v, d) for v in (kit.V, kit.W) for d in (kit.A, kit.B, kit.C)}


# ---- leaving ---------------------------------------------------------------------------------------------


def test_a_leaving_verifier_hands_over(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.status(kit.W, Role.VERIFIER, queue=1)
    world.running()
    world.status(kit.V, Role.VERIFIER, ttl_ms=1)
    (step,) = world.tick(1)
    assert isinstance(step, Fence)


def test_without_another_verifier_a_session_ends_where_it_is(kit: Any) -> None:
    world = kit.World()
    world.running()
    world.status(kit.V, Role.VERIFIER, ttl_ms=1)
    world.status(kit.A, ttl_ms=MAX_TTL_MS)
    assert world.tick(LEAVING_MS - 1) == []  # it still reports; from its last report on it may take so long
    assert world.stage is Stage.RUNNING
    (step,) = world.tick(1)
    assert isinstance(step, Fence)


def test_a_verifier_that_is_of_no_use_keeps_nothing(kit: Any) -> None:
    world = kit.World()
    world.running()
    world.status(kit.V, Role.VERIFIER, ttl_ms=0)
    (step,) = world.tick()
    assert isinstance(step, Fence)
