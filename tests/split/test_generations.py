"""Whole generations with the roles on either side of gRPC: the tokens are those of one process."""

from __future__ import annotations

import asyncio
from typing import Any


def test_a_generation_over_grpc_is_the_targets(kit: Any) -> None:
    """Every answer is known by hand: the toy target follows one cycle; the drafter knows half of it."""
    expected = [3]
    for _ in range(40):
        expected.append(kit.EDGES[expected[-1]])

    async def test() -> None:
        target = kit.toy.ToyTarget(kit.toy.chain(kit.EDGES), kit.CARD)
        draft = kit.toy.ToyDraft(kit.toy.chain({token: after for token, after in kit.EDGES.items() if token % 2}))
        async with kit.world(target, draft) as world:
            texts = await asyncio.gather(*(world.text(kit.request(max_new=40)) for _ in range(4)))
            assert texts == [tuple(expected[1:])] * 4
            assert draft.drafted > 0
            assert await world.log.names() == []
            assert target.held == set()

    kit.run(test())


def test_seeded_sampling_over_grpc_equals_one_process(kit: Any, in_process: Any) -> None:
    """Rule 2 with rows through the cache: the same tokens as with rows that never left the process."""
    models = kit.toy

    def p(last: int) -> Any:
        return tuple(
            (0.4, 0.3, 0.2, 0.1)[(token - last) % 4] if (token - last) % 64 < 4 else 0.0 for token in range(64)
        )

    def q(last: int) -> Any:
        return tuple(
            (0.1, 0.2, 0.3, 0.4)[(token - last) % 4] if (token - last) % 64 < 4 else 0.0 for token in range(64)
        )

    requests = [kit.request(prompt=(1, 2, seed), max_new=30, seed=seed) for seed in range(3)]

    async def split() -> Any:
        target, draft = models.ToyTarget(p, kit.CARD), models.ToyDraft(q)
        async with kit.world(target, draft) as world:
            texts = [await world.text(request) for request in requests]
            world.objects.sweep()
            assert world.objects.stats().objects == 0
            assert draft.drafted > 0
            assert any("/q_rows/" in uri for uri in world.puts)
            return texts

    async def together() -> Any:
        async with in_process.node(models.ToyDraft(q), target=models.ToyTarget(p, kit.CARD), instant=True) as world:
            return [await world.text(request) for request in requests]

    assert kit.run(split()) == kit.run(together())
