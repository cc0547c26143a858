"""Opening and resuming sessions (6.1, 6.9), and how many a verifier holds."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core import digest as digests
from sdcp_mono.core.effects import Score
from sdcp_mono.core.engine import Limits
from sdcp_mono.core.messages import CommitRecord, FenceRecord, Resume, SessionState
from sdcp_mono.core.ports import OpenOptions
from sdcp_mono.core.problems import StaleBase

PROMPT = (1, 3, 3, 4)


def d0(contract: Any, prompt: tuple[int, ...] = PROMPT) -> bytes:
    return digests.prefix_digest(digests.contract_digest(contract), prompt)


def resume(contract: Any, round_: int, tokens: tuple[int, ...]) -> Resume:
    digest = digests.extend(d0(contract), tokens)
    return Resume(round=round_, committed=len(tokens), digest=digest, committed_tokens="mlc://mlc/-/tokens/1")


def record(contract: Any, round_: int, before: tuple[int, ...], emitted: tuple[int, ...], **more: Any) -> CommitRecord:
    tokens = before + emitted
    digest = digests.extend(d0(contract), tokens)
    return CommitRecord(epoch=1, round=round_, emitted=emitted, committed=len(tokens), digest=digest, **more)


def resumed(kit: Any, contract: Any, **changes: Any) -> tuple[Any, Any]:
    """A verifier asked to take over at epoch 2, after rounds 1 (5 6) and 2 (7), and its answer."""
    world = kit.World(contract)
    log = [record(contract, 1, (), (5, 6)), record(contract, 2, (5, 6), (7,)), FenceRecord(epoch=2)]
    world.log = changes.pop("log", log)
    answer = world.open(
        resume=changes.pop("resume", resume(contract, 2, (5, 6, 7))),
        epoch=changes.pop("epoch", 2),
        committed=changes.pop("committed", (5, 6, 7)),
        **changes,
    )
    return world, answer


def test_sdcp_077_the_reply_to_a_fresh_open(kit: Any) -> None:
    world = kit.World()
    assert world.open() == SessionState(
        session=kit.SESSION, epoch=1, round=0, committed=0, digest=d0(kit.CONTRACT), state=2
    )
    assert (world.scores, world.log) == ([], [])  # nothing is decoded before somebody asks for it


def test_sdcp_210_d0_of_appendix_a(kit: Any, vectors: Any) -> None:
    world = kit.World()
    world.open(prompt=(1, 2, 3, 4))
    assert world.state.digest.hex() == vectors["appendix_a"]["published_digests_verified"]["d[0]"]


@pytest.mark.parametrize(
    "change",
    [
        {"m_max": 0},  # AMB-016
        {"target": b"x" * 32},  # SDCP-035
        {"tokenizer": b"x" * 32},  # AMB-032
        {"rule": 3},
        {"fallback": (4,)},
        {"max_new": 4096},  # AMB-018: with the prompt it exceeds the context
        {"max_new": 2**32},  # AMB-130
        {"stop": (2**32,)},  # AMB-019
    ],
)
def test_sdcp_075_a_bad_contract_opens_nothing(kit: Any, change: dict[str, Any]) -> None:
    world = kit.World(kit.contract(**change))
    kit.refused(world.open(), 422, "sdcp-bad-contract")
    assert world.engine.sessions == {}


def test_amb_018_prompt_and_max_new_may_fill_the_context(kit: Any) -> None:
    world = kit.World(kit.contract(max_new=4096 - 4))
    assert isinstance(world.open(), SessionState)


def test_amb_017_max_new_0_is_finished_at_once(kit: Any) -> None:
    world = kit.World(kit.contract(max_new=0))
    state = world.open()
    assert (state.round, state.committed, state.state) == (0, 0, 4)
    output = world.output()
    assert (output.tokens, output.final, output.finish) == ((), True, 4)
    assert world.released == [kit.SESSION]  # the room that was made for it
    kit.refused(world.assign(), 410, "sdcp-session-closed")


@pytest.mark.parametrize("prompt", [(), (64,), (1, 2**32 - 1)])
def test_amb_035_036_a_prompt_the_model_cannot_read(kit: Any, prompt: tuple[int, ...]) -> None:
    world = kit.World()
    kit.refused(world.open(prompt=prompt), 422, None)
    assert world.engine.sessions == {}


def test_amb_054_a_repeated_open_is_answered_with_the_present_state(kit: Any) -> None:
    world = kit.assigned()
    kit.verdict(world.propose([5, 6]))
    assert world.open(log=()) == world.state
    assert world.state.committed == 3
    for change in ({"prompt": (1, 3, 3, 5)}, {"commit_log": "mlc://mlc/-/log/2"}):
        kit.refused(world.open(log=(), **change), 409, None)
    assert world.state.committed == 3


def test_amb_055_056_epochs_of_an_open(kit: Any) -> None:
    world = kit.assigned()
    kit.verdict(world.propose([5, 6]))
    world.hold = (Score,)
    proposal = world.proposal([8])
    assert world.send(proposal) is None  # in flight when the router moves the session
    waiter = world.last_waiter
    world.log.append(FenceRecord(epoch=2))
    state = world.open(epoch=2, resume=resume(kit.CONTRACT, 1, (5, 6, 7)), committed=(5, 6, 7))
    assert (state.epoch, state.round, state.committed) == (2, 1, 3)
    kit.refused(world.replies[waiter], 409, "sdcp-stale-epoch")
    world.resume()  # the late pass of epoch 1
    assert len(world.commits) == 1
    assert world.released == []  # the new incarnation goes on with the same KV
    kit.refused(world.open(log=()), 409, "sdcp-stale-epoch")
    world.assign()
    kit.refused(world.send(proposal), 409, "sdcp-stale-epoch")  # AMB-068
    assert kit.verdict(world.propose([8])).round == 2


def test_late_answers_of_an_earlier_session_of_the_same_id_are_dropped(kit: Any) -> None:
    """The first one is over and forgotten, the second is in the same round: only the ticket tells them apart."""
    world = kit.assigned()
    world.hold = (Score,)
    world.propose([5, 6])
    (late,) = world.held
    world.held = []
    world.run(world.engine.close(kit.SESSION, world.at()))
    world.engine.forget(kit.SESSION)
    world.open(commit_log="mlc://mlc/-/log/2")
    world.hold = ()
    world.assign()
    world.hold = (Score,)
    world.propose([5])
    world.carry_out(late)
    assert world.log == []
    world.resume()
    assert [r.emitted for r in world.commits] == [(5, 6)]


@pytest.mark.parametrize("how", ["closed", "fenced at a later epoch"])
def test_a_session_that_is_over_makes_way_for_one_of_its_id_with_another_log(kit: Any, how: str) -> None:
    """A seeded request comes again, and nobody was left to close its first session."""
    world = kit.assigned()
    kit.verdict(world.propose([5, 6]))
    kit.refused(world.open(log=(), commit_log="mlc://mlc/-/log/2"), 409, None)  # it is at work
    if how == "closed":
        world.run(world.engine.close(kit.SESSION, world.at()))
    else:
        world.log.append(FenceRecord(epoch=2))
        world.open(epoch=2, resume=resume(kit.CONTRACT, 1, (5, 6, 7)), committed=(5, 6, 7))
        world.run(world.engine.sessions[kit.SESSION].fence(world.at()))
    world.log = []
    state = world.open(log=(), commit_log="mlc://mlc/-/log/2")
    assert (state.epoch, state.committed) == (1, 0)
    world.assign()
    assert kit.verdict(world.propose([5, 6])).committed == 3


@pytest.mark.parametrize(("epoch", "resuming"), [(0, False), (1, True), (2, False)])
def test_amb_057_epoch_and_resume_go_together(kit: Any, epoch: int, resuming: bool) -> None:
    world = kit.World()
    again = resume(kit.CONTRACT, 0, ()) if resuming else None
    kit.refused(world.open(epoch=epoch, resume=again), 400, None)


def test_amb_058_resume_before_anything_was_committed(kit: Any) -> None:
    world, state = resumed(
        kit, kit.CONTRACT, log=[FenceRecord(epoch=2)], resume=resume(kit.CONTRACT, 0, ()), committed=()
    )
    assert (state.epoch, state.round, state.committed, state.digest) == (2, 0, 0, d0(kit.CONTRACT))
    world.assign()
    assert kit.verdict(world.propose([5])).round == 1


def test_sdcp_180_amb_066_067_a_resumed_session_goes_on(kit: Any) -> None:
    contract = kit.contract(low_rounds=2)
    world, state = resumed(kit, contract)
    assert (state.epoch, state.round, state.committed) == (2, 2, 3)
    assert state.digest == digests.extend(d0(contract), (5, 6, 7))
    world.assign()
    answer = kit.refused(world.propose([8], round=1), 409, "sdcp-stale-base")
    assert isinstance(answer, StaleBase)
    assert answer.state == world.state
    verdict = kit.verdict(world.propose([9]))  # low, as one before the failover may have been: counting starts afresh
    assert (verdict.round, verdict.epoch, verdict.low, verdict.action) == (3, 2, 1, 0)
    assert world.commits[-1].epoch == 2
    assert world.output().tokens == (5, 6, 7, 8)
    assert world.output().epoch == 2


@pytest.mark.parametrize("committed", [(5, 6, 9), (5, 6), (5, 6, 7, 8)])
def test_amb_059_the_prefix_is_recomputed(kit: Any, committed: tuple[int, ...]) -> None:
    world, answer = resumed(kit, kit.CONTRACT, committed=committed)
    kit.refused(answer, 422, None)
    assert world.engine.sessions == {}


def test_amb_060_the_log_has_the_last_word(kit: Any) -> None:
    first, second = record(kit.CONTRACT, 1, (), (5, 6)), record(kit.CONTRACT, 2, (5, 6), (7,))
    _, answer = resumed(kit, kit.CONTRACT, log=[first, second, FenceRecord(epoch=2), FenceRecord(epoch=3)])
    kit.refused(answer, 409, "sdcp-stale-epoch")
    for log in (
        [first, second],  # not fenced
        [first, FenceRecord(epoch=2)],  # resume names a round that is not there
        [first, second, record(kit.CONTRACT, 3, (5, 6, 7), (8,)), FenceRecord(epoch=2)],  # and misses one that is
    ):
        _, answer = resumed(kit, kit.CONTRACT, log=log)
        kit.refused(answer, 422, None)


@pytest.mark.parametrize("contract", [{"max_new": 3}, {"stop": (7,)}])
def test_amb_061_resume_of_a_session_that_was_done(kit: Any, contract: dict[str, Any]) -> None:
    world, state = resumed(kit, kit.contract(**contract))
    assert state.state == 4
    assert (world.output().tokens, world.output().final, world.output().finish) == ((5, 6, 7), True, 4)
    kit.refused(world.assign(), 410, "sdcp-session-closed")


def test_amb_061_a_stop_token_before_the_last_place_says_nothing(kit: Any) -> None:
    """Truncation would have ended there; a log in which it didn't is a log of another contract."""
    world, state = resumed(kit, kit.contract(stop=(6,)))
    assert state.state != 4
    assert world.output().final is False


