"""The promise with a cache: cold, or KV from the device, host memory, disk, or another verifier: the same output."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from sdcp_mono import certs
from sdcp_mono.cache.host import HostTier
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.objects import RoutedObjects
from sdcp_mono.cache.others import Others
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.names import MlcUri
from sdcp_mono.grpc.cache_client import ObjectStoreClient
from sdcp_mono.grpc.cache_service import ObjectStoreService
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.grpc.server import serve_grpc
from sdcp_mono.http_gateway.identity import Access

NEW = 24


@pytest.fixture(scope="module")
def exact(smollm2_float32: Any, tmp_path_factory: pytest.TempPathFactory, load_engine: Any) -> Any:
    """SmolLM2 in float32 with two drafters: one that reads the target's KV, one with its own."""
    data = tmp_path_factory.mktemp("levels")
    settings = {"dtype": "float32", "kv_memory_mb": 64, "kv_host_mb": 64, "kv_disk_mb": 128}
    return load_engine(smollm2_float32, data, ("ngram", "quantized"), **settings)


@pytest.fixture(scope="module")
def requests(exact: Any, prompts: Any) -> list[Any]:
    """Four prompts long enough to fill blocks; the last one seeded."""
    chosen = [exact.request([*prompts[i], *prompts[i + 1][3:]], NEW, stop=()) for i in (40, 44, 48, 52)]
    sampled = {"rule": Rule.SPECULATIVE_SAMPLING, "sampling": Sampling(seed=5), "session": b"5" * 16}
    return [*chosen[:3], structs.replace(chosen[3], **sampled)]


async def read(node: Any, request: Any) -> tuple[int, ...]:
    generation = await node.serving.generate(request)
    tokens: list[int] = []
    try:
        async for chunk in generation.chunks():
            tokens += chunk.tokens
        assert chunk.error == ""
        return tuple(tokens)
    finally:
        await generation.close()


@pytest.mark.parametrize("draft", [None, "quantized"])
def test_output_is_the_same_from_every_level(exact: Any, requests: list[Any], draft: str | None) -> None:
    """Whatever a level answers is counted, so that the test can't pass by computing everything anew."""
    kv, thread = exact.loaded.kv["target"], exact.loaded.thread
    levels: dict[str, list[tuple[int, ...]]] = {}
    hits: dict[str, int] = {}

    async def main() -> None:
        async with exact.node(draft, m=None if draft is None else 4) as node:
            tiers, restorer = node.storage.tiers, node.storage.restorers["target"]

            async def forget() -> None:
                await asyncio.wrap_future(thread.submit(kv.pool.forget))

            async def flush() -> None:
                await asyncio.to_thread(tiers.flush)
                assert not tiers.host.keys()

            def count() -> int:
                return kv.totals.cached_tokens

            async def all_of(name: str) -> None:
                before = count(), restorer.restored, tiers.disk.stats().hits
                levels[name] = [await read(node, request) for request in requests]
                await asyncio.to_thread(tiers.settle)
                hits[name] = count() - before[0]
                hits[f"{name} restored"] = restorer.restored - before[1]
                hits[f"{name} disk"] = tiers.disk.stats().hits - before[2]

            await forget()
            await flush()
            for key in list(tiers.disk.keys()):
                tiers.disk.drop(key)
            await all_of("cold")
            await all_of("device")
            await forget()
            await all_of("host")
            await forget()
            await flush()
            await all_of("disk")

    asyncio.run(main())
    assert levels["device"] == levels["cold"]
    assert levels["host"] == levels["cold"]
    assert levels["disk"] == levels["cold"]
    assert hits["cold restored"] == 0
    assert hits["device"] > 2 * hits["cold"]  # the prompts begin alike
    assert hits["device restored"] == 0
    assert hits["host restored"] > 0
    assert hits["host disk"] == 0
    assert hits["disk restored"] > 0
    assert hits["disk disk"] > 0


