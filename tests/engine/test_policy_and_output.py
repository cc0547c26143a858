"""Sampling policies (6.6), and output (6.7)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from sdcp_mono.core import digest as digests
from sdcp_mono.core.effects import Append, FetchRows, Score
from sdcp_mono.core.messages import FenceRecord, Resume, Sampling
from sdcp_mono.core.ports import OpenOptions
from sdcp_mono.core.problems import Refusal, StaleBase


def refusal_of(call: Any) -> Refusal:
    with pytest.raises(Refusal) as info:
        call()
    return info.value


def sampled(world: Any) -> list[Sampling]:
    return [score.request.sampling for score in world.scores]


# ---- policies ----------------------------------------------------------------------------------------


def test_sdcp_161_amb_132_174_policy_timeline(kit: Any, vectors: Any) -> None:
    timeline = vectors["policy_timeline"]
    contract = kit.contract(rule=2, sampling=Sampling(**timeline["contract_sampling"]))
    world = kit.assigned(contract)
    for from_round, profile in timeline["policies"].items():
        world.policy(int(from_round), **profile)
    for _ in range(7):
        kit.verdict(world.propose([60]))
    expected = [Sampling(**timeline["effective"][str(round_)]) for round_ in range(1, 8)]
    assert sampled(world) == expected
    # A profile without a seed draws afresh, one with a seed never does (AMB-132: no merging).
    assert [score.fresh_uniforms for score in world.scores] == [s.seed is UNSET for s in expected]


@pytest.mark.parametrize("index", [0, 1])
def test_sdcp_160_amb_172_173_rejected_policies(kit: Any, vectors: Any, index: int) -> None:
    case = vectors["policy_timeline"]["rejected"][index]
    world = kit.assigned(kit.contract(rule=2))
    for _ in range(case["current_round"]):
        kit.verdict(world.propose([60]))
    if "in_verification" in case:
        world.hold = (FetchRows,)
        world.propose([60])
        assert world.session.flight.round == case["in_verification"]
    answer = kit.refused(
        refusal_of(lambda: world.policy(case["from_round"], temperature_milli=100)),
        int(case["expect"]),
        "sdcp-stale-base",
    )
    assert isinstance(answer, StaleBase)
    assert answer.state == world.state
    assert world.policy(case["from_round"] + 1, temperature_milli=200).round == case["current_round"]
    world.resume()
    while len(world.scores) < case["from_round"] + 1:
        kit.verdict(world.propose([60]))
    assert [s.temperature_milli for s in sampled(world)[case["from_round"] - 1 :]] == [UNSET, 200]


def test_amb_172_a_self_decoded_round_is_in_verification_too(kit: Any) -> None:
    world = kit.World(options=OpenOptions(lead=True))
    world.hold = (Score,)
    world.open()
    kit.refused(refusal_of(lambda: world.policy(1, seed=1)), 409, "sdcp-stale-base")
    assert world.policy(2, seed=1).round == 0


def test_amb_174_the_last_policy_of_a_round_counts_and_may_be_repeated(kit: Any) -> None:
    world = kit.assigned(kit.contract(rule=2))
    world.policy(1, temperature_milli=100)
    world.policy(1, temperature_milli=200)
    world.policy(1, temperature_milli=200)
    world.propose([60])
    assert sampled(world) == [Sampling(temperature_milli=200)]


def test_sdcp_163_a_policy_changes_neither_output_nor_digest(kit: Any) -> None:
    world = kit.assigned(kit.contract(rule=2))
    kit.verdict(world.propose([60]))
    before = (world.output(), world.state)
    assert world.policy(2, temperature_milli=100) == before[1]
    assert (world.output(), world.state) == before
    kit.verdict(world.propose([60]))
    world.check()


def test_policies_on_a_session_that_is_not_there(kit: Any) -> None:
    world = kit.assigned(kit.contract(max_new=1))
    kit.verdict(world.propose([5]))
    kit.refused(refusal_of(lambda: world.policy(9)), 410, "sdcp-session-closed")
    world.engine.forget(kit.SESSION)
    kit.refused(refusal_of(lambda: world.policy(9)), 404, None)


def test_policies_do_not_pile_up(kit: Any) -> None:
    world = kit.assigned()
    for round_ in range(1, 65):
        world.policy(round_, seed=round_)
    kit.refused(refusal_of(lambda: world.policy(65)), 503, None)
    assert world.policy(64, seed=0).round == 0  # replacing one is fine
    kit.verdict(world.propose([5, 6]))
    kit.verdict(world.propose([8]))
    world.policy(65, seed=65)
    assert world.session.sampling_at(3) == Sampling(seed=3)
    assert world.session.sampling_at(64) == Sampling(seed=0)


# ---- output ------------------------------------------------------------------------------------------


def test_sdcp_164_amb_162_from_is_the_number_of_tokens_received(kit: Any) -> None:
    world = kit.assigned()
    world.propose([5, 6, 7]), world.propose([9, 10])
    everything = (5, 6, 7, 8, 9, 10, 11)
    for from_ in range(9):
        output = world.output(from_)
        assert (output.from_, output.tokens, output.final, output.finish) == (from_, everything[from_:], False, UNSET)
        assert (output.session, output.epoch) == (kit.SESSION, 1)


def test_sdcp_165_166_nothing_is_there_before_its_append(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Append,)
    world.propose([5, 6])
    assert (world.output().tokens, world.output().final) == ((), False)
    assert world.engine.chunk(kit.SESSION, 0).tokens == ()
    world.resume()
    assert world.output().tokens == (5, 6, 7)


def test_sdcp_167_a_client_that_loses_every_second_answer_loses_no_token(kit: Any) -> None:
    world = kit.assigned(kit.contract(max_new=20))
    received: list[int] = []
    for turn in range(40):
        if not world.output().final:
            world.propose([world.session.prefix[-1] + 1, 60])
        output = world.output(len(received))
        if turn % 2:
            received += output.tokens
    assert received == list(range(5, 25))
    assert world.output(len(received)).final


@pytest.mark.parametrize(
    ("ending", "finish", "tokens"), [("stop", 4, (5, 6)), ("max_new", 4, (5, 6, 7)), ("ladder", 5, (5,))]
)
def test_sdcp_169_amb_118_168_169_the_last_message(kit: Any, ending: str, finish: int, tokens: tuple[int, ...]) -> None:
    contract = {
        "stop": kit.contract(stop=(6,)),
        "max_new": kit.contract(max_new=3),
        "ladder": kit.contract(low_rounds=1, fallback=(5,)),
    }[ending]
    world = kit.assigned(contract)
    assert not world.output().final
    world.propose([60] if ending == "ladder" else [5, 6, 7])
    for _ in range(2):  # and again
        assert (world.output().tokens, world.output().final, world.output().finish) == (tokens, True, finish)
    for from_ in range(len(tokens) + 3):  # AMB-164: also beyond the end
        assert (world.output(from_).tokens, world.output(from_).final) == (tokens[from_:], True)


def test_amb_170_long_outputs_come_in_parts_and_final_is_on_the_last(kit: Any) -> None:
    world = kit.assigned(kit.contract(max_new=4000))
    many = 64 * 1024 + 3
    world.session.prefix.extend(range(many))
    world.session.ended = 4
    first = world.output()
    assert (len(first.tokens), first.final, first.finish) == (64 * 1024, False, UNSET)
    second = world.output(len(first.tokens))
    assert (len(second.tokens), second.final, second.finish) == (3, True, 4)


def test_sdcp_168_181_amb_158_output_of_a_new_epoch(kit: Any) -> None:
    world = kit.assigned()
    world.propose([5, 6])
    assert world.output().epoch == 1
    world.log.append(FenceRecord(epoch=2))
    digest = digests.extend(world.session.origin, (5, 6, 7))
    world.open(
        epoch=2,
        resume=Resume(round=1, committed=3, digest=digest, committed_tokens="mlc://mlc/-/tokens/1"),
        committed=(5, 6, 7),
    )
    assert (world.output().epoch, world.output().tokens) == (2, (5, 6, 7))


def test_amb_157_158_a_fenced_verifier_serves_nothing(kit: Any) -> None:
    world = kit.assigned()
    world.propose([5, 6])
    world.outcome = lambda append: "fenced"
    world.propose([8])
    for call in (world.output, lambda: world.output(3), lambda: world.engine.chunk(kit.SESSION, 0)):
        kit.refused(refusal_of(call), 409, "sdcp-stale-epoch")


def test_chunks_carry_the_rounds_that_committed_their_tokens(kit: Any) -> None:
    world = kit.assigned()
    world.propose([5, 60]), world.decline(), world.propose([8])
    chunk = world.engine.chunk(kit.SESSION, 0)
    assert chunk.tokens == (5, 6, 7, 8, 9)
    assert [(r.round, r.base, r.proposed, r.accepted, r.emitted) for r in chunk.rounds] == [
        (1, 0, (5, 60), 1, (5, 6)),
        (2, 2, (), 0, (7,)),
        (3, 3, (8,), 1, (8, 9)),
    ]
    origins = [token.origin for r in chunk.rounds for token in r.tokens]
    assert origins == ["accepted", "correction", "self", "accepted", "bonus"]
    later = world.engine.chunk(kit.SESSION, 3)
    assert (later.tokens, [r.round for r in later.rounds]) == ((8, 9), [3])
    assert world.engine.chunk(kit.SESSION, 5).rounds == ()


def test_a_truncated_round_says_what_was_kept(kit: Any) -> None:
    world = kit.assigned(kit.contract(max_new=2))
    world.propose([5, 6, 7])
    (info,) = world.engine.chunk(kit.SESSION, 0).rounds
    assert (info.accepted, info.emitted, [t.origin for t in info.tokens]) == (3, (5, 6), ["accepted", "accepted"])


def test_unknown_sessions_have_no_output(kit: Any) -> None:
    world = kit.World()
    kit.refused(refusal_of(lambda: world.engine.output(b"x" * 16, 0)), 404, None)


def test_amb_175_a_policy_has_no_epoch(kit: Any) -> None:
    world = kit.assigned()
    assert world.policy(1, seed=3).epoch == 1
    assert world.session.sampling_at(1) == Sampling(seed=3)
