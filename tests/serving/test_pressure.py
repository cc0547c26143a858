"""KV pressure with tiers below the device: loads, long prompts and many short requests at once all finish (C-38)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

BLOCK = 16
BLOCKS = 270
WARM = 250 * BLOCK  # tokens of the prompt that is in host memory only
SHORT = 500
TOGETHER = 64


@pytest.fixture(scope="module")
def tight(smollm2_float32: Any, tmp_path_factory: pytest.TempPathFactory, load_engine: Any) -> Any:
    data = tmp_path_factory.mktemp("tight")
    return load_engine(smollm2_float32, data, ("ngram",), dtype="float32", kv_memory_mb=190, token_budget=512)


def prompt(source: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(100, 49_000) for _ in range(tokens))


async def read(node: Any, request: Any) -> tuple[int, ...]:
    generation = await node.serving.generate(request)
    tokens: list[int] = []
    try:
        async for chunk in generation.chunks():
            tokens += chunk.tokens
        assert chunk.error == "", chunk.error
        return tuple(tokens)
    finally:
        await generation.close()


def test_c_38_everything_finishes(tight: Any) -> None:
    source = random.Random(38)
    kv, thread = tight.loaded.kv["target"], tight.loaded.thread
    assert BLOCKS <= kv.pool.total < BLOCKS + 3
    warm = prompt(source, WARM)
    long = tight.request((*warm, *prompt(source, 5 * BLOCK)), 8, stop=())
    heavy = tight.request(prompt(source, 100 * BLOCK), 8, stop=())
    waiting = tight.request(prompt(source, 10 * BLOCK), 8, stop=())
    too_long = tight.request(prompt(source, (kv.pool.total + 1) * BLOCK), 8, stop=())

    async def main() -> None:
        settings = {"kv_host_mb": 256, "kv_disk_mb": 0, "max_sessions": TOGETHER}
        async with tight.node("ngram", **settings) as node:
            restorer = node.storage.restorers["target"]
            expected = [await read(node, request) for request in (long, heavy, waiting)]
            await read(node, tight.request(warm, 1, stop=()))
            await asyncio.to_thread(node.storage.tiers.settle)
            thread.submit(kv.pool.forget).result()
            before = restorer.restored
            found = await asyncio.gather(*(read(node, request) for request in (long, heavy, waiting)))
            assert list(found) == expected
            assert restorer.restored > before  # the long prompt was loaded, while the others wanted its room

            with pytest.raises(Exception, match=r"prompt|context|room|fit"):
                await read(node, too_long)

            slots = asyncio.Semaphore(TOGETHER)

            async def short(number: int) -> int:
                request = tight.request(prompt(random.Random(number), 3), 2, stop=())
                async with slots:
                    if number % 10:
                        return len(await read(node, request))
                    generation = await node.serving.generate(request)
                    await generation.close()  # the client has gone
                    return 2

            again = asyncio.ensure_future(read(node, long))
            assert await asyncio.gather(*map(short, range(SHORT))) == [2] * SHORT
            assert await again == expected[0]

    asyncio.run(asyncio.wait_for(main(), 240))
    kv.pool.check()
    assert kv.free_tokens == kv.pool.total * BLOCK