@pytest.mark.parametrize(("final", "finish"), [(5, 5), (4, 4), (77, 5)])
def test_amb_062_how_it_ended_is_in_the_log(kit: Any, final: int, finish: int) -> None:
    contract = kit.CONTRACT
    log = [
        record(contract, 1, (), (5, 6)),
        structs.replace(record(contract, 2, (5, 6), (7,)), final=final),
        FenceRecord(epoch=2),
    ]
    world, state = resumed(kit, contract, log=log)
    assert (state.state, world.output().finish) == (finish, finish)


def test_amb_065_a_profile_survives_a_failover_both_ways(kit: Any) -> None:
    contract = kit.contract(rule=2)
    world, _ = resumed(kit, contract)
    world.policy(3, temperature_milli=300)  # (a) the router sends it again
    world.assign(sampling=structs.replace(world.session.policies[3], temperature_milli=900))
    kit.verdict(world.propose([8]))
    assert world.scores[-1].request.sampling.temperature_milli == 300

    world, _ = resumed(kit, contract)
    world.assign(sampling=structs.replace(world.session.sampling_at(3), temperature_milli=700))  # (b)
    kit.verdict(world.propose([8]))
    assert world.scores[-1].request.sampling.temperature_milli == 700


def test_amb_068_a_round_of_the_old_verifier_is_stale_in_the_new_epoch(kit: Any) -> None:
    world, _ = resumed(kit, kit.CONTRACT)
    world.assign()
    kit.refused(world.propose([7], round=2, base=2), 409, "sdcp-stale-base")
    kit.refused(world.propose([7], round=2, base=2, epoch=1), 409, "sdcp-stale-epoch")


