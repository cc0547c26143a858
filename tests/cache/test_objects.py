"""The objects of an MLC by kind: where each goes, and what a scope, a lease or a failure below means there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.cache.blob import HEADER_BYTES, Blob, pack
from sdcp_mono.cache.disk import DiskTier
from sdcp_mono.cache.host import HostTier
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.objects import LONGEST_MS, OCTETS, RoutedObjects
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.compose.storage import Tiered
from sdcp_mono.core.names import SHORT_TTL_MS
from sdcp_mono.core.ports import Got, ServedObjects
from sdcp_mono.core.problems import Conflict, OverQuota, Unavailable
from sdcp_mono.settings import TierSettings

SCOPE, OTHER = bytes(range(16)), bytes(16)
SIZE = 8192
KV = ("target_kv", "prompt_kv", "prefix_kv")
SHORT = ("q_rows", "draft_kv")
ELSE = ("prompt", "tokens", "anything")


def named(kind: str, name: str = "a", scope: bytes | None = SCOPE) -> str:
    return f"mlc://local/{'-' if scope is None else scope.hex()}/{kind}/{name}"


def packed(uri: str, size: int = SIZE) -> bytes:
    return pack(Blob(uri, size, "bfloat16", (size // 2,)), bytes(size))


class World:
    """Memory, host memory, a disk, and a bucket that is memory too but fails when told to."""

    def __init__(self, clock: Any, tiers: Tiers | None, shared: bool) -> None:
        self.memory = MemoryObjects(1 << 20, clock=clock, scope_percent=50)
        self.tiers = tiers
        self.bucket = Bucket(1 << 20, clock=clock)
        self.objects = RoutedObjects(self.memory, tiers, self.bucket if shared else None, clock=clock)

    def places(self, uri: str) -> set[str]:
        """Where an object is now."""
        key = Blob(uri, 0).key
        here = {
            "memory": uri in self.memory._objects, "bucket": uri in self.bucket._objects,
            "host": self.tiers is not None and key in self.tiers.host,
            "disk": self.tiers is not None and self.tiers.disk is not None and self.tiers.disk.find(key) is not None,
        }  # fmt: skip
        return {name for name, there in here.items() if there}


class Bucket(MemoryObjects):
    broken = False

    async def put(self, *given: Any, **named: Any) -> Any:
        self._fail()
        return await super().put(*given, **named)

    async def get(self, *given: Any) -> Any:
        self._fail()
        return await super().get(*given)

    def _fail(self) -> None:
        if self.broken:
            raise Unavailable("the bucket does not answer")


@pytest.fixture
def world(tmp_path: Path, clock: Any) -> Any:
    @asynccontextmanager
    async def opened(*, tiered: bool = True, shared: bool = True, blocks: int = 16) -> AsyncIterator[World]:
        if not tiered:
            yield World(clock, None, shared)
            return
        host = HostTier(blocks * slot_bytes(SIZE), staging_bytes=4 * slot_bytes(SIZE))
        tiers = Tiers(host, DiskTier(tmp_path / "kv", 1 << 22, floor_bytes=0), None)
        tiers.start()
        try:
            yield World(clock, tiers, shared)
        finally:
            await tiers.stop()

    return opened


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tiered", [True, False])
def test_each_kind_goes_where_it_belongs(world: Any, tiered: bool, shared: bool) -> None:
    """Section 8 and design 5.6: draft artifacts stay in memory, KV has the tiers, the rest is shared if it can be."""

    async def test() -> None:
        async with world(tiered=tiered, shared=shared) as w:
            copy = {"bucket"} if shared else set()
            for kind in (*SHORT, *KV, *ELSE):
                await w.objects.put(named(kind), packed(named(kind)))
            if tiered:
                await asyncio.to_thread(w.tiers.flush)
            for kind in SHORT:
                assert w.places(named(kind)) == {"memory"}, kind
            for kind in KV:
                assert w.places(named(kind)) == ({"disk"} | copy if tiered else {"memory"}), kind
            for kind in ELSE:
                assert w.places(named(kind)) == {"memory"} | copy, kind

    run(test())


def test_every_kind_answers_alike(world: Any) -> None:
    """One contract over memory and tiers: once, whole, in parts, many, and nothing for another scope."""

    async def test() -> None:
        async with world() as w:
            store: ServedObjects = w.objects
            for kind in (*SHORT, *KV, *ELSE):
                uri, value = named(kind), packed(named(kind))
                meta = await store.put(uri, value)
                assert (meta.uri, meta.size) == (uri, len(value))
                with pytest.raises(Conflict):
                    await store.put(uri, value)
                assert await store.get(uri, SCOPE) == value
                assert await store.head(uri, SCOPE) == meta
                assert await store.get_range(uri, SCOPE, 4000, 4200) == value[4000:4200]
                assert await store.get_range(uri, SCOPE, len(value), 9**9) == b""
                async with store.reading(uri, SCOPE) as read:
                    assert read == value
                lease = await store.lease(uri, 1000, "https://reader/")
                assert lease is not None
                assert await store.renew(uri, lease.lease_id, 1000) is not None
                await store.unlease(uri, lease.lease_id)
                assert await store.renew(uri, lease.lease_id, 1000) is None
                for wrong, scope in ((uri, OTHER), (uri, None), (named(kind, "b"), SCOPE), ("no uri", SCOPE)):
                    assert await store.get(wrong, scope) is None
                    assert await store.head(wrong, scope) is None
                    assert await store.get_range(wrong, scope, 0, 1) is None
                    assert await store.get_many((wrong,), scope) == [Got("missing")]
                    async with store.reading(wrong, scope) as read:
                        assert read is None
                for wrong in (named(kind, scope=OTHER), named(kind, scope=None), named(kind, "b"), "no uri"):
                    assert await store.lease(wrong, 1000) is None
                    assert await store.renew(wrong, "x", 1000) is None
                assert await store.get_many((named(kind, "b"), uri), SCOPE) == [Got("missing"), Got("ok", value)]
                await store.delete(uri)
                assert w.places(uri) == set()
                assert await store.get(uri, SCOPE) is None

    run(test())


# ---- short-lived kinds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHORT)
def test_draft_artifacts_live_shortly_unless_leased(world: Any, clock: Any, kind: str) -> None:
    async def test() -> None:
        async with world(tiered=False) as w:
            await w.objects.put(named(kind, "a"), b"x")
            await w.objects.put(named(kind, "b"), b"x", ttl_ms=24 * 3600 * 1000)
            await w.objects.put(named("prompt"), b"x")
            clock.pass_ms(SHORT_TTL_MS - 1)
            assert await w.objects.lease(named(kind, "a"), 5000) is not None
            clock.pass_ms(4999)
            assert await w.objects.get(named(kind, "a"), SCOPE) == b"x"
            clock.pass_ms(1)
            assert await w.objects.get(named(kind, "a"), SCOPE) is None
            assert await w.objects.get(named(kind, "b"), SCOPE) == b"x"
            clock.pass_ms(LONGEST_MS)
            assert await w.objects.get(named(kind, "b"), SCOPE) is None
            assert await w.objects.get(named("prompt"), SCOPE) == b"x"

    run(test())


def test_rows_are_handed_out_as_they_are(world: Any) -> None:
    """Section 5, point 4 of the issue: in one process a reference, never a copy."""

    class Rows:
        nbytes = 8

        def to_bytes(self) -> bytes:
            raise AssertionError("nothing left the process")

    async def test() -> None:
        async with world() as w:
            rows = Rows()
            await w.objects.put(named("q_rows"), rows)
            assert await w.objects.get(named("q_rows"), SCOPE) is rows

    run(test())


# ---- KV --------------------------------------------------------------------------------------------------------------


def test_kv_of_another_format_is_kept_whole(world: Any) -> None:
    """Opaque objects (draft, 1.4): bytes that aren't our blob come back as they were, from disk too."""

    async def test() -> None:
        async with world(shared=False) as w:
            uri, fake = named("target_kv"), named("target_kv", "fake")
            forged = pack(Blob(fake, 5, OCTETS, (5,)), b"inner")  # says of itself what only the store may say
            for name, value in ((uri, b"another engine's KV"), (fake, forged)):
                meta = await w.objects.put(name, value)
                await asyncio.to_thread(w.tiers.flush)
                assert w.places(name) == {"disk"}
                assert await w.objects.get(name, SCOPE) == value
                assert (await w.objects.head(name, SCOPE), meta.size) == (meta, len(value))

    run(test())


