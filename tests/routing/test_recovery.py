"""What the router does when something dies, ends or asks for another drafter (6.5.2, 6.8, 6.9)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from sdcp_mono.core.messages import CommitRecord, FenceRecord, Policy, Sampling, SessionOpen
from sdcp_mono.core.problems import BadContract, Conflict, SessionClosed, StaleEpoch, Unavailable, UnknownSession
from sdcp_mono.core.routing import AVOID_MS, MAX_TRIES, STRANDED_MS, Stage
from sdcp_mono.core.steps import Assign, Ended, Fence, Inform, Open, ReadRecords, SendPolicy, Step

# ---- drafters that are lost or left (6.5.2, 6.9) -------------------------------------------------------------


def test_sdcp_175_176_amb_185_an_expired_drafters_sessions_move_at_the_tick(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B))
    first = world.running()
    other = kit.B if first == kit.A else kit.A
    world.now_ms = 2999
    world.report(other, kit.V)
    assert world.tick() == []
    (inform,) = world.tick(1)
    assert isinstance(inform, Inform)
    assert inform.assignment.drafter == other
    (assign,) = world.router.informed(kit.SESSION, kit.state((7, 8), 1))
    assert isinstance(assign, Assign)
    assert (assign.drafter, assign.assignment.committed, assign.assignment.digest) == (other, 2, kit.digest((7, 8)))
    world.router.assigned(kit.SESSION, world.now_ms)
    assert (world.counts()[first], world.counts()[other]) == (0, 1)


def test_sdcp_148_switch_goes_to_another_drafter(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B))
    first = world.running()
    (inform,) = world.event(kit.event(2, (7,)))
    assert isinstance(inform, Inform)
    assert inform.assignment.drafter != first
    assert (inform.assignment.committed, inform.assignment.digest) == (1, kit.digest((7,)))


def test_sdcp_153_after_self_decoding_the_same_drafter_will_do(kit: Any) -> None:
    world = kit.World()
    assert world.running() == kit.A
    (inform,) = world.event(kit.event(3, (7, 8)))
    assert isinstance(inform, Inform)
    assert inform.assignment.drafter == kit.A


def test_amb_117_a_switch_without_another_drafter_waits_and_then_takes_the_same(kit: Any) -> None:
    world = kit.World()
    world.running()
    assert world.event(kit.event(2, (7,))) == []
    assert (world.stage, world.counts()[kit.A]) == (Stage.WAITING, 0)
    world.report()
    assert world.tick(AVOID_MS - 1) == []
    (inform,) = world.tick(1)
    assert isinstance(inform, Inform)
    assert inform.assignment.drafter == kit.A


def test_amb_117_waiting_ends_with_an_error_where_verifiers_do_not_decode_by_themselves(kit: Any) -> None:
    for patience, ended in ((5_000, True), (None, False)):
        world = kit.World(patience_ms=patience)
        world.running()
        for _ in range(20):
            world.report(kit.V)
            steps = world.tick(500)
            if steps:
                assert isinstance(steps[0], Ended)
                assert steps[0].error
                break
        assert (world.stage is Stage.ENDED) == ended
        if ended:
            assert world.now_ms == 3_000 + 5_000
        else:
            world.report()
            assert isinstance(world.tick()[0], Inform)  # it is never too late


def test_sdcp_034_a_switch_never_goes_to_a_forbidden_drafter(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B), models={kit.A: (kit.MODEL,), kit.B: (b"?" * 32,)})
    contract = structs.replace(kit.CONTRACT, drafters=(kit.MODEL,))
    assert world.running(contract) == kit.A
    assert world.event(kit.event(2, (7,))) == []


@pytest.mark.parametrize("stage", [Stage.INFORMING, Stage.ASSIGNING])
@pytest.mark.parametrize("kind", [2, 3])
def test_an_event_that_overtakes_the_assignments_answer_is_not_lost(kit: Any, kind: int, stage: Stage) -> None:
    """The drafter may be at work, and its verdict ask for another, before the router hears that it has accepted."""
    world = kit.World(drafters=(kit.A, kit.B))
    assert world.running() == kit.A
    world.event(kit.event(2, (7,)))
    assert world.stage is Stage.INFORMING
    event = kit.event(kind, (7, 8))
    if stage is Stage.INFORMING:
        assert world.event(event) == []
    world.router.informed(kit.SESSION, kit.state((7,), 1))
    if stage is Stage.ASSIGNING:
        assert world.event(event) == []
    (inform,) = world.router.assigned(kit.SESSION, world.now_ms)
    assert isinstance(inform, Inform)
    assert inform.assignment.committed == 2


def test_amb_180_repeated_and_old_events_change_nothing(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B, kit.C))
    world.running()
    switch = kit.event(2, (7,))
    (inform,) = world.event(switch)
    assert isinstance(inform, Inform)
    assert world.event(switch) == []  # while informing
    world.router.informed(kit.SESSION, kit.state((7,), 1))
    assert world.event(switch) == []  # while assigning
    world.router.assigned(kit.SESSION, 0)
    assert world.event(switch) == []  # and when its new drafter is at work
    assert world.event(kit.event(2, ())) == []
    assert world.event(kit.event(2, (7, 8), epoch=0)) == []
    assert world.stage is Stage.RUNNING
    assert len(world.event(kit.event(2, (7, 8)))) == 1


@pytest.mark.parametrize("stage", [Stage.INFORMING, Stage.ASSIGNING])
def test_amb_181_an_event_that_overtakes_the_answer_to_an_assignment_is_not_lost(kit: Any, stage: Stage) -> None:
    """The drafter was at work before the router had heard that it took the session."""
    world = kit.World(drafters=(kit.A, kit.B))
    world.admit()
    world.router.opened(kit.SESSION, kit.state(), 0)
    if stage is Stage.INFORMING:
        world.event(kit.event(2, (7,)))
    world.router.informed(kit.SESSION, kit.state())
    if stage is Stage.ASSIGNING:
        world.event(kit.event(2, (7,)))
    (inform,) = world.router.assigned(kit.SESSION, 0)
    assert isinstance(inform, Inform)
    assert inform.assignment.committed == 1


def test_an_event_that_an_assignment_has_answered_is_dropped(kit: Any) -> None:
    world = kit.World(drafters=(kit.A, kit.B))
    world.running()
    world.status(kit.A, ttl_ms=0), world.status(kit.B, ttl_ms=0)
    world.report(kit.A if world.routed.drafter == kit.B else kit.B)
    world.tick()  # its drafter is gone, another one is being named
    assert world.event(kit.event(2, (7,))) == []
    world.router.informed(kit.SESSION, kit.state((7,), 1))  # the PUT came after the round that asked
    assert world.router.assigned(kit.SESSION, 0) == []


@pytest.mark.parametrize("kind", [4, 5])
def test_amb_178_events_that_end_a_session(kit: Any, kind: int) -> None:
    """Also a failed one: why it failed, and the tokens it still had, are in its output (AMB-118)."""
    world = kit.World()
    world.running()
    assert world.event(kit.event(kind, ())) == [Ended(kit.SESSION, "")]
    assert world.event(kit.event(kind, ())) == []
    assert world.tick(1000) == []
    assert world.counts()[kit.A] == 0


@pytest.mark.parametrize("kind", [6, 77, 192])
def test_sdcp_071_an_unknown_kind_ends_the_session_with_an_error(kit: Any, kind: int) -> None:
    world = kit.World()
    world.running()
    (ended,) = world.event(kit.event(kind, (7,)))
    assert isinstance(ended, Ended)
    assert ended.error


@pytest.mark.parametrize("kind", [0, 1])
def test_other_known_kinds_change_nothing(kit: Any, kind: int) -> None:
    world = kit.World()
    world.running()
    assert world.event(kit.event(kind, (7,))) == []
    assert world.stage is Stage.RUNNING


def test_amb_182_unknown_sessions(kit: Any) -> None:
    world = kit.World()
    with pytest.raises(UnknownSession):
        world.event(kit.event(4, ()))
    with pytest.raises(UnknownSession):
        world.router.policy(Policy(session=kit.SESSION, from_round=1, sampling=Sampling()))
    world.router.forget(kit.SESSION)


# ---- verifiers that are lost (6.8, 6.9) ------------------------------------------------------------------------


def lose(world: Any) -> list[Step]:
    """The verifier that has the session expires; everybody else lives on."""
    lost = world.routed.verifier
    world.now_ms += 3000
    world.report(*(base for base in (*world.drafters, *world.verifiers) if base != lost))
    return world.tick()


def test_sdcp_178_the_order_of_a_failover(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    first = world.routed.verifier
    other = kit.W if first == kit.V else kit.V
    assert lose(world) == [Fence(kit.SESSION, kit.LOG, 2)]  # nothing before the fence
    assert world.tick() == []
    assert world.router.fenced(kit.SESSION, True, 2) == [ReadRecords(kit.SESSION, kit.LOG)]
    (step,) = world.router.records(kit.SESSION, [*kit.COMMITS, FenceRecord(epoch=2)], kit.TOKENS, world.now_ms)
    assert isinstance(step, Open)
    assert (step.verifier, step.message.epoch, step.options) == (other, 2, kit.OPTIONS)
    resume = step.message.resume
    assert resume is not UNSET
    assert (resume.round, resume.committed, resume.digest) == (2, 3, kit.digest((7, 8, 9)))
    assert resume.committed_tokens == kit.TOKENS
    told = kit.state((7, 8, 9), 2, epoch=2)
    (inform,) = world.router.opened(kit.SESSION, told, world.now_ms)
    assert isinstance(inform, Inform)
    assert (inform.verifier, inform.assignment.epoch, inform.assignment.round) == (other, 2, 2)
    (assign,) = world.router.informed(kit.SESSION, told)
    assert isinstance(assign, Assign)
    assert (assign.assignment.epoch, assign.assignment.committed) == (2, 3)
    assert (world.counts()[first], world.counts()[other]) == (0, 1)


def test_amb_058_failover_before_anything_was_committed(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    lose(world)
    world.router.fenced(kit.SESSION, True, 2)
    (step,) = world.router.records(kit.SESSION, [FenceRecord(epoch=2)], kit.TOKENS, world.now_ms)
    assert isinstance(step, Open)
    resume = step.message.resume
    assert resume is not UNSET
    assert (resume.round, resume.committed, resume.digest) == (0, 0, kit.digest())


def test_sdcp_179_without_a_fence_nothing_is_opened(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    lose(world)
    for _ in range(MAX_TRIES - 1):
        assert world.failed(Stage.FENCING, Unavailable("the log does not answer")) == [Fence(kit.SESSION, kit.LOG, 2)]
    (ended,) = world.failed(Stage.FENCING, Unavailable("the log does not answer"))
    assert isinstance(ended, Ended)
    assert ended.error


def test_amb_154_another_router_was_faster(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    lose(world)
    assert world.router.fenced(kit.SESSION, False, 4) == [Fence(kit.SESSION, kit.LOG, 5)]
    assert world.router.fenced(kit.SESSION, True, 5) == [ReadRecords(kit.SESSION, kit.LOG)]
    (step,) = world.router.records(kit.SESSION, [*kit.COMMITS, FenceRecord(epoch=5)], kit.TOKENS, world.now_ms)
    assert isinstance(step, Open)
    assert step.message.epoch == 5


def test_amb_154_a_log_that_is_always_fenced_by_others_ends_it(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    steps = lose(world)
    for _ in range(MAX_TRIES):
        (fence,) = steps
        assert isinstance(fence, Fence)
        steps = world.router.fenced(kit.SESSION, False, fence.epoch)
    assert isinstance(steps[0], Ended)


def test_reading_is_tried_again_too(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    lose(world)
    world.router.fenced(kit.SESSION, True, 2)
    assert world.failed(Stage.READING, Unavailable("no room for the tokens")) == [ReadRecords(kit.SESSION, kit.LOG)]
    (ended,) = world.failed(Stage.READING, UnknownSession("no such log"))
    assert isinstance(ended, Ended)


def test_a_new_verifier_that_cannot_open_it_either_is_fenced_in_turn(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    lose(world)
    world.router.fenced(kit.SESSION, True, 2)
    world.router.records(kit.SESSION, [*kit.COMMITS, FenceRecord(epoch=2)], kit.TOKENS, world.now_ms)
    # No answer: it may have opened the session all the same.
    assert world.failed(Stage.OPENING, Unavailable("no answer")) == [Fence(kit.SESSION, kit.LOG, 3)]
    world.router.fenced(kit.SESSION, True, 3)
    world.router.records(kit.SESSION, [*kit.COMMITS, FenceRecord(epoch=3)], kit.TOKENS, world.now_ms)
    (ended,) = world.failed(Stage.OPENING, BadContract("target"))  # this one will not change
    assert isinstance(ended, Ended)


def test_a_first_opening_is_not_tried_elsewhere(kit: Any) -> None:
    """Its caller is still there and hears the refusal."""
    world = kit.World(verifiers=(kit.V, kit.W))
    world.admit()
    (ended,) = world.failed(Stage.OPENING, Unavailable("no room"))
    assert isinstance(ended, Ended)


def test_amb_161_a_reader_may_notice_first_and_only_once(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    assert world.router.verifier_lost(kit.SESSION, 1) == [Fence(kit.SESSION, kit.LOG, 2)]
    assert world.router.verifier_lost(kit.SESSION, 1) == []
    world.router.fenced(kit.SESSION, True, 2)
    assert world.router.verifier_lost(kit.SESSION, 1) == []
    world.router.records(kit.SESSION, [FenceRecord(epoch=2)], kit.TOKENS, 0)
    assert world.router.verifier_lost(kit.SESSION, 1) == []  # it is being opened already
    world.router.opened(kit.SESSION, kit.state(epoch=2), 0)
    assert world.router.verifier_lost(kit.SESSION, 1) == []
    assert world.router.verifier_lost(kit.SESSION, 2) == [Fence(kit.SESSION, kit.LOG, 3)]


def test_amb_061_a_finished_session_moves_for_the_sake_of_its_readers(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    first = world.routed.verifier
    world.event(kit.event(4, (7, 8, 9)))
    assert lose(world) == []  # nobody has asked
    assert world.router.verifier_lost(kit.SESSION, 1) == [Fence(kit.SESSION, kit.LOG, 2)]
    world.router.fenced(kit.SESSION, True, 2)
    (step,) = world.router.records(kit.SESSION, [*kit.COMMITS, FenceRecord(epoch=2)], kit.TOKENS, world.now_ms)
    assert isinstance(step, Open)
    assert step.verifier != first
    (inform,) = world.router.opened(kit.SESSION, kit.state((7, 8, 9), 2, epoch=2, state=4), world.now_ms)
    assert isinstance(inform, Inform)
    assert world.failed(Stage.INFORMING, SessionClosed("finished")) == [Ended(kit.SESSION, "")]
    world.router.forget(kit.SESSION)
    assert set(world.counts().values()) == {0}


def test_amb_065_the_profile_is_sent_again_before_the_drafter_is_named(kit: Any) -> None:
    world = kit.World(verifiers=(kit.V, kit.W))
    world.running()
    world.router.policy(Policy(session=kit.SESSION, from_round=3, sampling=Sampling(seed=1)))
    lose(world)
    world.router.fenced(kit.SESSION, True, 2)
    world.router.records(kit.SESSION, [*kit.COMMITS, FenceRecord(epoch=2)], kit.TOKENS, world.now_ms)
    policy, inform = world.router.opened(kit.SESSION, kit.state((7, 8, 9), 2, epoch=2), world.now_ms)
    assert isinstance(policy, SendPolicy)
    assert policy.policy == Policy(session=kit.SESSION, from_round=3, sampling=Sampling(seed=1))
    assert isinstance(inform, Inform)


def test_the_same_verifier_is_better_than_none(kit: Any) -> None:
    """A reader's request failed, but the verifier reports: a wrong guess is safe because of the fence (AMB-161)."""
    world = kit.World()
    world.running()
    world.router.verifier_lost(kit.SESSION, 1)
    world.router.fenced(kit.SESSION, True, 2)
    (step,) = world.router.records(kit.SESSION, [FenceRecord(epoch=2)], kit.TOKENS, 0)
    assert isinstance(step, Open)
    assert (step.verifier, step.message.epoch) == (kit.V, 2)


