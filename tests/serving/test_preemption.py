"""Under pressure sessions give their KV up and get it back; nobody can tell from the output (C-37, C-38)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.roles import residency
from sdcp_mono.roles.tasks import Tasks

NEW = 48
BLOCKS = 24  # of 16 tokens: six sessions want twice as many


@pytest.fixture(scope="module")
def small(smollm2_float32: Any, tmp_path_factory: pytest.TempPathFactory, load_engine: Any) -> Any:
    """SmolLM2 in float32 with 17 MiB of KV."""
    data = tmp_path_factory.mktemp("small")
    return load_engine(smollm2_float32, data, ("ngram", "quantized"), dtype="float32", kv_memory_mb=17)


@pytest.fixture(scope="module")
def requests(small: Any, prompts: Any) -> list[Any]:
    """Four greedy, two seeded."""
    chosen = [small.request(prompt, NEW, stop=()) for prompt in prompts[20:26]]
    for i in (1, 4):
        chosen[i] = structs.replace(
            chosen[i], rule=Rule.SPECULATIVE_SAMPLING, sampling=Sampling(seed=i), session=bytes([i]) * 16
        )
    return chosen


@pytest.fixture(scope="module")
def alone(small: Any, requests: list[Any]) -> Any:
    """What each gets without neighbours, by draft and M."""
    known: dict[Any, list[tuple[int, ...]]] = {}

    def outputs(draft: str | None, m: int | None) -> list[tuple[int, ...]]:
        if (draft, m) not in known:
            known[draft, m] = [output.tokens for output in small.run(small.node(draft, m=m), requests)]
        return known[draft, m]

    return outputs


@pytest.fixture(autouse=True)
def little_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one more block at a time: as tight as it gets."""
    monkeypatch.setattr(residency, "GROWTH", 8)


@pytest.mark.parametrize(("draft", "m"), [(None, None), ("quantized", 1), ("quantized", 3), ("ngram", 5)])
def test_c_37_preempted_sessions_say_what_they_would_have_said(
    small: Any, requests: list[Any], alone: Any, draft: str | None, m: int | None
) -> None:
    """Besides the pressure, sessions are preempted at random moments: while they draft, verify, or wait."""
    node = small.node(draft, m=m)
    rooms = node._verifier.residency
    pool = small.loaded.kv["target"].pool
    assert pool.total == BLOCKS
    taken: list[bytes] = []

    async def harass() -> None:
        source = random.Random(7)
        while True:
            sessions = list(node._engine.sessions)
            if sessions and await rooms.preempt(session := source.choice(sessions)):
                taken.append(session)
            for _ in range(source.randrange(1, 400)):
                await asyncio.sleep(0)

    async def main() -> list[Any]:
        tasks = Tasks()
        slots = [asyncio.ensure_future(read(node, request)) for request in requests]
        tasks.start(harass())
        try:
            return await asyncio.gather(*slots)
        finally:
            await tasks.stop()

    async def world() -> list[Any]:
        async with node:
            return await main()

    outputs = asyncio.run(world())
    assert [tokens for tokens, _ in outputs] == alone(draft, m)
    assert {error for _, error in outputs} == {""}
    assert len(taken) >= 3
    assert rooms.preempted >= len(taken)
    pool.check()
    assert small.loaded.kv["target"].free_tokens == BLOCKS * 16  # nothing is held but by copies that have ended


async def read(node: Any, request: Any) -> tuple[tuple[int, ...], str]:
    generation = await node.serving.generate(request)
    tokens: list[int] = []
    try:
        async for chunk in generation.chunks():
            tokens += chunk.tokens
        return tuple(tokens), chunk.error
    finally:
        await generation.close()
