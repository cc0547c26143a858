"""The verifier decodes by itself: escalated, because no drafter is there, or because the drafter declined (6.5.2)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core import accept
from sdcp_mono.core.effects import Append, Score
from sdcp_mono.core.messages import Sampling, SessionState, Verdict
from sdcp_mono.core.ports import OpenOptions, Scored, ScoreFailure
from sdcp_mono.core.problems import NotAssigned

WRONG = [60]  # the target counts up from the prompt's 4, so this is never right before the end


def self_decoding(kit: Any, **changes: Any) -> Any:
    """A session whose every low round escalates to self-decoding."""
    members = {"fallback": (3, 3, 3), "low_rounds": 1, "self_load": 50, "self_max": 4}
    return kit.assigned(kit.contract(**members | changes))


def kinds(world: Any) -> list[tuple[int, int]]:
    return [(event.kind, event.committed) for event in world.events]


def test_sdcp_151_152_153_a_period_of_four_tokens(kit: Any) -> None:
    world = self_decoding(kit)
    first = world.proposal(WRONG)
    verdict = kit.verdict(world.send(first))
    assert (verdict.action, verdict.emitted) == (3, (5,))
    assert [(r.round, r.emitted) for r in world.commits] == [(1, (5,)), (2, (6,)), (3, (7,)), (4, (8,)), (5, (9,))]
    assert world.output().tokens == (5, 6, 7, 8, 9)
    assert kinds(world) == [(3, 5)]  # at the end, with the state to assign from (SDCP-150)
    assert world.events[0].digest == world.state.digest == world.commits[-1].digest
    assert world.state.state == 2
    assert world.send(first) is verdict  # AMB-102: its last drafter may still ask
    kit.refused(world.propose([10]), 403, "sdcp-not-assigned")
    world.assign()
    assert kit.verdict(world.propose([10])).round == 6
    world.check()


@pytest.mark.parametrize(("load", "action"), [(50, 3), (51, 2)])
def test_sdcp_142_151_158_the_load_decides(kit: Any, load: int, action: int) -> None:
    world = kit.assigned(kit.contract(fallback=(3, 2), low_rounds=1, self_load=50, self_max=1))
    world.load = load
    assert kit.verdict(world.propose(WRONG)).action == action
    if action == 2:  # the skipped entry is spent
        world.load = 0
        world.assign()
        assert kit.verdict(world.propose(WRONG)).action == 5


def test_sdcp_023_without_self_load_never(kit: Any) -> None:
    world = kit.assigned(kit.contract(fallback=(3, 5), low_rounds=1))
    assert kit.verdict(world.propose(WRONG)).action == 5
    assert (world.output().final, world.output().finish) == (True, 5)
    assert kinds(world) == [(5, 1)]


def test_sdcp_153_amb_119_the_load_is_looked_at_before_every_token(kit: Any) -> None:
    world = self_decoding(kit, self_max=10)
    world.hold = (Score,)
    world.propose(WRONG)
    for _ in range(3):  # the drafted round and two tokens
        held, world.held = world.held, []
        world.load = 51 if len(world.scores) == 2 else 0
        for effect in held:
            world.carry_out(effect)
    assert world.held == []
    assert (kinds(world), world.state.round) == ([(3, 3)], 3)


@pytest.mark.parametrize("change", [{"self_max": 0}, {"load": 80}])
def test_amb_120_121_a_period_may_be_empty(kit: Any, change: dict[str, Any]) -> None:
    load = change.pop("load", 0)
    world = self_decoding(kit, **change)
    world.hold = (Append,)
    world.propose(WRONG)
    world.load = load  # rises between the decision and the first token
    world.resume()
    assert (len(world.commits), kinds(world)) == (1, [(3, 1)])


def test_sdcp_154_amb_179_a_stop_token_ends_it_without_asking_for_a_drafter(kit: Any) -> None:
    world = self_decoding(kit, stop=(7,), self_max=10)
    world.propose(WRONG)
    assert world.output().tokens == (5, 6, 7)
    assert (world.output().final, world.output().finish) == (True, 4)
    assert kinds(world) == [(4, 3)]
    assert world.commits[-1].final == 4
    assert world.released == [kit.SESSION]


def test_sdcp_154_max_new_ends_it(kit: Any) -> None:
    world = self_decoding(kit, max_new=3)
    world.propose(WRONG)
    assert (world.output().tokens, world.output().finish, kinds(world)) == ((5, 6, 7), 4, [(4, 3)])


def test_sdcp_145_amb_114_self_decoded_rounds_are_not_counted(kit: Any) -> None:
    """Four of them with low_ratio 50 would be four rounds that aren't low (0 < 0), and j would start over."""
    world = self_decoding(kit, fallback=(3, 2), low_rounds=2, low_ratio=50)
    assert [kit.verdict(world.propose(WRONG)).action for _ in range(2)] == [0, 3]
    assert world.state.round == 2 + 4
    world.assign()
    assert [kit.verdict(world.propose(WRONG)).action for _ in range(2)] == [0, 2]