def test_a_session_without_any_verifier_waits_for_one(kit: Any) -> None:
    """Fenced and stranded; a verifier that restarts takes it up, and without one it ends after a minute."""
    world = kit.World()
    world.running()
    lose(world)
    world.router.fenced(kit.SESSION, True, 2)
    assert world.router.records(kit.SESSION, kit.COMMITS, kit.TOKENS, world.now_ms) == []
    assert world.router.tick(world.now_ms) == []
    assert world.router.verifier_lost(kit.SESSION, 2) == []  # a reader that notices changes nothing
    world.report(kit.V)
    (read,) = world.router.tick(world.now_ms)
    assert isinstance(read, ReadRecords)
    (step,) = world.router.records(kit.SESSION, kit.COMMITS, kit.TOKENS, world.now_ms)
    assert isinstance(step, Open)
    assert step.message.epoch == 2

    world = kit.World()
    world.running()
    lose(world)
    world.router.fenced(kit.SESSION, True, 2)
    world.router.records(kit.SESSION, kit.COMMITS, kit.TOKENS, world.now_ms)
    assert world.router.tick(world.now_ms + STRANDED_MS - 1) == []
    (ended,) = world.router.tick(world.now_ms + STRANDED_MS)
    assert isinstance(ended, Ended)
    assert ended.error == "no verifier is alive"