def test_a_lease_pins_kv_and_a_delete_waits_for_it(world: Any, clock: Any) -> None:
    async def test() -> None:
        async with world(shared=False) as w:
            uri = named("target_kv")
            await w.objects.put(uri, packed(uri))
            await asyncio.to_thread(w.tiers.flush)
            lease = await w.objects.lease(uri, 1000, "https://reader/ resume")  # brings it back up
            assert lease is not None
            await asyncio.to_thread(w.tiers.flush)
            assert "host" in w.places(uri)
            await w.objects.delete(uri)
            assert await w.objects.get(uri, SCOPE) == packed(uri)
            clock.pass_ms(1000)
            assert await w.objects.head(uri, SCOPE) is None
            assert (w.places(uri), w.tiers.host.stats().pinned_bytes) == (set(), 0)
            assert w.objects.forced() == {"https://reader/": 1}
            assert w.objects.counts()["forced"] == 1

    run(test())


def test_leases_pin_a_part_of_host_memory_only(world: Any, clock: Any) -> None:
    async def test() -> None:
        async with world(shared=False, blocks=8) as w:
            uris = [named("target_kv", f"{number}") for number in range(4)]
            for uri in uris:
                await w.objects.put(uri, packed(uri))
            for uri in uris[:2]:
                assert await w.objects.lease(uri, 1000) is not None
            with pytest.raises(Unavailable, match="a quarter"):
                await w.objects.lease(uris[2], 1000)
            clock.pass_ms(1000)
            assert await w.objects.lease(uris[2], 1000) is not None
            host = w.tiers.host.stats()
            assert host.pinned_bytes == slot_bytes(SIZE)

    run(test())


