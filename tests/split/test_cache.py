"""The cache role over gRPC: objects in pieces, batches, leases, scopes, limits, and readers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest

from sdcp_mono import certs
from sdcp_mono.cache.leases import MAX_LEASES
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.objects import RoutedObjects
from sdcp_mono.core.ports import Got, ObjectStore, RowsProblem
from sdcp_mono.core.problems import (
    Conflict,
    Forbidden,
    Malformed,
    OverQuota,
    TooLarge,
    TooManyRequests,
    Unavailable,
    Unprocessable,
)
from sdcp_mono.grpc import cache_service
from sdcp_mono.grpc.cache_client import GrpcRows, ObjectStoreClient
from sdcp_mono.grpc.cache_service import MANY, MAX_OBJECT, PIECE, ObjectStoreService
from sdcp_mono.grpc.pb import sdcp_pb2 as pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc

SCOPE, OTHER = bytes(range(16)), bytes(16)


def named(name: str, kind: str = "prompt", scope: bytes | None = SCOPE) -> str:
    return f"mlc://local/{'-' if scope is None else scope.hex()}/{kind}/{name}"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store:
    """A cache role, and clients with the certificates of other roles."""

    def __init__(self, capacity: int) -> None:
        self.clock = Clock()
        self.memory = MemoryObjects(capacity, clock=self.clock, scope_percent=75)
        self.objects = RoutedObjects(self.memory, clock=self.clock)
        self.service = ObjectStoreService(self.objects)
        self.began, self.left = asyncio.Event(), asyncio.Event()

    def listen(self) -> None:
        """Tell when a reader has come, and when it has gone."""
        reading = self.objects.reading

        @asynccontextmanager
        async def heard(*wanted: Any) -> AsyncIterator[bytes | None]:
            self.began.set()
            try:
                async with reading(*wanted) as value:
                    yield value
            finally:
                self.left.set()

        self.objects.reading = heard  # type: ignore[method-assign]


@pytest.fixture
def opened(kit: Any) -> Any:
    @asynccontextmanager
    async def store(capacity: int = 1 << 20) -> AsyncIterator[tuple[Store, ObjectStoreClient, ObjectStoreClient]]:
        """With clients of a drafter, who writes, and a verifier, who reads."""
        made = Store(capacity)
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(kit.server(made.service, role="mlc"))
            drafter, verifier = [
                ObjectStoreClient(await stack.enter_async_context(kit.channel(server, role)))
                for role in ("drafter", "verifier")
            ]
            yield made, drafter, verifier

    return store


def test_the_client_is_an_object_store(kit: Any, opened: Any) -> None:
    async def test() -> None:
        async with opened() as (store, drafter, verifier):
            port: ObjectStore = drafter
            meta = await port.put(named("a"), b"0123456789", ttl_ms=60_000)
            assert (meta.uri, meta.size) == (named("a"), 10)
            with pytest.raises(Conflict):
                await verifier.put(named("a"), b"other")
            assert await verifier.get(named("a"), SCOPE) == b"0123456789"
            assert await verifier.head(named("a"), SCOPE) == meta
            ranges = [(0, 4), (7, 99), (10, 20), (4, 4)]
            parts = [await verifier.get_range(named("a"), SCOPE, *r) for r in ranges]
            assert parts == [b"0123", b"789", b"", b""]
            with pytest.raises(TooLarge):
                await verifier.get(named("a"), SCOPE, limit=9)
            await drafter.put(named("empty"), b"")
            assert await verifier.get(named("empty"), SCOPE) == b""
            await verifier.delete(named("a"))
            assert await drafter.get(named("a"), SCOPE) is None
            assert store.memory.used_bytes == 0
            with pytest.raises(Malformed, match="MLC URI"):
                await drafter.put("https://elsewhere/", b"")
            with pytest.raises(Unprocessable, match="ttl_ms"):
                await drafter.put(named("b"), b"", ttl_ms=10**9)

    kit.run(test())


def test_another_scope_and_a_missing_object_look_alike(kit: Any, opened: Any) -> None:
    async def test() -> None:
        async with opened() as (_, drafter, verifier):
            await drafter.put(named("a"), b"value")
            for uri, scope in (
                (named("a"), OTHER),
                (named("a"), None),
                (named("a", scope=OTHER), OTHER),
                (named("b"), SCOPE),
                ("no uri", SCOPE),
            ):
                assert await verifier.get(uri, scope) is None
                assert await verifier.get_range(uri, scope, 0, 5) is None
                assert await verifier.head(uri, scope) is None
                assert await verifier.get_many((uri,), scope) == (Got("missing"),)
            for uri in (named("a", scope=OTHER), named("a", scope=None), named("b"), "no uri"):
                assert await verifier.lease(uri, 1000) is None
                assert await verifier.renew(uri, "x", 1000) is None
                await verifier.unlease(uri, "x")

    kit.run(test())


def test_a_batch_answers_each_object_by_itself(kit: Any, opened: Any) -> None:
    async def test() -> None:
        async with opened(64 << 20) as (store, drafter, verifier):
            large = bytes(range(256)) * (5 * PIECE // 512)  # two pieces and a half
            await drafter.put(named("a"), b"abc")
            await drafter.put(named("large"), large)
            await drafter.put(named("empty"), b"")
            get = store.objects.get

            async def failing(uri: str, scope: bytes | None) -> Any:
                if uri.endswith("broken"):
                    raise Unavailable("the bucket does not answer")
                return await get(uri, scope)

            store.objects.get = failing  # type: ignore[method-assign]
            uris = [named(name) for name in ("a", "none", "large", "broken", "empty")]
            answers = [Got("ok", b"abc"), Got("missing"), Got("ok", large), Got("failed"), Got("ok", b"")]
            assert list(await verifier.get_many(uris, SCOPE)) == answers
            assert await verifier.get_many((), SCOPE) == ()
            many = [named("a")] * (MANY + 1)
            assert {got.status for got in await verifier.get_many(many[:MANY], SCOPE)} == {"ok"}
            with pytest.raises(TooLarge, match="uris"):
                await verifier.get_many(many, SCOPE)

    kit.run(test())


def test_leases_have_holders_and_are_counted_when_they_run_out(kit: Any, opened: Any) -> None:
    async def test() -> None:
        async with opened() as (store, drafter, verifier):
            await drafter.put(named("a", "q_rows"), b"value")
            lease = await drafter.lease(named("a", "q_rows"), 5000, "round 5")
            assert lease is not None
            await verifier.delete(named("a", "q_rows"))
            assert await verifier.get(named("a", "q_rows"), SCOPE) == b"value"
            store.clock.now += 4
            renewed = await drafter.renew(named("a", "q_rows"), lease.lease_id, 5000)
            assert renewed is not None
            store.clock.now += 4
            assert await verifier.get(named("a", "q_rows"), SCOPE) == b"value"
            store.clock.now += 1
            assert await verifier.get(named("a", "q_rows"), SCOPE) is None
            assert await drafter.renew(named("a", "q_rows"), lease.lease_id, 5000) is None
            assert store.objects.forced() == {kit.BASES["drafter"]: 1}
            await drafter.put(named("b"), b"value")
            for _ in range(MAX_LEASES):
                assert await verifier.lease(named("b"), 5000) is not None
            with pytest.raises(TooManyRequests):
                await verifier.lease(named("b"), 5000)

    kit.run(test())


def test_a_scope_beyond_its_share_is_told_and_nobody_else_is(kit: Any, opened: Any) -> None:
    async def test() -> None:
        async with opened(1000) as (_, drafter, _):
            await drafter.put(named("a"), bytes(750))
            with pytest.raises(OverQuota) as refused:
                await drafter.put(named("b"), b"x")
            assert (refused.value.field, refused.value.retry_after_ms) == ("scope_bytes", 1000)
            await drafter.put(named("b", scope=OTHER), bytes(250))
            with pytest.raises(Unavailable) as full:
                await drafter.put(named("c", scope=None), b"x")
            assert type(full.value) is Unavailable

    kit.run(test())


def test_a_large_object_comes_in_pieces_both_ways(kit: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with opened(256 << 20) as (store, drafter, verifier):
            large = bytes(range(256)) * (MAX_OBJECT // 256)
            await drafter.put(named("a"), large)
            assert await verifier.get(named("a"), SCOPE) == large
            assert await verifier.get_range(named("a"), SCOPE, PIECE - 5, 3 * PIECE) == large[PIECE - 5 : 3 * PIECE]
            with pytest.raises(TooLarge, match="size"):
                await drafter.put(named("b"), large + b"x")

            async def announced() -> AsyncIterator[pb.PutPart]:
                yield pb.PutPart(header=pb.PutHeader(uri=named("b"), size=MAX_OBJECT + 1))

            with pytest.raises(TooLarge, match="size"):
                await drafter._channel.call(rpc.ObjectStoreStub, "Put", announced(), 10)
            monkeypatch.setattr(cache_service, "RECEIVING", 10)
            with pytest.raises(Unavailable, match="received") as busy:
                await drafter.put(named("c"), bytes(11))
            assert busy.value.retry_after_ms == 1000
            assert store.service._receiving == 0

    kit.run(test())


@pytest.mark.parametrize("sent", [0, 2, 4])
def test_an_object_that_is_not_as_announced_is_not_stored(kit: Any, opened: Any, sent: int) -> None:
    async def test() -> None:
        async with opened() as (store, drafter, _):

            async def parts() -> AsyncIterator[pb.PutPart]:
                yield pb.PutPart(header=pb.PutHeader(uri=named("a"), size=3))
                yield pb.PutPart(data=bytes(sent))

            with pytest.raises(Malformed, match="size"):
                await drafter._channel.call(rpc.ObjectStoreStub, "Put", parts(), 10)
            assert store.memory.used_bytes == store.service._receiving == 0

    kit.run(test())


def test_c_45_a_read_that_is_cancelled_gives_its_room_back(kit: Any, opened: Any) -> None:
    async def test() -> None:
        async with opened(64 << 20) as (store, drafter, verifier):
            size = 40 << 20
            await drafter.put(named("a"), bytes(size))
            store.listen()
            request = pb.GetRequest(uri=named("a"), scope=SCOPE)
            async with aclosing(verifier._stream("Get", request)) as pieces:
                assert (await anext(pieces)).got.size == size
                await store.began.wait()
                await drafter.delete(named("a"))
                assert store.memory.used_bytes == size  # on its way, though it is deleted
                with pytest.raises(Unavailable):
                    await drafter.put(named("a"), bytes(size))
            await store.left.wait()
            assert store.memory.used_bytes == 0

    kit.run(test())


def test_section_9_objects_are_for_the_roles_of_a_session(kit: Any, opened: Any) -> None:
    async def test() -> None:
        base = "https://127.0.0.1/stranger/"
        certs.init(kit.work / "more", roles={"stranger": base}, ca=kit.directory)
        store = Store(1000)
        async with (
            kit.server(store.service, role="mlc") as server,
            kit.channel(server, "stranger", files=certs.files(kit.work / "more", "stranger")) as channel,
        ):
            stranger = ObjectStoreClient(channel)
            for call in (
                stranger.put(named("a"), b""), stranger.get(named("a"), SCOPE), stranger.head(named("a"), SCOPE),
                stranger.get_range(named("a"), SCOPE, 0, 1), stranger.get_many((named("a"),), SCOPE),
                stranger.lease(named("a"), 1), stranger.renew(named("a"), "x", 1), stranger.unlease(named("a"), "x"),
                stranger.delete(named("a")),
            ):  # fmt: skip
                with pytest.raises(Forbidden):
                    await call

    kit.run(test())


def test_sdcp_072_rows_over_the_wire_are_checked_whole(kit: Any, opened: Any) -> None:
    """M * V binary32, little-endian, rows in order (AMB-133, 134, 137): by the reader, once, before use."""

    async def test() -> None:
        async with opened() as (_, drafter, verifier):
            writer = GrpcRows(drafter, "local", kit.VOCAB, kit.rows_from_bytes)
            reader = GrpcRows(verifier, "local", kit.VOCAB, kit.rows_from_bytes)
            even = [1 / kit.VOCAB] * kit.VOCAB
            good = await writer.publish(kit.toy.ToyRows([even, even]), SCOPE)
            assert len((await reader.fetch(good, (5, 6), SCOPE)).rows) == 2
            sharp = [0.0] * 63 + [1.0]
            zero = await writer.publish(kit.toy.ToyRows([even, sharp]), SCOPE)
            for uri, tokens, scope, unavailable in (
                (good, (5,), SCOPE, False),  # more than was drawn
                (good, (5, 6, 7), SCOPE, True),  # cut off
                (good, (5, 6), OTHER, True),
                (zero, (5, 6), SCOPE, False),  # q(x) = 0
                (named("a", "q_rows"), (5,), SCOPE, True),
                (named("a", "prompt"), (5,), SCOPE, True),
                ("mlc://other/-/q_rows/a", (5,), None, True),
                ("https://127.0.0.1/", (5,), None, True),
            ):
                with pytest.raises(RowsProblem) as refused:
                    await reader.fetch(uri, tokens, scope)
                assert refused.value.unavailable is unavailable, (uri, tokens)
            await reader.release(good)  # not the reader's to release
            assert len((await reader.fetch(good, (5, 6), SCOPE)).rows) == 2
            await writer.release(good)
            with pytest.raises(RowsProblem):
                await reader.fetch(good, (5, 6), SCOPE)

    kit.run(test())