def test_amb_071_153_a_log_belongs_to_one_session(kit: Any) -> None:
    world = kit.World()
    kit.refused(world.open(log=(record(kit.CONTRACT, 1, (), (5,)),)), 409, None)
    kit.refused(world.open(log=(FenceRecord(epoch=1),)), 409, None)
    assert world.engine.sessions == {}
    assert isinstance(world.open(), SessionState)


def test_a_verifier_holds_a_limited_number_of_sessions(kit: Any) -> None:
    world = kit.World(limits=Limits(sessions=2, retention_ms=1000))
    names = [bytes([i]) * 16 for i in range(3)]
    logs = [f"mlc://mlc/-/log/{i}" for i in range(3)]
    for name, log in zip(names[:2], logs, strict=False):
        assert isinstance(world.open(session=name, commit_log=log), SessionState)
    refusal = kit.refused(world.open(session=names[2], commit_log=logs[2]), 503, None)
    assert refusal.retry_after_ms
    assert isinstance(world.open(session=names[0], commit_log=logs[0]), SessionState)  # a replay takes no room
    world.run(world.engine.close(names[0], world.at()))
    assert isinstance(world.open(session=names[2], commit_log=logs[2]), SessionState)  # ended ones take none
    world.now_ms += 1000
    world.run(world.engine.tick(world.at()))
    assert set(world.engine.sessions) == set(names[1:])


