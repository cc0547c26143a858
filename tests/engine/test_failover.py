"""Two verifiers and one log (6.8, 6.9): only one of them can commit, and the other goes on where the log ends."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.core import digest as digests
from sdcp_mono.core.effects import Append
from sdcp_mono.core.messages import CommitRecord, FenceRecord, Resume, Sampling, SessionState
from sdcp_mono.core.ports import Scored, ScoreRequest

V = 16
SCRIPT = [(3, 8, 1), (0,), (5, 5, 5, 5), (2, 9), (15, 1), (7,), (4, 4), (11, 12, 13)]  # what the drafter proposes


def distribution(last: int) -> list[float]:
    weights = [1 + (3 * last + 5 * x) % 7 for x in range(V)]
    return [w / sum(weights) for w in weights]


def draw(weights: list[float], u: float) -> int:
    sums = list(accumulate(weights))
    return next(x for x, mass in enumerate(sums) if mass > u * sums[-1])


def sampled(request: ScoreRequest) -> list[Scored]:
    """Rule 2 with a uniform q over all V ids."""
    assert request.uniforms is not None
    last = [request.prefix[request.length - 1], *request.tokens]
    rows = []
    for i, token in enumerate(last):
        p, u = distribution(token), request.uniforms.extra[i]
        if i == len(request.tokens):
            rows.append(Scored(0, draw(p, u)))
        else:
            residual = [max(0.0, a - 1 / V) for a in p]
            rows.append(Scored(0, draw(residual, u), p[request.tokens[i]], 1 / V))
    return rows


def verifier(kit: Any, contract: Any, log: list[Any]) -> Any:
    world = kit.World(contract, vocab=V)
    world.score = sampled
    world.log = log  # one list, two writers

    def conditional(append: Append) -> str:
        """What an enforcing log does (6.8)."""
        fences = [r.epoch for r in log if isinstance(r, FenceRecord)]
        if max(fences, default=0) > append.append.record.epoch:
            return "fenced"
        return "ok" if len(log) == append.append.sequence else "fenced"

    world.outcome = conditional
    return world


def take_over(kit: Any, contract: Any, log: list[Any], epoch: int) -> Any:
    """What a router does: fence, read, open elsewhere."""
    log.append(FenceRecord(epoch=epoch))
    commits = [r for r in log if isinstance(r, CommitRecord)]
    tokens = tuple(token for r in commits for token in r.emitted)
    digest = digests.extend(digests.prefix_digest(digests.contract_digest(contract), (1, 3, 3, 4)), tokens)
    resume = Resume(
        round=commits[-1].round if commits else 0,
        committed=len(tokens),
        digest=digest,
        committed_tokens="mlc://m/-/t/1",
    )
    world = verifier(kit, contract, log)
    state = world.open(epoch=epoch, resume=resume, committed=tokens)
    assert isinstance(state, SessionState), state
    assert isinstance(world.assign(), SessionState)
    return world


def seeded(kit: Any) -> Any:
    return kit.contract(rule=2, sampling=Sampling(seed=7), max_new=40, stop=(), low_rounds=100)


def undisturbed(kit: Any) -> tuple[int, ...]:
    world = verifier(kit, seeded(kit), [])
    world.open(), world.assign()
    for tokens in SCRIPT:
        kit.verdict(world.propose(tokens))
    output: tuple[int, ...] = world.output().tokens
    return output


@given(cuts=st.lists(st.integers(0, len(SCRIPT) - 1), max_size=3))
def test_sdcp_133_180_the_session_goes_on_with_the_tokens_it_would_have_had(kit: Any, cuts: list[int]) -> None:
    """Wherever verifiers die: the draws depend on seed, session and round alone (AMB-131)."""
    contract, log, epoch = seeded(kit), [], 1
    world = verifier(kit, contract, log)
    world.open(), world.assign()
    for round_, tokens in enumerate(SCRIPT):
        for _ in range(cuts.count(round_)):
            epoch += 1
            world = take_over(kit, contract, log, epoch)
        verdict = kit.verdict(world.propose(tokens))
        assert (verdict.epoch, verdict.round) == (epoch, round_ + 1)
    assert world.output().tokens == undisturbed(kit)
    assert len([r for r in log if isinstance(r, CommitRecord)]) == len(SCRIPT)


def test_sdcp_178_a_zombie_commits_and_releases_nothing(kit: Any) -> None:
    """C-43: the old verifier was only cut off, and wakes up with a round scored but not appended."""
    contract, log = seeded(kit), []
    old = verifier(kit, contract, log)
    old.open(), old.assign()
    kit.verdict(old.propose(SCRIPT[0]))
    old.hold = (Append,)
    old.propose(SCRIPT[1])
    waiter = old.last_waiter
    new = take_over(kit, contract, log, 2)
    before = list(log)
    old.resume()
    kit.refused(old.replies[waiter], 409, "sdcp-stale-epoch")
    assert log == before
    assert old.released == [kit.SESSION]
    assert old.events == []
    kit.refused(old.propose(SCRIPT[1]), 409, "sdcp-stale-epoch")
    old.run(old.engine.undrafted(kit.SESSION, old.at()))
    assert log == before
    for tokens in SCRIPT[1:]:
        kit.verdict(new.propose(tokens))
    assert new.output().tokens == undisturbed(kit)


def test_amb_150_an_append_that_beat_the_fence_is_kept(kit: Any) -> None:
    """The record is in the log, its acknowledgement was lost, then came the fence: the round stands for both."""
    contract, log = seeded(kit), []
    old = verifier(kit, contract, log)
    old.open(), old.assign()
    old.outcome = lambda append: "lost"
    old.hold = (Append,)
    old.propose(SCRIPT[0])
    waiter, (append,) = old.last_waiter, old.held
    old.held, old.hold = [], ()
    log.append(append.append.record)  # stored; the answer never comes
    new = take_over(kit, contract, log, 2)
    old.run(old.engine.appended(append, "unknown", old.at()))
    verdict = kit.verdict(old.replies[waiter])
    assert verdict.emitted == new.output().tokens  # the same tokens, whoever tells them
    for tokens in SCRIPT[1:]:
        kit.verdict(new.propose(tokens))
    assert new.output().tokens == undisturbed(kit)
    old.outcome = lambda append: "fenced"
    kit.refused(old.propose(SCRIPT[1]), 409, "sdcp-stale-epoch")


def test_amb_151_an_append_that_the_fence_beat_is_not(kit: Any) -> None:
    contract, log = seeded(kit), []
    old = verifier(kit, contract, log)
    old.open(), old.assign()
    old.hold = (Append,)
    old.propose(SCRIPT[0])
    (append,) = old.held
    old.held, old.hold = [], ()
    take_over(kit, contract, log, 2)
    old.run(old.engine.appended(append, "unknown", old.at()))  # it reads: the fence has its place
    kit.refused(old.propose(SCRIPT[0]), 409, "sdcp-stale-epoch")
    assert len(log) == 1


def test_amb_156_a_fence_of_its_own_epoch_is_no_failure(kit: Any) -> None:
    contract, log = seeded(kit), []
    world = take_over(kit, contract, log, 2)
    assert kit.verdict(world.propose(SCRIPT[0])).epoch == 2
    assert [type(r).__name__ for r in log] == ["FenceRecord", "CommitRecord"]


@pytest.mark.parametrize("where", [0, 1])
def test_amb_152_the_first_record_follows_the_position_read_at_opening(kit: Any, where: int) -> None:
    contract, log = seeded(kit), []
    world = take_over(kit, contract, log, 2)
    if where:
        kit.verdict(world.propose(SCRIPT[0]))
    log.append(FenceRecord(epoch=2))  # somebody else wrote: nothing follows blindly (SDCP-171)
    kit.refused(world.propose(SCRIPT[where]), 409, "sdcp-stale-epoch")


def test_amb_065_a_policy_sent_again_gives_the_same_tokens(kit: Any) -> None:
    contract = seeded(kit)

    def play(cut: int | None) -> tuple[int, ...]:
        log: list[Any] = []
        world = verifier(kit, contract, log)
        world.open(), world.assign()
        for round_, tokens in enumerate(SCRIPT, 1):
            if round_ == 3:
                world.policy(3, seed=99)
            if round_ == cut:
                world = take_over(kit, contract, log, 2)
                world.policy(world.state.round + 1, seed=99)
            kit.verdict(world.propose(tokens))
        output: tuple[int, ...] = world.output().tokens
        return output

    assert play(5) == play(None) != undisturbed(kit)
