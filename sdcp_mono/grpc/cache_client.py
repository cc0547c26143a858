"""Clients of the cache role: objects, commit logs, and draft rows (section 8, AMB-137 to 139, 150)."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.names import SHORT_TTL_MS, MlcUri
from sdcp_mono.core.ports import AppendOutcome, ByteSource, Got, Lease, LogAppend, ObjectMeta, RowsProblem
from sdcp_mono.core.problems import Malformed, Refusal, TooLarge, Unavailable
from sdcp_mono.grpc.cache_service import MAX_OBJECT, PIECE
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.grpc.client import CALL_SECONDS, read_answer
from sdcp_mono.grpc.convert import record_from_pb, to_pb
from sdcp_mono.grpc.pb import sdcp_pb2 as pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc

OBJECT_SECONDS: Final = 30.0
FETCH_SECONDS: Final = 2.0  # of draft rows; a round waits for them (AMB-138)
MAX_LOG: Final = 64 * 2**20  # octets: 64 Ki rounds of a thousand
ROWS: Final = "q_rows"
PUBLISHED: Final = 4096  # rows remembered until they are released; older ones have ended by themselves

_OUTCOMES: Final[Mapping[int, AppendOutcome]] = {pb.APPEND_OUTCOME_OK: "ok", pb.APPEND_OUTCOME_FENCED: "fenced"}


class ObjectStoreClient:
    """``ObjectStore``. A lease's ``expires_ms`` is on this machine's monotonic clock."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def put(self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None) -> ObjectMeta:
        body = value if isinstance(value, bytes) else value.to_bytes()
        if len(body) > MAX_OBJECT:  # said by the server too, but a refusal gets lost under what is still being sent
            raise TooLarge(f"size: more than {MAX_OBJECT} octets")

        async def parts() -> AsyncIterator[pb.PutPart]:
            yield pb.PutPart(header=pb.PutHeader(uri=uri, size=len(body), ttl_ms=ttl_ms))
            for at in range(0, len(body), PIECE):
                yield pb.PutPart(data=body[at : at + PIECE])

        return read_answer(ObjectMeta, await self._call("Put", parts(), OBJECT_SECONDS))

    async def get(
        self, uri: str, scope: bytes | None, *, limit: int = MAX_OBJECT, seconds: float = OBJECT_SECONDS
    ) -> bytes | None:
        """As in the port; raises ``TooLarge`` beyond ``limit`` octets before it has accepted any."""
        return await self._one("Get", pb.GetRequest(uri=uri, scope=scope), limit, seconds)

    async def get_range(self, uri: str, scope: bytes | None, start: int, stop: int) -> bytes | None:
        request = pb.GetRangeRequest(uri=uri, scope=scope, start=start, stop=stop)
        return await self._one("GetRange", request, max(0, stop - start), OBJECT_SECONDS)

    async def get_many(self, uris: Sequence[str], scope: bytes | None) -> Sequence[Got]:
        """What arrived before the connection was lost is good; the rest has failed."""
        if not uris:
            return ()
        answers: list[Got] = []
        try:
            async with aclosing(self._stream("GetMany", pb.GetManyRequest(uris=uris, scope=scope))) as parts:  # type: ignore[type-var]
                while len(answers) < len(uris):
                    answers.append(await _got(parts, MAX_OBJECT))
        except Unavailable:
            answers += [Got("failed")] * (len(uris) - len(answers))
        return tuple(answers)

    async def head(self, uri: str, scope: bytes | None) -> ObjectMeta | None:
        reply = await self._call("Head", pb.GetRequest(uri=uri, scope=scope))
        return read_answer(ObjectMeta, reply.meta) if reply.HasField("meta") else None

    async def lease(self, uri: str, ttl_ms: int, holder: str = "") -> Lease | None:
        return await self._lease("Lease", pb.LeaseRequest(uri=uri, ttl_ms=ttl_ms, holder=holder), ttl_ms)

    async def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None:
        return await self._lease("Renew", pb.RenewRequest(uri=uri, lease_id=lease_id, ttl_ms=ttl_ms), ttl_ms)

    async def unlease(self, uri: str, lease_id: str) -> None:
        await self._call("Unlease", pb.UnleaseRequest(uri=uri, lease_id=lease_id))

    async def delete(self, uri: str) -> None:
        await self._call("Delete", pb.DeleteRequest(uri=uri))

    async def _lease(self, method: str, request: Any, ttl_ms: int) -> Lease | None:
        asked = time.monotonic()  # it lasts no shorter there than it seems here
        reply = await self._call(method, request)
        return Lease(reply.lease_id, int(1000 * asked) + ttl_ms) if reply.HasField("lease_id") else None

    async def _one(self, method: str, request: Any, limit: int, seconds: float) -> bytes | None:
        async with aclosing(self._stream(method, request, seconds)) as parts:  # type: ignore[type-var]
            value = (await _got(parts, limit)).value
            assert value is None or isinstance(value, bytes)
            return value

    async def _call(self, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
        return await self._channel.call(rpc.ObjectStoreStub, method, request, seconds)

    def _stream(self, method: str, request: Any, seconds: float = OBJECT_SECONDS) -> AsyncIterator[pb.GetPart]:
        return self._channel.stream(rpc.ObjectStoreStub, method, request, seconds)


async def _got(parts: AsyncIterator[pb.GetPart], limit: int) -> Got:
    """The next object of an answer; raises ``TooLarge``, or ``Unavailable`` for one that ends early."""
    first = await anext(parts, None)
    if first is None or first.WhichOneof("part") != "got":
        raise Unavailable("the answer ends before its objects do")
    size = first.got.size
    if first.got.status != pb.GOT_STATUS_OK:
        return Got("missing" if first.got.status == pb.GOT_STATUS_MISSING else "failed")
    if size > limit:
        raise TooLarge(f"the object has {size} octets, {limit} are accepted")
    body = bytearray()
    while len(body) < size:
        part = await anext(parts, None)
        if part is None or not part.data or len(body) + len(part.data) > size:
            raise Unavailable(f"{size} octets were announced and others came")
        body += part.data
    return Got("ok", bytes(body))


class CommitLogClient:
    """``CommitLog``, with ``names`` besides."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def create(self, log: str) -> None:
        await self._call("Create", pb.LogName(log=log))

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        """All in one call and one transaction; "unknown" for each if no answer came."""
        if not appends:
            return ()
        request = pb.AppendRequest(appends=[to_pb(append) for append in appends])
        lost: list[AppendOutcome] = ["unknown"] * len(appends)
        try:
            reply = await self._call("Append", request)
        except Unavailable:
            return lost
        outcomes: tuple[AppendOutcome, ...] = tuple(_OUTCOMES.get(outcome, "unknown") for outcome in reply.outcomes)
        return outcomes if len(outcomes) == len(appends) else lost

    async def fence(self, log: str, epoch: int) -> bool:
        reply = await self._call("Fence", pb.FenceRequest(log=log, epoch=epoch))
        return bool(reply.fenced)

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]:
        """Whole or not at all: to resume from a part of a log would repeat its output."""
        records: list[CommitRecord | FenceRecord] = []
        size = 0
        request = pb.ReadLogRequest(log=log, from_=from_)
        async with aclosing(self._stream("Read", request)) as pages:  # type: ignore[type-var]
            async for page in pages:
                size += page.ByteSize()
                if size > MAX_LOG:
                    raise TooLarge(f"log: more than {MAX_LOG} octets")
                try:
                    records.extend(map(record_from_pb, page.records))
                except Malformed as refusal:
                    raise Unavailable(f"the log can't be read: {refusal.detail}") from refusal
        return tuple(records)

    async def drop(self, log: str) -> None:
        await self._call("Drop", pb.LogName(log=log))

    async def names(self) -> Sequence[str]:
        """Every log, in the order of creation."""
        async with aclosing(self._stream("Names", pb.Nothing())) as pages:  # type: ignore[type-var]
            return tuple([name async for page in pages for name in page.names])

    async def _call(self, method: str, request: Any) -> Any:
        return await self._channel.call(rpc.CommitLogStub, method, request, CALL_SECONDS)

    def _stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        return self._channel.stream(rpc.CommitLogStub, method, request, OBJECT_SECONDS)


class RowsFromBytes(Protocol):
    """Makes the runner's rows of M * V little-endian binary32 and checks them; raises ``RowsProblem``."""

    def __call__(self, data: bytes, tokens: tuple[int, ...]) -> Any: ...


class GrpcRows:
    """``RowSource`` over the cache role that calls itself ``authority``.

    Octets are fetched once, whole, within 2 s, and none of more than M * V * 4 (AMB-134, 138, 139). The object's short
    TTL stands for its lease, so giving it up is deleting it.
    """

    def __init__(
        self, objects: ObjectStoreClient, authority: str, vocab_size: int, rows_from_bytes: RowsFromBytes
    ) -> None:
        self._objects = objects
        self._authority = authority
        self._vocab_size = vocab_size
        self._rows_from_bytes = rows_from_bytes
        self._published: OrderedDict[str, None] = OrderedDict()

    async def publish(self, rows: Any, scope: bytes | None) -> str:
        uri = str(MlcUri(self._authority, scope, ROWS, secrets.token_hex(16)))
        await self._objects.put(uri, rows, ttl_ms=SHORT_TTL_MS)
        self._published[uri] = None
        if len(self._published) > PUBLISHED:
            self._published.popitem(last=False)
        return uri

    async def fetch(self, uri: str, tokens: tuple[int, ...], scope: bytes | None) -> Any:
        try:
            name = MlcUri.parse(uri)
        except Malformed as error:
            raise RowsProblem(f"q_rows is not an MLC URI: {error}", unavailable=True) from error
        if name.authority != self._authority or name.kind != ROWS:
            raise RowsProblem("q_rows does not name draft rows of the cache that is used here", unavailable=True)
        size = len(tokens) * self._vocab_size * 4
        try:
            data = await self._objects.get(uri, scope, limit=size, seconds=FETCH_SECONDS)
        except TooLarge as error:
            problem = f"q_rows: more than the {size} octets of {len(tokens)} rows"
            raise RowsProblem(problem, unavailable=False) from error
        except Refusal as refusal:
            raise RowsProblem(f"q_rows: {refusal.detail}", unavailable=True) from refusal
        if data is None:
            raise RowsProblem("q_rows names rows that are not there", unavailable=True)
        return self._rows_from_bytes(data, tokens)

    async def release(self, uri: str) -> None:
        if uri not in self._published:
            return
        del self._published[uri]
        try:
            await self._objects.delete(uri)
        except Refusal:
            return  # it ends by itself