def test_of_ended_sessions_the_latest_stay_readable(kit: Any) -> None:
    world = kit.World(limits=Limits(sessions=1, ended=2))
    names = [bytes([i]) * 16 for i in range(5)]
    for i, name in enumerate(names):
        world.now_ms = i
        assert isinstance(world.open(session=name, commit_log=f"mlc://mlc/-/log/{i}"), SessionState)
        assert set(world.engine.sessions) == set(names[max(0, i - 2) : i + 1])
        world.run(world.engine.close(name, world.at()))


def test_amb_070_169_ended_sessions_are_readable_for_a_while_and_abandoned_ones_are_closed(kit: Any) -> None:
    world = kit.assigned(kit.contract(max_new=3), limits=Limits(retention_ms=1000, idle_ms=5000))
    kit.verdict(world.propose([5, 6]))
    world.now_ms = 999
    world.run(world.engine.tick(world.at()))
    assert world.output().final
    world.now_ms = 1000
    world.run(world.engine.tick(world.at()))
    assert world.engine.sessions == {}

    world.log.clear()
    world.open()
    world.now_ms += 4999
    world.run(world.engine.tick(world.at()))
    assert not world.output().final
    world.now_ms += 1
    world.run(world.engine.tick(world.at()))
    assert (world.output().final, world.output().finish) == (True, 5)
    assert world.released == [kit.SESSION] * 2


def test_lead_commits_the_first_token_before_a_drafter_is_there(kit: Any) -> None:
    """docs/decisions/0002"""
    world = kit.World(options=OpenOptions(lead=True))
    state = world.open()
    assert (state.round, state.committed) == (0, 0)
    assert [r.emitted for r in world.commits] == [(5,)]
    assert world.state.round == 1
    world.assign()
    assert kit.verdict(world.propose([6, 7])).round == 2
    assert world.events == []


def test_lead_is_for_fresh_sessions(kit: Any) -> None:
    world = kit.World(kit.CONTRACT, OpenOptions(lead=True))
    world.log = [record(kit.CONTRACT, 1, (), (5,)), FenceRecord(epoch=2)]
    world.open(resume=resume(kit.CONTRACT, 1, (5,)), epoch=2, committed=(5,))
    assert world.scores == []