def test_amb_160_a_session_is_taken_up_again_from_its_log_alone(kit: Any) -> None:
    """Another router, or this one after a restart: fence above whatever is there, then go on where the log ends."""
    world = kit.World()
    opening = SessionOpen(session=kit.SESSION, epoch=1, contract=kit.CONTRACT, prompt=kit.PROMPT, commit_log=kit.LOG)
    (fence,) = world.router.recover(opening, kit.PROMPT, kit.OPTIONS, 4)
    assert fence == Fence(kit.SESSION, kit.LOG, 2)
    (fence,) = world.router.fenced(kit.SESSION, False, 5)  # it has been moved before
    assert fence == Fence(kit.SESSION, kit.LOG, 6)
    (read,) = world.router.fenced(kit.SESSION, True, 6)
    assert read == ReadRecords(kit.SESSION, kit.LOG)
    (step,) = world.router.records(kit.SESSION, kit.COMMITS, kit.TOKENS, 0)
    assert isinstance(step, Open)
    assert step.message.epoch == 6
    assert step.message.resume.committed == kit.COMMITS[-1].committed
    with pytest.raises(Conflict):
        world.router.recover(opening, kit.PROMPT, kit.OPTIONS, 4)
    world.router.forget(kit.SESSION)
    assert {instance.sessions for instance in world.router.instances.values()} == {0}


