"""What comes out of a node, whatever its drafters do (SDCP-002, 125)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import Draft, DraftRequest, ScoreFailure, ScoreRequest


class Scripted:
    """A drafter that answers whatever ``answer`` says."""

    name, identity, vocab_size = "scripted", b"d" * 32, 64

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.asked += len(requests)
        return [self.answer(request) for request in requests]

    def release(self, session: bytes) -> None: ...


def fails(_: DraftRequest) -> Draft:
    raise RuntimeError("the draft model is broken")


def sometimes_fails(request: DraftRequest) -> Draft:
    if request.round % 3 == 0:
        raise RuntimeError("the draft model is broken now and then")
    return Draft((7,) * request.m)


def sometimes_declines(request: DraftRequest) -> Draft:
    return Draft((9,) * request.m) if request.round % 2 else Draft(())


class TooShort(Scripted):
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return []


def drafters(kit: Any) -> dict[str, list[Any]]:
    rng = random.Random(1)
    right = kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))
    return {
        "none": [],
        "right": [right],
        "wrong": [kit.toy.ToyDraft(kit.toy.chain({t: (t + 1) % 64 for t in range(64)}))],
        "half right": [kit.toy.ToyDraft(kit.toy.chain({t: n for t, n in kit.EDGES.items() if t % 2}))],
        "random": [Scripted(lambda request: Draft(tuple(rng.randrange(64) for _ in range(request.m))))],
        "declining": [Scripted(lambda request: Draft(()))],
        "sometimes declining": [Scripted(sometimes_declines)],
        "failing": [Scripted(fails)],
        "sometimes failing": [Scripted(sometimes_fails)],
        "too many tokens": [Scripted(lambda request: Draft((1,) * (request.m + 5)))],
        "not in the vocabulary": [Scripted(lambda request: Draft((64,)))],
        "no answers": [TooShort(None)],
        "failing, then right": [Scripted(fails), right],
        "declining, then right": [Scripted(lambda request: Draft(())), right],
    }


NAMES = [
    "none", "right", "wrong", "half right", "random", "declining", "sometimes declining", "failing",
    "sometimes failing", "too many tokens", "not in the vocabulary", "no answers", "failing, then right",
    "declining, then right",
]  # fmt: skip


@pytest.mark.parametrize(("instant", "m_fixed"), [(False, None), (True, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_sdcp_125_greedy_is_the_targets(kit: Any, run: Any, name: str, instant: bool, m_fixed: int | None) -> None:
    """Long enough for every ladder to be climbed to its end: a bad drafter costs time, never the answer."""

    async def main() -> None:
        drafts = drafters(kit)[name]
        async with kit.node(*drafts, instant=instant, m_fixed=m_fixed) as world:
            wishes = [kit.request((token,), 200 + token) for token in range(3)]
            texts = await asyncio.gather(*(world.text(wish) for wish in wishes))
            for token, text in enumerate(texts):
                assert text == kit.follow(token, 200 + token)
            await world.assert_empty()

    run(main())


def test_a_right_drafter_saves_passes_and_a_broken_one_is_left_alone(kit: Any, run: Any) -> None:
    async def passes(*drafts: Any) -> int:
        async with kit.node(*drafts, m_fixed=7, m_init=8) as world:
            assert await world.text(kit.request(max_new=81)) == kit.follow(3, 81)
            count: int = world.target.passes
            return count

    assert run(passes()) == 81
    assert run(passes(kit.toy.ToyDraft(kit.toy.chain(kit.EDGES)))) == 1 + 80 // 8
    broken = Scripted(fails)
    assert run(passes(broken)) == 81
    assert broken.asked == 3  # MAX_FAULTS


def test_stop_tokens_and_max_new_end_a_text(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))) as world:
            tokens = kit.follow(3, 64)
            assert await world.text(kit.request(max_new=60, stop=(tokens[9],))) == tokens[:10]
            assert await world.text(kit.request(max_new=1)) == tokens[:1]
            assert await world.text(kit.request(max_new=0)) == ()
            await world.assert_empty()

    run(main())


def test_speculation_can_be_left_out(kit: Any, run: Any) -> None:
    async def main() -> None:
        draft = kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))
        async with kit.node(draft) as world:
            assert await world.text(kit.request(speculative=False)) == kit.follow(3, 40)
            assert draft.drafted == 0
            chunks = await world.read(kit.request(speculative=False))
            assert {token.origin for c in chunks for r in c.rounds for token in r.tokens} == {"self"}
            await world.assert_empty()

    run(main())


def test_rounds_tell_the_whole_text_once(kit: Any, run: Any) -> None:
    async def main() -> None:
        edges = {t: n for t, n in kit.EDGES.items() if t % 5}
        async with kit.node(kit.toy.ToyDraft(kit.toy.chain(edges))) as world:
            chunks = await world.read(kit.request(max_new=100))
            rounds = [info for chunk in chunks for info in chunk.rounds]
            assert [info.round for info in rounds] == list(range(1, len(rounds) + 1))
            assert tuple(token for info in rounds for token in info.emitted) == kit.follow(3, 100)
            assert rounds[0].proposed == ()  # docs/decisions/0002
            assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]

    run(main())


# ---- rule 2 ----------------------------------------------------------------------------------------------------


def four(*weights: float) -> Any:
    """The same distribution over ids 50..53 after any token."""
    return lambda last: (*([0.0] * 50), *weights, *([0.0] * 10))


P, Q = four(0.2, 0.4, 0.3, 0.1), four(0.4, 0.3, 0.2, 0.1)


def test_c_27_seeded_texts_do_not_depend_on_the_crowd(kit: Any, run: Any) -> None:
    """Alone, in a crowd of unseeded sessions that change their M as load changes, and again after a restart."""

    def node() -> Any:
        return kit.node(kit.toy.ToyDraft(Q), target=kit.toy.ToyTarget(P, kit.CARD), max_sessions=17)

    def seeded(seed: int) -> Any:
        return kit.request(max_new=64, sampled=True, seed=seed, session=seed.to_bytes(16, "big"))

    async def alone() -> list[tuple[int, ...]]:
        async with node() as world:
            texts = [await world.text(seeded(seed)) for seed in (7, 8)]
            assert await world.text(seeded(7)) == texts[0]  # a later identical request starts afresh
            return texts

    async def crowd() -> list[tuple[int, ...]]:
        async with node() as world:
            others = [kit.request((i,), 30 + 5 * i, sampled=True) for i in range(7)]
            others += [kit.request((i,), 30 + 5 * i) for i in range(7)]
            texts = await asyncio.gather(
                *(world.text(wish) for wish in others[:6]),
                world.text(seeded(7)),
                *(world.text(wish) for wish in others[6:]),
                world.text(seeded(8)),
            )
            await world.assert_empty()
            return [texts[6], texts[-1]]

    first = run(alone())
    assert first[0] != first[1]
    assert run(crowd()) == run(alone()) == first


def test_c_27_unseeded_texts_differ(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(kit.toy.ToyDraft(Q), target=kit.toy.ToyTarget(P, kit.CARD)) as world:
            texts = await asyncio.gather(*(world.text(kit.request(max_new=48, sampled=True)) for _ in range(20)))
            assert len(set(texts)) == 20
            await world.assert_empty()

    run(main())


def test_sdcp_129_temperature_0_is_greedy_under_rule_2_too(kit: Any, run: Any) -> None:
    """A point mass as target: whatever q is, the text is the chain (AMB-028)."""

    async def main() -> None:
        async with kit.node(kit.toy.ToyDraft(lambda last: (1 / 64,) * 64)) as world:
            wish = kit.request(max_new=60, rule=Rule.SPECULATIVE_SAMPLING, sampling=Sampling(temperature_milli=0))
            assert await world.text(wish) == kit.follow(3, 60)
            await world.assert_empty()

    run(main())


def test_rows_that_find_no_room_cost_speed_only(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))) as world:
            world.objects._capacity = 0
            assert await world.text(kit.request(sampled=True)) == kit.follow(3, 40)
            await world.assert_empty()

    run(main())


@pytest.mark.parametrize("rows", ["short", "zero"])
def test_rows_that_are_wrong_cost_speed_only(kit: Any, run: Any, rows: str) -> None:
    def draft(request: DraftRequest) -> Draft:
        row = [1 / 63] * 64 if rows == "short" else [0.0] * 64
        return Draft((1,) * request.m, kit.toy.ToyRows([row] * (request.m - (rows == "short"))))

    async def main() -> None:
        async with kit.node(Scripted(draft), m_fixed=2) as world:
            assert await world.text(kit.request(sampled=True, max_new=12)) == kit.follow(3, 12)
            await world.assert_empty()

    run(main())


# ---- a target that fails -----------------------------------------------------------------------------------------


def test_amb_145_a_pass_that_fails_is_repeated(kit: Any, run: Any) -> None:
    failed: set[tuple[bytes, int]] = set()

    def fail(request: ScoreRequest) -> ScoreFailure | None:
        key = (request.session, request.length)
        if request.length % 3 or key in failed:
            return None
        failed.add(key)
        return ScoreFailure("out of memory")

    async def main() -> None:
        target = kit.toy.ToyTarget(kit.toy.chain(kit.EDGES), kit.CARD, fail)
        async with kit.node(kit.toy.ToyDraft(kit.toy.chain(kit.EDGES)), target=target) as world:
            assert await world.text(kit.request(max_new=40)) == kit.follow(3, 40)
            assert failed
            await world.assert_empty()

    run(main())


def test_amb_145_a_pass_that_raises_is_every_sessions_failure_once(kit: Any, run: Any) -> None:
    class Raising(kit.toy.ToyTarget):  # type: ignore[misc, name-defined]
        def step(self, requests: Sequence[ScoreRequest]) -> Any:
            answer = super().step(requests)
            if self.passes == 3:
                raise MemoryError
            return answer

    async def main() -> None:
        target = Raising(kit.toy.chain(kit.EDGES), kit.CARD)
        async with kit.node(kit.toy.ToyDraft(kit.toy.chain(kit.EDGES)), target=target) as world:
            texts = await asyncio.gather(*(world.text(kit.request((i,), 30)) for i in range(5)))
            assert list(texts) == [kit.follow(i, 30) for i in range(5)]
            await world.assert_empty()

    run(main())


def test_amb_146_not_a_number_ends_one_session_with_what_it_had(kit: Any, run: Any) -> None:
    poisoned = kit.follow(3, 5)

    def fail(request: ScoreRequest) -> ScoreFailure | None:
        nan = tuple(request.prefix[3 : request.length]) == poisoned and request.prefix[0] == 1
        return ScoreFailure("the logits are not finite", permanent=True) if nan else None

    async def main() -> None:
        target = kit.toy.ToyTarget(kit.toy.chain(kit.EDGES), kit.CARD, fail)
        async with kit.node(target=target) as world:
            chunks, neighbour = await asyncio.gather(
                world.read(kit.request((1, 2, 3), 40)), world.text(kit.request((9, 2, 3), 40))
            )
            assert neighbour == kit.follow(3, 40)
            assert (chunks[-1].finish, chunks[-1].error) == (5, "the logits are not finite")
            assert tuple(token for chunk in chunks for token in chunk.tokens) == poisoned  # AMB-118
            await world.assert_empty()

    run(main())