def test_a_restart_finds_what_was_on_disk(exact: Any, requests: list[Any]) -> None:
    """The same folder under a new node: blocks that were used twice, or had to make room, come back."""
    kv, thread = exact.loaded.kv["target"], exact.loaded.thread

    async def first() -> list[tuple[int, ...]]:
        async with exact.node(None) as node:
            answers = [await read(node, request) for request in requests]
            await asyncio.to_thread(node.storage.tiers.flush)
            return answers

    async def second() -> tuple[list[tuple[int, ...]], int]:
        thread.submit(kv.pool.forget).result()
        async with exact.node(None) as node:
            answers = [await read(node, request) for request in requests]
            return answers, node.storage.restorers["target"].restored

    before = asyncio.run(first())
    after, restored = asyncio.run(second())
    assert after == before
    assert restored > 0


def test_another_scope_never_sees_these_blocks(exact: Any, requests: list[Any]) -> None:
    kv, thread = exact.loaded.kv["target"], exact.loaded.thread

    async def main() -> None:
        async with exact.node(None) as node:
            await read(node, requests[0])
            await asyncio.to_thread(node.storage.tiers.settle)
            thread.submit(kv.pool.forget).result()
            restorer, prompt = node.storage.restorers["target"], requests[0].prompt
            assert await restorer(b"x" * 16, prompt, b"other tenant 16b") == 0
            thread.submit(kv.release, b"x" * 16).result()

    asyncio.run(main())


class Shared(RoutedObjects):
    """What a cache role serves; knows which kinds were put."""

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(MemoryObjects(1 << 20), tiers)
        self.kinds: Counter[str] = Counter()

    async def put(self, uri: str, value: Any, *, ttl_ms: int | None = None) -> Any:
        self.kinds[MlcUri.parse(uri).kind] += 1
        return await super().put(uri, value, ttl_ms=ttl_ms)


@pytest.mark.parametrize("draft", [None, "quantized"])
def test_another_verifier_resumes_from_what_the_cache_holds(
    exact: Any, requests: list[Any], draft: str | None, tmp_path: Path
) -> None:
    """Verifiers with tiers of their own, which share nothing but a cache behind gRPC with mutual TLS (6.9)."""
    thread = exact.loaded.thread
    bases = certs.base_uris()
    certs.init(tmp_path / "certs")

    async def verifier(name: str, channel: Channel) -> tuple[list[tuple[int, ...]], int, int]:
        """Answers, blocks that came back, and how many of them the cache had."""
        for kv in exact.loaded.kv.values():
            await asyncio.wrap_future(thread.submit(kv.pool.forget))
        async with replace(exact, data=tmp_path / name).node(draft, m=None if draft is None else 4) as node:
            tiers = node.storage.tiers
            for restorer in node.storage.restorers.values():
                restorer._compute_seconds = lambda tokens: 60.0  # loading is worth it, however busy this machine is
            tiers.others = Others(ObjectStoreClient(channel), partial(tiers.host.pin, use=False))
            answers = [await read(node, request) for request in requests]
            await asyncio.to_thread(tiers.settle)
            await tiers.others.sent()
            return answers, node.storage.restorers["target"].restored, tiers.others.stats().hits

    async def main() -> None:
        async with AsyncExitStack() as stack:
            held = Tiers(HostTier(64 << 20, staging_bytes=8 << 20), None, None)
            held.start()
            stack.push_async_callback(held.stop)
            objects = Shared(held)
            server = await stack.enter_async_context(
                serve_grpc(
                    services=(ObjectStoreService(objects),), files=certs.files(tmp_path / "certs", "mlc"),
                    access=Access.of(verifiers=(bases["verifier"],)),
                )
            )  # fmt: skip
            files = certs.files(tmp_path / "certs", "verifier")
            channel = await stack.enter_async_context(Channel(server.address, files))
            cold, restored, hits = await verifier("a", channel)
            assert (restored, hits) == (0, 0)
            again, restored, hits = await verifier("b", channel)
            assert again == cold
            assert restored > 0
            assert hits >= restored
            assert set(objects.kinds) == {"target_kv"} | ({"prefix_kv"} if draft else set())
            assert held.host.stats().pinned_bytes == 0

    asyncio.run(main())