def test_amb_101_no_verdict_exists_for_a_self_decoded_round(kit: Any) -> None:
    world = self_decoding(kit)
    world.propose(WRONG)
    world.assign()
    answer = kit.refused(world.propose([6], round=2, base=1), 409, "sdcp-stale-base")
    assert answer.state == world.state


def test_amb_102_proposals_during_a_period_are_not_assigned(kit: Any) -> None:
    world = self_decoding(kit)
    first = world.proposal(WRONG)
    world.hold = (Score,)
    world.send(first)
    held, world.held = world.held, []
    world.carry_out(held[0])
    assert world.state.state == 3
    verdict = world.replies[world.last_waiter]
    assert world.send(first) is verdict
    assert world.propose([6]) is None  # the base still matches; it waits for the token that is on its way
    waiter = world.last_waiter
    world.resume()
    assert isinstance(world.replies[waiter], NotAssigned)
    assert len(world.scores) == 5


def test_amb_103_between_switch_and_the_next_assignment(kit: Any) -> None:
    world = kit.assigned(kit.contract(fallback=(2,), low_rounds=1))
    first = world.proposal(WRONG)
    verdict = kit.verdict(world.send(first))
    assert (verdict.action, kinds(world), world.state.state) == (2, [(2, 1)], 2)
    kit.refused(world.propose([6]), 403, "sdcp-not-assigned")
    kit.refused(world.decline(), 403, "sdcp-not-assigned")
    assert world.send(first) is verdict
    world.assign(kit.A)
    kit.refused(world.send(first), 403, "sdcp-not-assigned")
    assert kit.verdict(world.propose([6], kit.A, drafter=kit.A)).emitted == (6, 7)


def test_amb_104_an_assignment_ends_the_period_at_the_next_token(kit: Any) -> None:
    world = self_decoding(kit, self_max=10)
    world.hold = (Score,)
    world.propose(WRONG)
    for _ in range(2):
        held, world.held = world.held, []
        world.carry_out(held[0])
    assert world.assign(kit.A) is None  # the second token is being decoded
    waiter = world.last_waiter
    world.resume()
    state = world.replies[waiter]
    assert (state.round, state.committed, state.state) == (3, 3, 0)
    assert world.events == []
    assert kit.verdict(world.propose([8], kit.A, drafter=kit.A)).round == 4


def test_amb_104_after_the_last_token_no_event_either(kit: Any) -> None:
    world = self_decoding(kit, self_max=1)
    world.hold = (Score,)
    world.propose(WRONG)
    held, world.held = world.held, []
    world.carry_out(held[0])
    world.assign(kit.A)
    world.resume()
    assert (world.state.round, world.events) == (2, [])


def test_amb_122_seeded_self_decoding_draws_as_an_additional_token_at_1(kit: Any) -> None:
    world = self_decoding(kit, rule=2, sampling=Sampling(seed=42), self_max=1)
    world.score = lambda request: [Scored(0, 9, 0.0, 1.0)] * (len(request.tokens) + 1)
    world.propose(WRONG)
    (drafted, alone) = (score.request.uniforms for score in world.scores)
    assert (len(drafted.accept), len(drafted.extra)) == (1, 2)
    assert alone == accept.uniforms(42, kit.SESSION, 2, 0)
    assert (alone.accept, len(alone.extra)) == ((), 1)


def test_amb_122_unseeded_draws_are_fresh_for_every_round(kit: Any) -> None:
    world = self_decoding(kit, rule=2, self_max=2)
    world.score = lambda request: [Scored(0, 9, 0.0, 1.0)] * (len(request.tokens) + 1)
    world.propose(WRONG)
    assert [score.fresh_uniforms for score in world.scores] == [True] * 3


def test_sdcp_124_125_amb_123_greedy_is_the_same_with_and_without_drafts(kit: Any) -> None:
    contract = kit.contract(max_new=12)
    alone = kit.World(contract, OpenOptions(undrafted=True))
    alone.open()
    drafted = kit.assigned(contract)
    for tokens in ([5, 6, 7], [9], [10, 61, 62], [12]):
        kit.verdict(drafted.propose(tokens))
    while not drafted.output().final:
        kit.verdict(drafted.propose([60]))
    assert alone.output().tokens == drafted.output().tokens == tuple(range(5, 17))
    assert alone.output().finish == 4


# ---- without a drafter (AMB-124) ---------------------------------------------------------------------


def test_sdcp_195_amb_124_undrafted_sessions_decode_to_their_end(kit: Any) -> None:
    world = kit.World(kit.contract(max_new=5), OpenOptions(undrafted=True))
    world.open()
    assert [(r.round, r.emitted) for r in world.commits] == [(i, (4 + i,)) for i in range(1, 6)]
    assert (world.output().finish, kinds(world)) == (4, [(4, 5)])