def test_without_tiers_kv_leaves_room_for_rows(world: Any, clock: Any) -> None:
    """Nothing is evicted from memory, so KV may take half of it, and for a while only."""

    async def test() -> None:
        async with world(tiered=False, shared=False) as w:
            half = (1 << 19) - HEADER_BYTES
            uri = named("target_kv", scope=None)
            await w.objects.put(uri, packed(uri, half))
            with pytest.raises(Unavailable, match="kv_host_mb"):
                await w.objects.put(named("target_kv", "b"), b"x")
            await w.objects.put(named("q_rows"), bytes(1 << 19))
            clock.pass_ms(600_000)
            await w.objects.put(named("target_kv", "b"), b"x")
            assert w.places(uri) == set()

    run(test())


def test_decision_7_a_draft_models_prefix_is_neither_target_kv_nor_draft_kv() -> None:
    """What its blocks are called, and that this kind reaches the tiers."""

    class Blocks:
        kv_dtype, block_bytes, on_gpu = "float32", SIZE, False

    async def test() -> None:
        models: Any = {"target": Blocks(), "model:small": Blocks()}
        tiered = Tiered(TierSettings(kv_host_mb=1, kv_disk_mb=0), models, None)
        assert tiered.tiers is not None
        tiered.tiers.start()
        try:
            for cache in tiered._caches.values():
                assert cache.offer(b"k" * 32, None, memoryview(bytes(SIZE)), lambda: None)
            assert await asyncio.to_thread(tiered.tiers.settle)
            for kind, there in (("target_kv", True), ("prefix_kv", True), ("draft_kv", False)):
                assert tiered.tiers.contains(f"mlc://local/-/{kind}/{(b'k' * 32).hex()}") is there
        finally:
            await tiered.tiers.stop()

    run(test())


# ---- a bucket below --------------------------------------------------------------------------------------------------


def test_what_is_shared_is_found_by_another_process(world: Any, clock: Any) -> None:
    async def test() -> None:
        async with world() as w:
            for kind in (*SHORT, *KV, *ELSE):
                await w.objects.put(named(kind), packed(named(kind)))
            other = RoutedObjects(MemoryObjects(1 << 20, clock=clock), None, w.bucket, clock=clock)
            for kind in SHORT:
                assert await other.get(named(kind), SCOPE) is None
            for kind in (*KV, *ELSE):
                value = packed(named(kind))
                assert await other.get(named(kind), SCOPE) == value
                assert await other.get(named(kind), OTHER) is None
                assert await other.get_range(named(kind), SCOPE, 0, 5) == value[:5]
                meta = await other.head(named(kind), SCOPE)
                assert meta is not None
                assert meta.size == len(value)
                async with other.reading(named(kind), SCOPE) as read:
                    assert read == value
                lease = await other.lease(named(kind), 1000)
                assert lease is not None
                assert await other.renew(named(kind), lease.lease_id, 1000) is not None
            for kind in KV:  # the way up to the tiers
                w.tiers.drop(named(kind))
                assert await w.objects.get(named(kind), SCOPE) == packed(named(kind))
                assert "host" in w.places(named(kind))

    run(test())


def test_a_bucket_that_fails_is_a_miss_for_kv_and_a_failure_for_the_rest(world: Any) -> None:
    """Section 5.2: a status, never a wrong answer; KV can be computed again, a prompt can't."""

    async def test() -> None:
        async with world() as w:
            w.bucket.broken = True
            await w.objects.put(named("target_kv"), packed(named("target_kv")))
            assert await w.objects.get(named("target_kv"), SCOPE) is not None
            assert await w.objects.get(named("target_kv", "b"), SCOPE) is None
            await w.objects.put(named("q_rows"), b"x")
            with pytest.raises(Unavailable, match="does not answer"):
                await w.objects.put(named("tokens"), b"x")
            assert w.places(named("tokens")) == set()
            with pytest.raises(Unavailable):
                await w.objects.get(named("tokens"), SCOPE)
            wanted = [named(kind) for kind in ("q_rows", "tokens", "target_kv")]
            assert [got.status for got in await w.objects.get_many(wanted, SCOPE)] == ["ok", "failed", "ok"]

    run(test())


def test_full_memory_does_not_keep_what_is_shared_out(world: Any) -> None:
    async def test() -> None:
        async with world(tiered=False) as w:
            await w.objects.put(named("q_rows"), bytes(1 << 19))
            await w.objects.put(named("prompt"), b"x")
            assert w.places(named("prompt")) == {"bucket"}
            assert await w.objects.get(named("prompt"), SCOPE) == b"x"
            with pytest.raises(OverQuota):
                await w.objects.put(named("q_rows", "b"), b"x")

    run(test())
