"""KV blocks as blobs: how they are named, and that no scope, kind or cache sees another's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sdcp_mono.cache.host import HostTier
from sdcp_mono.cache.kv import KvCache
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.core.kv import KvTiers

SIZE = 8192
KEYS = [bytes([n]) * 32 for n in range(4)]
SCOPE, OTHER = bytes(range(16)), bytes(16)


def content(number: int) -> bytes:
    return bytes([number + 1]) * SIZE


def over(tiers: Tiers, kind: str = "target_kv", authority: str = "local", size: int = SIZE) -> KvTiers:
    return KvCache(tiers, authority, kind, "bfloat16", size)


def run(work: Callable[[Tiers], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        tiers = Tiers(HostTier(32 * SIZE, staging_bytes=8 * SIZE), None, None)
        tiers.start()
        try:
            await work(tiers)
            assert tiers.host.stats().pinned_bytes == 0
        finally:
            await tiers.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


async def offer(kv: KvTiers, tiers: Tiers, numbers: range, scope: bytes | None) -> None:
    done: list[int] = []
    for number in numbers:
        assert kv.offer(KEYS[number], scope, memoryview(content(number)), lambda: done.append(1))
    assert await asyncio.to_thread(tiers.settle)
    assert len(done) == len(numbers)


@pytest.mark.parametrize(
    ("scope", "kind", "uri"),
    [
        (None, "target_kv", "mlc://local/-/target_kv/" + "02" * 32),
        (SCOPE, "draft_kv", "mlc://local/000102030405060708090a0b0c0d0e0f/draft_kv/" + "02" * 32),
    ],
)
def test_the_name_of_a_block(scope: bytes | None, kind: str, uri: str) -> None:
    async def work(tiers: Tiers) -> None:
        await offer(over(tiers, kind), tiers, range(2, 3), scope)
        assert tiers.contains(uri)
        (key,) = tiers.host.keys()
        with tiers.host.pin(key) as pin:
            assert (pin.blob.uri, pin.blob.size, pin.blob.dtype) == (uri, SIZE, "bfloat16")

    run(work)


def test_the_leading_blocks_come_back_in_order() -> None:
    async def work(tiers: Tiers) -> None:
        kv = over(tiers)
        await offer(kv, tiers, range(3), SCOPE)
        assert kv.predict(KEYS, SCOPE)[0] == 3
        assert kv.predict([KEYS[3], *KEYS[:3]], SCOPE)[0] == 0  # only a leading run counts
        load = await kv.load(KEYS, SCOPE, 30.0)
        assert [bytes(block) for block in load.blocks] == [content(n) for n in range(3)]
        assert all(block.readonly for block in load.blocks)
        load.close()
        load.close()

    run(work)


def test_nothing_asked_is_nothing_loaded() -> None:
    async def work(tiers: Tiers) -> None:
        kv = over(tiers)
        assert kv.predict([], SCOPE) == (0, 0.0)
        load = await kv.load([], SCOPE, 30.0)
        assert list(load.blocks) == []
        load.close()

    run(work)


@pytest.mark.parametrize(
    ("kind", "authority", "scope"),
    [
        ("target_kv", "local", OTHER),
        ("target_kv", "local", None),
        ("draft_kv", "local", SCOPE),
        ("target_kv", "elsewhere", SCOPE),
    ],
)
def test_what_another_has_looks_like_nothing(kind: str, authority: str, scope: bytes | None) -> None:
    async def work(tiers: Tiers) -> None:
        await offer(over(tiers), tiers, range(3), SCOPE)
        kv = over(tiers, kind, authority)
        assert kv.predict(KEYS, scope) == (0, 0.0)
        load = await kv.load(KEYS, scope, 30.0)
        assert list(load.blocks) == []
        load.close()

    run(work)


def test_a_block_of_another_size_is_never_given() -> None:
    async def work(tiers: Tiers) -> None:
        await offer(over(tiers), tiers, range(1), None)
        load = await over(tiers, size=SIZE // 2).load(KEYS[:1], None, 30.0)
        assert list(load.blocks) == []
        load.close()

    run(work)
