"""The cache role's side: objects in pieces, and commit logs (``ObjectStore``, ``CommitLog``).

The scope of an object is the capability: who doesn't know it finds nothing there, and can't tell a wrong scope from a
missing object. Commit logs are for verifiers and routers; the log itself enforces epochs, so a fenced verifier can't
append, however it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import grpc

from sdcp_mono.core.ports import ByteSource, CommitLog, Lease, LogAppend, ServedObjects
from sdcp_mono.core.problems import Forbidden, Malformed, TooLarge, Unavailable
from sdcp_mono.grpc.calls import current
from sdcp_mono.grpc.convert import from_pb, octets, record_to_pb, to_pb
from sdcp_mono.grpc.pb import sdcp_pb2 as pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc

PIECE: Final = 1 << 20  # octets of an object in one message: large enough for TLS and the loop, small enough to queue
MAX_OBJECT: Final = 64 * 2**20  # octets: 64 rows of a 256k vocabulary, as much as the HTTP gateway takes
RECEIVING: Final = 256 * 2**20  # octets of objects being received at once, over all callers
PUT_SECONDS: Final = 60.0  # to send an object; a slow sender holds memory
MANY: Final = 1024  # URIs of one batch: the KV blocks of a prefix of 16 Ki tokens
AT_ONCE: Final = 16  # of them read before the first is sent, so that a batch doesn't hold all of its values
APPENDS: Final = 4096  # of one call: a round of each session of a verifier
PAGE: Final = 512 * 2**10  # octets of a log in one message

_GOT: Final = {"ok": pb.GOT_STATUS_OK, "missing": pb.GOT_STATUS_MISSING, "failed": pb.GOT_STATUS_FAILED}
_OUTCOMES: Final = {
    "ok": pb.APPEND_OUTCOME_OK, "fenced": pb.APPEND_OUTCOME_FENCED, "unknown": pb.APPEND_OUTCOME_UNKNOWN,
}  # fmt: skip


class NamedLogs(CommitLog, Protocol):
    """A ``CommitLog`` that knows its logs."""

    async def names(self) -> Sequence[str]: ...


class ObjectStoreService(rpc.ObjectStoreServicer):
    name: Final = pb.DESCRIPTOR.services_by_name["ObjectStore"].full_name

    def __init__(self, port: ServedObjects) -> None:
        self._port = port
        self._receiving = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_ObjectStoreServicer_to_server(self, server)

    async def Put(self, request_iterator: AsyncIterator[pb.PutPart], context: Any) -> Any:
        _may_use_objects()
        async with asyncio.timeout(PUT_SECONDS):
            header = await _header(request_iterator)
            with self._room(header.size):
                body = bytearray()
                async for part in request_iterator:
                    body += part.data
                    if len(body) > header.size:
                        break
                if len(body) != header.size:
                    raise Malformed(f"size: {header.size} octets were announced, not {len(body)}")
                ttl_ms = header.ttl_ms if header.HasField("ttl_ms") else None
                return to_pb(await self._port.put(header.uri, bytes(body), ttl_ms=ttl_ms))

    async def Get(self, request: pb.GetRequest, context: Any) -> AsyncIterator[Any]:
        _may_use_objects()
        async with self._port.reading(request.uri, _scope(request)) as value:  # its room is not given away meanwhile
            for part in _parts(value):
                yield part

    async def GetRange(self, request: pb.GetRangeRequest, context: Any) -> AsyncIterator[Any]:
        _may_use_objects()
        for part in _parts(await self._port.get_range(request.uri, _scope(request), request.start, request.stop)):
            yield part

    async def GetMany(self, request: pb.GetManyRequest, context: Any) -> AsyncIterator[Any]:
        _may_use_objects()
        uris, scope = list(request.uris), _scope(request)
        if len(uris) > MANY:
            raise TooLarge(f"uris: more than {MANY}")
        for at in range(0, len(uris), AT_ONCE):
            for got in await self._port.get_many(uris[at : at + AT_ONCE], scope):
                for part in _parts(got.value, got.status):
                    yield part

    async def Head(self, request: pb.GetRequest, context: Any) -> Any:
        _may_use_objects()
        meta = await self._port.head(request.uri, _scope(request))
        return pb.HeadReply(meta=None if meta is None else to_pb(meta))

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> Any:
        _may_use_objects()
        holder = f"{current().caller.uri} {request.holder}".rstrip()
        return _leased(await self._port.lease(request.uri, request.ttl_ms, holder))

    async def Renew(self, request: pb.RenewRequest, context: Any) -> Any:
        _may_use_objects()
        return _leased(await self._port.renew(request.uri, request.lease_id, request.ttl_ms))

    async def Unlease(self, request: pb.UnleaseRequest, context: Any) -> Any:
        _may_use_objects()
        await self._port.unlease(request.uri, request.lease_id)
        return pb.Nothing()

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> Any:
        _may_use_objects()
        await self._port.delete(request.uri)
        return pb.Nothing()

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """For an object that is being received."""
        if size > MAX_OBJECT:
            raise TooLarge(f"size: more than {MAX_OBJECT} octets")
        if self._receiving + size > RECEIVING:
            raise Unavailable("too many octets are being received", retry_after_ms=1000)
        self._receiving += size
        try:
            yield
        finally:
            self._receiving -= size


class CommitLogService(rpc.CommitLogServicer):
    name: Final = pb.DESCRIPTOR.services_by_name["CommitLog"].full_name

    def __init__(self, port: NamedLogs) -> None:
        self._port = port

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_CommitLogServicer_to_server(self, server)

    async def Create(self, request: pb.LogName, context: Any) -> Any:
        _may_use_logs()
        await self._port.create(request.log)
        return pb.Nothing()

    async def Append(self, request: pb.AppendRequest, context: Any) -> Any:
        current().access.verifier(current().caller)
        if len(request.appends) > APPENDS:
            raise TooLarge(f"appends: more than {APPENDS}")
        appends = [from_pb(LogAppend, append) for append in request.appends]
        outcomes = await self._port.append(appends)
        return pb.AppendReply(outcomes=[_OUTCOMES[outcome] for outcome in outcomes])

    async def Fence(self, request: pb.FenceRequest, context: Any) -> Any:
        current().access.router(current().caller)
        return pb.FenceReply(fenced=await self._port.fence(request.log, request.epoch))

    async def Read(self, request: pb.ReadLogRequest, context: Any) -> AsyncIterator[Any]:
        _may_use_logs()
        page, size = pb.LogPage(), 0
        for record in await self._port.read(request.log, request.from_):
            written = record_to_pb(record)
            page.records.append(written)
            size += written.ByteSize()
            if size >= PAGE:
                yield page
                page, size = pb.LogPage(), 0
        yield page

    async def Drop(self, request: pb.LogName, context: Any) -> Any:
        current().access.router(current().caller)
        await self._port.drop(request.log)
        return pb.Nothing()

    async def Names(self, request: pb.Nothing, context: Any) -> AsyncIterator[Any]:
        current().access.router(current().caller)
        names = await self._port.names()
        for at in range(0, len(names), 1024):
            yield pb.NamesPage(names=names[at : at + 1024])


def _may_use_objects() -> None:
    access, caller = current().access, current().caller
    if not (access.is_reader(caller) or access.drafts(caller) or caller.uri in access.verifiers):
        raise Forbidden("objects are for the roles of a session")


def _may_use_logs() -> None:
    access, caller = current().access, current().caller
    if not (caller.uri in access.routers or caller.uri in access.verifiers):
        raise Forbidden("a commit log is for verifiers and routers")


async def _header(parts: AsyncIterator[pb.PutPart]) -> pb.PutHeader:
    async for part in parts:
        if part.WhichOneof("part") == "header":
            return part.header
        break
    raise Malformed("header: missing before the octets")


def _scope(request: Any) -> bytes | None:
    return octets(request.scope, 16, "scope") if request.HasField("scope") else None


def _parts(value: bytes | ByteSource | None, status: str = "ok") -> Iterator[pb.GetPart]:
    """What is sent for one object."""
    if value is None:
        yield pb.GetPart(got=pb.Got(status=_GOT["missing" if status == "ok" else status]))
        return
    body = memoryview(value if isinstance(value, bytes) else value.to_bytes())
    yield pb.GetPart(got=pb.Got(status=_GOT[status], size=len(body)))
    for at in range(0, len(body), PIECE):
        yield pb.GetPart(data=bytes(body[at : at + PIECE]))


def _leased(lease: Lease | None) -> pb.LeaseReply:
    return pb.LeaseReply(lease_id=None if lease is None else lease.lease_id)