def test_amb_124_a_session_that_waits_too_long_starts_by_itself_until_a_drafter_comes(kit: Any) -> None:
    world = kit.World()
    world.open()
    world.hold = (Score,)
    world.run(world.engine.undrafted(kit.SESSION, world.at()))
    assert world.state.state == 3
    assert world.assign() is None
    waiter = world.last_waiter
    world.resume()
    assert world.replies[waiter].committed == 1
    assert world.state.state == 0
    assert (len(world.commits), world.events) == (1, [])
    assert kit.verdict(world.propose([6])).round == 2


def test_amb_124_the_drafter_never_hears_of_it(kit: Any) -> None:
    """It needs no self_load: it isn't the ladder's action."""
    world = kit.World(kit.contract(max_new=3))
    world.open()
    world.load = 100
    world.run(world.engine.undrafted(kit.SESSION, world.at()))
    assert world.output().tokens == (5, 6, 7)


def test_a_silent_drafter_is_decoded_for_until_it_is_heard(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    world.run(world.engine.undrafted(kit.SESSION, world.at()))
    held, world.held = world.held, []
    world.carry_out(held[0])  # one token, and the next one is on its way
    assert world.state.committed == 1
    late = world.propose([5], round=1, base=0, base_digest=world.session.origin)
    assert kit.refused(late, 409, "sdcp-stale-base").state.committed == 1
    world.resume()
    assert world.state.committed == 2  # and no more
    assert kit.verdict(world.propose([7])).emitted == (7, 8)
    assert world.events == []


def test_a_silent_drafter_that_is_assigned_again_is_still_silent(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    world.run(world.engine.undrafted(kit.SESSION, world.at()))
    world.assign()
    waiter = world.last_waiter
    held, world.held = world.held, []
    world.carry_out(held[0])
    assert isinstance(world.replies[waiter], SessionState)
    assert len(world.held) == 1  # goes on
    world.assign(kit.A)  # another one gets its chance
    world.resume()
    assert world.state.committed == 2


# ---- decline (docs/decisions/0003) -------------------------------------------------------------------


def test_decline_commits_one_token_as_a_round_without_verdict(kit: Any) -> None:
    world = kit.assigned(kit.contract(low_rounds=1, fallback=(5,)))
    state = world.decline()
    assert isinstance(state, SessionState)
    assert (state.round, state.committed, state.state) == (1, 1, 0)
    assert [(r.round, r.emitted) for r in world.commits] == [(1, (5,))]
    assert world.session.control == structs.replace(world.session.control, c=0, g=0, j=0)
    kit.refused(world.propose([5], round=1, base=0), 409, "sdcp-stale-base")
    assert kit.verdict(world.propose([6])).round == 2
    world.check()


def test_decline_is_checked_like_a_proposal(kit: Any) -> None:
    world = kit.assigned()
    kit.refused(world.decline(kit.A, drafter=kit.A), 403, "sdcp-not-assigned")
    kit.refused(world.decline(kit.B, drafter=kit.A), 403, "sdcp-not-assigned")
    kit.refused(world.decline(epoch=2), 409, "sdcp-stale-epoch")
    kit.refused(world.decline(round=2), 409, "sdcp-stale-base")
    world.run(world.engine.close(kit.SESSION, world.at()))
    kit.refused(world.decline(), 410, "sdcp-session-closed")


def test_a_repeated_decline_decodes_no_second_token(kit: Any) -> None:
    world = kit.assigned()
    world.hold = (Score,)
    world.decline()
    world.decline(round=1)
    first, second = world.last_waiter - 1, world.last_waiter
    world.resume()
    assert world.replies[first].committed == 1
    assert kit.refused(world.replies[second], 409, "sdcp-stale-base").state == world.replies[first]
    assert len(world.commits) == 1


def test_decline_may_end_the_session(kit: Any) -> None:
    world = kit.assigned(kit.contract(stop=(5,)))
    assert world.decline().state == 4
    assert (world.output().tokens, world.output().finish, kinds(world)) == ((5,), 4, [(4, 1)])


def test_declined_rounds_keep_the_limit_of_the_last_verdict_or_more(kit: Any) -> None:
    world = kit.assigned(kit.contract(low_rounds=1, fallback=(1, 1)))
    told = kit.verdict(world.propose(WRONG)).m_cap
    assert told == 4
    world.decline()
    assert kit.verdict(world.propose([7, 8, 9, 10])).accepted == 4


def test_a_failed_pass_without_a_proposal_is_tried_again_and_then_ends_the_session(kit: Any) -> None:
    world = kit.World(options=OpenOptions(undrafted=True))
    passes = []

    def failing(request: Any) -> ScoreFailure:
        passes.append(request)
        return ScoreFailure("out of memory")

    world.score = failing
    world.open()
    assert len(passes) == 3
    assert (world.output().tokens, world.output().final, world.output().finish) == ((), True, 5)
    assert kinds(world) == [(5, 0)]
    assert world.commits[-1].final == 5


def test_a_model_that_answers_the_wrong_number_of_positions_ends_the_session(kit: Any) -> None:
    world = kit.assigned()
    world.score = lambda request: [Scored(5, 5)]
    verdict = world.propose([5, 6])
    assert isinstance(verdict, Verdict)
    assert (verdict.action, verdict.emitted, world.output().finish) == (5, (), 5)
