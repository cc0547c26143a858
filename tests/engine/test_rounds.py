"""Rounds of one session: steps 1 to 9 of 6.3, idempotency, and what a verdict says."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET, structs

from sdcp_mono.core.effects import Append, FetchRows, Score
from sdcp_mono.core.messages import CommitRecord, SessionState, Verdict
from sdcp_mono.core.ports import Scored, ScoreFailure
from sdcp_mono.core.problems import QUnavailable, StaleBase


def test_sdcp_211_example_round_of_appendix_a(kit: Any, vectors: Any) -> None:
    example = vectors["appendix_a"]["example_round"]
    world = kit.World()
    world.open(prompt=(1, 2, 3, 4))
    world.assign()
    argmax = iter([17, 42])
    world.score = lambda request: [Scored(next(argmax), 0)]
    world.decline(), world.decline()  # commit 17 and 42, as the appendix has it
    assert world.state.digest.hex() == vectors["appendix_a"]["published_digests_verified"]["d[2]"]
    world.score = lambda request: [Scored(token, token) for token in example["target_argmax"]]
    verdict = kit.verdict(world.propose(example["proposal_tokens"]))
    assert (verdict.accepted, list(verdict.emitted)) == (example["accepted"], example["emitted"])
    assert (verdict.committed, verdict.digest.hex()) == (example["committed"], example["digest"])
    assert (verdict.action, verdict.low) == (0, 0)


@pytest.mark.parametrize("index", range(14))
def test_sdcp_117_step_order(kit: Any, vectors: Any, index: int) -> None:
    """The state of the vectors: epoch 2, rounds 3 to 5 have verdicts, B assigned, m_cap 4, rule 2."""
    case = vectors["step_order"]["cases"][index]
    world = kit.assigned(kit.contract(rule=2, m_max=8, max_new=512), m_init=8)
    session = world.session
    session.epoch = 2
    world.score = lambda request: [Scored(1, 9, p=1.0, q=0.5) for _ in range(len(request.tokens) + 1)]
    for _ in range(5):
        kit.verdict(world.propose([5, 6, 7]))
    del session.verdicts[1], session.verdicts[2]
    session.control = structs.replace(session.control, cap=4)
    session.verdicts[5] = structs.replace(session.verdicts[5], m_cap=4)
    n = world.state.committed
    if case.get("closed"):
        world.run(world.engine.close(kit.SESSION, world.at()))
    if case.get("q_zero_at"):
        world.rows = kit.zero_rows
    changes: dict[str, Any] = {"epoch": case["epoch"], "round": case["round"], "base": n + case["base"] - 20}
    if "q_rows" in case:
        changes["q_rows"] = UNSET
    caller = {"A": kit.A, "B": kit.B}[case["caller"]]
    stored = dict(session.verdicts)
    scored = len(world.scores)
    answer = world.propose([1] * case.get("M", 3), caller, drafter=caller, **changes)
    code, what = case["expect"]
    if code == 200:
        assert answer is stored[case["round"]]
    else:
        kit.refused(answer, code, what)
    assert len(world.scores) == scored  # nothing was drawn or scored
    assert world.state.committed == n


def test_sdcp_007_n_counts_output_only(kit: Any) -> None:
    world = kit.assigned()
    assert world.state.committed == 0
    assert kit.verdict(world.propose([5, 6])).committed == 3


def test_sdcp_082_only_the_latest_assigned_drafter(kit: Any) -> None:
    world = kit.World()
    world.open()
    kit.refused(world.propose([5]), 403, "sdcp-not-assigned")
    world.assign(kit.A), world.assign(kit.B)
    kit.refused(world.propose([5], kit.A, drafter=kit.A), 403, "sdcp-not-assigned")
    kit.refused(world.propose([5], kit.B, drafter=kit.A), 403, "sdcp-not-assigned")  # AMB-041
    kit.verdict(world.propose([5], kit.B))


def test_sdcp_096_replay_returns_the_stored_verdict_unchanged(kit: Any) -> None:
    world = kit.assigned()
    first = world.proposal([5, 6])
    verdict = kit.verdict(world.send(first))
    world.propose([8])
    scored, logged = len(world.scores), list(world.log)
    assert world.send(first) is verdict
    assert world.send(structs.replace(first, tokens=(9, 9, 9), base=77)) is verdict  # AMB-095
    assert (len(world.scores), world.log) == (scored, logged)


def test_sdcp_097_an_identical_request_in_flight_shares_the_verdict(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    proposal = world.proposal([5, 6])
    assert world.send(proposal) is None
    first = world.last_waiter
    retry = structs.replace(proposal, status=kit.status("b"))
    assert world.send(structs.replace(retry, status=structs.replace(retry.status, load=9))) is None  # AMB-098
    second = world.last_waiter
    world.resume()
    assert world.replies[first] is world.replies[second]
    assert (len(world.scores), len(world.log)) == (1, 1)


def test_amb_097_a_different_request_in_flight_gets_the_stored_verdict(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    world.propose([5, 6])
    first = world.last_waiter
    world.propose([7, 7, 7])
    second = world.last_waiter
    world.resume()
    assert isinstance(world.replies[first], Verdict)
    assert world.replies[second] is world.replies[first]
    assert len(world.log) == 1


def test_sdcp_114_fifty_concurrent_proposals_commit_once(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score, Append)
    waiters = []
    for i in range(50):
        world.propose([5, 6] if i % 2 else [7, 8 + i])
        waiters.append(world.last_waiter)
    world.resume()
    world.resume()
    answers = {id(world.replies[waiter]) for waiter in waiters}
    assert len(answers) == 1
    assert len(world.log) == 1


def test_more_callers_behind_a_round_than_allowed_are_told_to_come_back(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    answers = [world.propose([5, 6]) for _ in range(80)]
    refused = [answer for answer in answers if answer is not None]
    assert refused
    for answer in refused:
        assert kit.refused(answer, 503, None).retry_after_ms
    world.resume()
    assert len(world.log) == 1


@pytest.mark.parametrize("change", [{"base": 1}, {"base_digest": b"x" * 32}, {"round": 0}, {"round": 2}])
def test_sdcp_098_099_stale_base_carries_the_present_state(kit: Any, change: dict[str, Any]) -> None:
    world = kit.assigned()
    answer = kit.refused(world.propose([5], **change), 409, "sdcp-stale-base")
    assert isinstance(answer, StaleBase)
    assert answer.state == world.state
    assert world.log == []


def test_sdcp_100_limit_uses_no_round_number(kit: Any) -> None:
    world = kit.assigned(m_init=4)
    kit.refused(world.propose([5, 6, 7, 8, 9]), 422, "sdcp-limit")
    assert kit.verdict(world.propose([5, 6, 7, 8])).round == 1


def test_amb_083_a_token_outside_the_vocabulary_is_a_bad_proposal(kit: Any) -> None:
    world = kit.assigned()
    for token in (64, 2**32, 2**64 - 1):
        kit.refused(world.propose([5, token]), 422, "sdcp-bad-proposal")
    assert (world.log, world.scores) == ([], [])


def test_sdcp_101_102_103_rows_come_before_any_draw(kit: Any) -> None:
    world = kit.assigned(kit.contract(rule=2, sampling=UNSET))

    def missing(_: FetchRows) -> Any:
        raise QUnavailable("gone")

    world.rows = missing
    kit.refused(world.propose([5, 6]), 409, "sdcp-q-unavailable")
    world.rows = kit.zero_rows
    kit.refused(world.propose([5, 6]), 422, "sdcp-bad-proposal")
    assert (world.scores, world.log, world.state.round) == ([], [], 0)
    world.rows = lambda effect: "rows"
    verdict = kit.verdict(world.propose([5, 6]))
    assert verdict.round == 1
    assert world.scores[0].request.rows == "rows"
    assert world.scores[0].fresh_uniforms


def test_amb_099_identical_waiters_share_a_failed_fetch(kit: Any) -> None:
    world = kit.assigned(kit.contract(rule=2))
    fetches = []

    def missing(effect: FetchRows) -> Any:
        fetches.append(effect)
        raise QUnavailable("gone")

    world.rows, world.hold = missing, (FetchRows,)
    world.propose([5])
    first = world.last_waiter
    world.propose([5])
    second = world.last_waiter
    world.resume()
    assert len(fetches) == 1
    assert world.replies[first] is world.replies[second]


def test_sdcp_105_one_pass_a_round_over_prefix_and_proposal(kit: Any) -> None:
    world = kit.assigned()
    kit.verdict(world.propose([5, 6]))
    (score,) = world.scores
    assert (list(score.request.prefix[: score.request.length]), score.request.tokens) == ([1, 3, 3, 4], (5, 6))


def test_sdcp_107_emitted_is_accepted_plus_one(kit: Any) -> None:
    world = kit.assigned()  # the target counts up from the prompt's 4
    assert kit.verdict(world.propose([5, 6, 9])).emitted == (5, 6, 7)
    assert kit.verdict(world.propose([8, 9])).emitted == (8, 9, 10)
    assert kit.verdict(world.propose([7])).emitted == (11,)
    world.check()


@pytest.mark.parametrize(
    ("stop", "emitted", "accepted"),
    [((6,), (5, 6), 3), ((8,), (5, 6, 7, 8), 3), ((5, 6), (5,), 3), ((4,), (5, 6, 7, 8), 3)],
)
def test_sdcp_108_truncation_after_the_first_stop_token(
    kit: Any, stop: tuple[int, ...], emitted: tuple[int, ...], accepted: int
) -> None:
    world = kit.assigned(kit.contract(stop=stop))
    verdict = kit.verdict(world.propose([5, 6, 7]))
    assert (verdict.emitted, verdict.accepted) == (emitted, accepted)
    assert verdict.action == (0 if stop == (4,) else 4)
    assert world.output().final == (stop != (4,))
    world.check()


def test_sdcp_109_110_truncation_at_max_new_leaves_no_trace(kit: Any) -> None:
    world = kit.assigned(kit.contract(max_new=2))
    verdict = kit.verdict(world.propose([5, 6, 7]))
    assert (verdict.emitted, verdict.committed, verdict.action) == ((5, 6), 2, 4)
    assert world.commits[0].final == 4
    world.check()


def test_sdcp_111_112_release_only_after_the_append(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Append,)
    assert world.propose([5, 6]) is None
    assert (world.output().tokens, world.state.committed) == ((), 0)
    waiter = world.last_waiter
    world.resume()
    verdict = world.replies[waiter]
    assert world.log == [
        CommitRecord(epoch=1, round=1, emitted=(5, 6, 7), committed=3, digest=verdict.digest)
    ]  # fmt: skip
    assert world.output().tokens == (5, 6, 7)


def test_sdcp_113_fenced_append_discards_the_round(kit: Any) -> None:
    world = kit.assigned()
    kit.verdict(world.propose([5]))
    world.outcome = lambda append: "fenced"
    kit.refused(world.propose([7]), 409, "sdcp-stale-epoch")
    kit.refused(world.propose([7]), 409, "sdcp-stale-epoch")  # AMB-157: on every resource
    kit.refused(world.assign(kit.A), 409, "sdcp-stale-epoch")
    for call in (lambda: world.output(), lambda: world.policy(9)):
        with pytest.raises(Exception) as info:
            call()
        kit.refused(info.value, 409, "sdcp-stale-epoch")
    assert len(world.log) == 1
    assert world.released == [kit.SESSION]


@pytest.mark.parametrize("outcome", ["lost", "unknown"])
def test_amb_150_unknown_append_is_settled_by_reading_the_log(kit: Any, outcome: str) -> None:
    """Whether the record got there or not: one record, one verdict."""
    world = kit.assigned()
    outcomes = iter([outcome, "ok"])
    world.outcome = lambda append: next(outcomes)
    verdict = kit.verdict(world.propose([5, 6]))
    assert [record.round for record in world.commits] == [1]
    assert verdict.emitted == (5, 6, 7)
    assert len(world.scores) == 1  # and no second draw
    world.check()


def test_amb_150_callers_are_told_to_come_back_and_find_the_same_result(kit: Any) -> None:
    world = kit.assigned()
    outcomes = iter(["unknown"] * 5 + ["ok"])
    world.outcome = lambda append: next(outcomes)
    proposal = world.proposal([5, 6])
    kit.refused(world.send(proposal), 503, None)
    assert kit.verdict(world.send(proposal)).emitted == (5, 6, 7)
    assert (len(world.scores), len(world.log)) == (1, 1)


def test_amb_151_a_foreign_record_at_my_place_means_fenced(kit: Any) -> None:
    world = kit.assigned()

    def foreign(append: Append) -> str:
        world.log.append(structs.replace(append.append.record, emitted=(9,)))
        return "unknown"

    world.outcome = foreign
    kit.refused(world.propose([5, 6]), 409, "sdcp-stale-epoch")


def test_amb_145_a_failed_pass_uses_no_round_and_the_third_ends_the_session(kit: Any) -> None:
    world = kit.assigned()
    failing = world.score
    world.score = lambda request: ScoreFailure("out of memory")
    kit.refused(world.propose([5]), 503, None)
    world.score = failing
    assert kit.verdict(world.propose([5])).round == 1
    world.score = lambda request: ScoreFailure("out of memory")
    kit.refused(world.propose([7]), 503, None), kit.refused(world.propose([7]), 503, None)
    assert kit.verdict(world.propose([7])).action == 5
    assert (world.output().final, world.output().finish) == (True, 5)
    assert world.events[-1].kind == 5


def test_amb_146_not_a_number_ends_the_session_at_once_and_only_this_one(kit: Any) -> None:
    world = kit.assigned()
    world.score = lambda request: ScoreFailure("the logits are not finite", permanent=True)
    verdict = kit.verdict(world.propose([5]))
    assert (verdict.action, verdict.emitted) == (5, ())
    assert world.engine.chunk(kit.SESSION, 0).error == "the logits are not finite"


def test_amb_147_a_caller_that_left_changes_nothing(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    proposal = world.proposal([5, 6])
    world.send(proposal)
    world.replies[world.last_waiter] = None  # it has gone: nobody reads the reply
    del world.replies[world.last_waiter]
    world.resume()
    assert kit.verdict(world.send(proposal)).committed == 3
    assert len(world.log) == 1


def test_late_answers_of_a_superseded_round_are_dropped(kit: Any) -> None:
    """C-37: the result of a round that was given up comes back after its session has moved on."""
    world = kit.assigned()
    world.hold = (Score,)
    world.propose([5, 6])
    (late,) = world.held
    world.held, world.hold = [], ()
    world.run(world.engine.close(kit.SESSION, world.at()))
    world.carry_out(late)
    assert world.log == []
    assert isinstance(world.state, SessionState)