def test_a_log_that_is_gone_cannot_be_taken_up(kit: Any) -> None:
    world = kit.World()
    opening = SessionOpen(session=kit.SESSION, epoch=1, contract=kit.CONTRACT, prompt=kit.PROMPT, commit_log=kit.LOG)
    world.router.recover(opening, kit.PROMPT, kit.OPTIONS, 4)
    (ended,) = world.router.failed(kit.SESSION, Stage.FENCING, UnknownSession("commit_log: no such log"), 0)
    assert isinstance(ended, Ended)
    assert "no such log" in ended.error


def test_a_verifier_with_another_epoch_is_not_argued_with(kit: Any) -> None:
    world = kit.World()
    world.admit()
    world.router.opened(kit.SESSION, kit.state(), 0)
    (ended,) = world.failed(Stage.INFORMING, StaleEpoch("the log is fenced"))
    assert isinstance(ended, Ended)


# ---- any order ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=60))
def test_counts_stay_right_and_opens_follow_fences(kit: Any, script: list[tuple[int, int]]) -> None:
    world = kit.World(drafters=(kit.A, kit.B), verifiers=(kit.V, kit.W), patience_ms=5_000)
    fenced, tokens, asked = 1, (), world.admit()
    for what, how in script:
        steps: list[Step] = []
        epoch = world.routed.epoch
        told = kit.state(tokens, len(tokens), epoch=epoch)
        match what:
            case 0:
                steps = world.router.opened(kit.SESSION, told, world.now_ms)
            case 1:
                steps = world.router.informed(kit.SESSION, told)
            case 2:
                steps = world.router.assigned(kit.SESSION, world.now_ms)
            case 3:
                steps = world.failed(list(Stage)[how], Unavailable("no answer"))
            case 4 | 5:
                tokens = (*tokens, 7)
                steps = world.event(kit.event(2 + what % 2, tokens, epoch))
            case 6:
                steps = world.router.verifier_lost(kit.SESSION, epoch)
            case 7 if world.stage is Stage.FENCING:
                fenced = epoch
                steps = world.router.fenced(kit.SESSION, True, epoch)
            case 8:
                steps = world.router.fenced(kit.SESSION, False, epoch + how)
            case 9:
                last = CommitRecord(epoch=1, round=1, emitted=tokens, committed=len(tokens), digest=kit.digest(tokens))
                records = [last] if tokens else []
                steps = world.router.records(kit.SESSION, records, kit.TOKENS, world.now_ms)
            case 10:
                world.report(*((kit.A,), (kit.B,), (kit.V,), (kit.W,))[how])
            case 11 | 12:
                steps = world.tick(500 * how)
        for step in steps:
            if isinstance(step, Open):
                assert step.message.epoch == fenced  # SDCP-179
            if isinstance(step, Assign):
                assert any(isinstance(s, Inform) and s.assignment.drafter == step.drafter for s in asked)  # SDCP-080
        asked = [*asked, *steps]
        held = world.counts()
        assert all(count in (0, 1) for count in held.values())
        assert held.get(kit.A, 0) + held.get(kit.B, 0) == bool(world.routed.drafter)
        assert held.get(kit.V, 0) + held.get(kit.W, 0) == 1
    world.router.forget(kit.SESSION)
    assert set(world.counts().values()) <= {0}
