"""The MLC over HTTP, so that others can reach what a ``cache-ref`` names (AMB-092, 148, 149, 155).

``https://host/mlc/<scope>/<kind>/<name>`` is the object ``mlc://<authority>/<scope>/<kind>/<name>`` of this process.
Objects are immutable: PUT once, GET (one range), HEAD, DELETE, leases. Kind ``log`` names a commit log instead: a CBOR
sequence whose entity tag is its number of records, appended to with If-Match by POST of one record or by PUT of the
whole. The log itself enforces epochs, so a fenced verifier can't append, however it asks.

The scope in the path is the capability: who doesn't know it finds nothing there, and can't tell a wrong scope from a
missing object.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta, Struct
from starlette.responses import Response

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.ports import CommitLog, Lease, LogAppend, ObjectStore
from sdcp_mono.core.problems import Conflict, Forbidden, Malformed, Refusal, Unavailable
from sdcp_mono.http_gateway.exchange import CBOR, OCTETS, Call, empty, octets
from sdcp_mono.http_gateway.problems import (
    MethodNotAllowed,
    NotFound,
    PreconditionFailed,
    PreconditionRequired,
    RangeNotSatisfiable,
)
from sdcp_mono.http_gateway.server import Resources

LOG: Final = "log"
SEQUENCE: Final = "application/cbor-seq"  # RFC 8742
TTL_MS: Final = 600_000  # of an object whose writer names no other: ten minutes, so that nothing stays for ever
_RANGE: Final = re.compile(r"bytes=(?:([0-9]{1,15})-([0-9]{0,15})|-([0-9]{1,15}))")
_TAG: Final = re.compile(r'"([0-9]{1,18})"')
_TTL: Final = re.compile(r"[1-9][0-9]{0,9}")

Record = CommitRecord | FenceRecord


class LeaseWish(Struct, frozen=True):
    ttl_ms: Annotated[int, Meta(ge=1)]


class MlcResources:
    """``authority`` is what this process calls itself in ``mlc:`` URIs."""

    def __init__(self, objects: ObjectStore, commit_log: CommitLog, authority: str) -> None:
        self._objects = objects
        self._log = commit_log
        self._authority = authority

    @property
    def resources(self) -> Resources:
        return {
            "/{scope}/{kind}/{name}": {
                "GET": self.get, "HEAD": self.get, "PUT": self.put, "DELETE": self.delete, "POST": self.append,
            },
            "/{scope}/{kind}/{name}/lease": {"POST": self.lease},
            "/{scope}/{kind}/{name}/lease/{lease}": {"PUT": self.renew, "DELETE": self.unlease},
        }  # fmt: skip

    def _uri(self, call: Call) -> MlcUri:
        """The object; a path that can't name one names nothing."""
        path = call.path
        try:
            return MlcUri.parse(f"mlc://{self._authority}/{path['scope']}/{path['kind']}/{path['name']}")
        except Malformed:
            raise NotFound("path: no such object") from None

    # ---- objects ---------------------------------------------------------------------------------

    async def get(self, call: Call) -> Response:
        uri = self._uri(call)
        if uri.kind == LOG:
            return await self._get_log(call, uri)
        _may_use_objects(call)
        value = await self._objects.get(str(uri), uri.scope)
        if value is None:
            raise NotFound("path: no such object")
        return _ranged(value if isinstance(value, bytes) else value.to_bytes(), call.headers.get("range"))

    async def put(self, call: Call) -> Response:
        uri = self._uri(call)
        if uri.kind == LOG:
            return await self._put_log(call, uri)
        _may_use_objects(call)
        ttl = call.query.get("ttl_ms", str(TTL_MS))
        if not _TTL.fullmatch(ttl):
            raise Malformed("ttl_ms: not a number of milliseconds above 0")
        if call.headers.get("if-match") is not None:
            raise PreconditionFailed("if-match: an object is never replaced")
        limits = call.gate.limits
        body = await call.body(limits.object_body, limits.object_seconds)
        try:
            meta = await self._objects.put(str(uri), body, ttl_ms=int(ttl))
        except Conflict as conflict:
            raise PreconditionFailed(conflict.detail) from None  # If-None-Match: * is what a PUT here means
        return empty(201, etag=meta.etag)

    async def delete(self, call: Call) -> Response:
        uri = self._uri(call)
        if uri.kind == LOG:
            call.gate.access.router(call.caller)
            await self._log.drop(str(uri))
        else:
            _may_use_objects(call)
            await self._objects.delete(str(uri))
        return empty()

    # ---- leases ----------------------------------------------------------------------------------

    async def lease(self, call: Call) -> Response:
        uri = self._object(call)
        wish = cbor.decode_value(await call.cbor_body(), LeaseWish)
        return _leased(await self._objects.lease(uri, wish.ttl_ms), wish)

    async def renew(self, call: Call) -> Response:
        uri = self._object(call)
        wish = cbor.decode_value(await call.cbor_body(), LeaseWish)
        return _leased(await self._objects.renew(uri, call.path["lease"], wish.ttl_ms), wish)

    async def unlease(self, call: Call) -> Response:
        await self._objects.unlease(self._object(call), call.path["lease"])
        return empty()

    def _object(self, call: Call) -> str:
        _may_use_objects(call)
        uri = self._uri(call)
        if uri.kind == LOG:
            raise NotFound("path: a log has no leases")
        return str(uri)

    # ---- commit logs -----------------------------------------------------------------------------

    async def _get_log(self, call: Call, uri: MlcUri) -> Response:
        _may_use_logs(call)
        records = await self._log.read(str(uri))
        return octets(b"".join(map(cbor.encode_record, records)), SEQUENCE, etag=_tag(len(records)))

    async def append(self, call: Call) -> Response:
        """POST of one record with If-Match (AMB-149)."""
        uri = self._uri(call)
        if uri.kind != LOG:
            raise MethodNotAllowed("method: only a log is appended to")
        _may_use_logs(call)
        expected = _matched(call)
        records = _records(await call.body(call.gate.limits.body, call.gate.limits.body_seconds))
        if len(records) != 1:
            raise Malformed("body: expected one record")
        return await self._append(call, str(uri), expected, records[0])

    async def _put_log(self, call: Call, uri: MlcUri) -> Response:
        """PUT: an empty log with If-None-Match, or the whole log and one more record with If-Match (6.8)."""
        _may_use_logs(call)
        limits = call.gate.limits
        if call.headers.get("if-none-match") == "*":
            if await call.body(limits.body, limits.body_seconds):
                raise Malformed("body: a new log is empty")
            try:
                await self._log.create(str(uri))
            except Conflict as conflict:
                raise PreconditionFailed(conflict.detail) from None
            return empty(201, etag=_tag(0))
        expected = _matched(call)
        records = _records(await call.body(limits.prompt_body, limits.object_seconds))
        if len(records) != expected + 1 or list(await self._log.read(str(uri)))[:expected] != list(records[:-1]):
            raise PreconditionFailed("body: not the log and one more record")
        return await self._append(call, str(uri), expected, records[-1])

    async def _append(self, call: Call, log: str, expected: int, record: Record) -> Response:
        if isinstance(record, FenceRecord):
            return await self._fence(call, log, expected, record.epoch)
        call.gate.access.verifier(call.caller)
        (outcome,) = await self._log.append([LogAppend(log, expected, record)])
        if outcome == "ok":
            return empty(etag=_tag(expected + 1))
        if outcome == "unknown":
            raise Unavailable("the append's outcome is unknown: read the log again", retry_after_ms=100)
        raise await self._too_late(log, expected, record.epoch)

    async def _fence(self, call: Call, log: str, expected: int, epoch: int) -> Response:
        call.gate.access.router(call.caller)
        if len(await self._log.read(log)) != expected:
            raise PreconditionFailed("if-match: the log has grown")
        if not await self._log.fence(log, epoch):
            raise Conflict("epoch: the log is fenced at this epoch or a higher one")
        # A record that slipped in before the fence is a valid one; whoever fenced reads it next (6.9).
        return empty(etag=_tag(len(await self._log.read(log))))

    async def _too_late(self, log: str, expected: int, epoch: int) -> Refusal:
        """412 for the entity tag, 409 for the epoch (AMB-155)."""
        records = await self._log.read(log)
        if len(records) == expected and any(isinstance(r, FenceRecord) and r.epoch > epoch for r in records):
            return Conflict("epoch: the log is fenced at a higher one")
        return PreconditionFailed("if-match: the log has grown, or is gone")


def _may_use_objects(call: Call) -> None:
    access, caller = call.gate.access, call.caller
    if not (access.is_reader(caller) or access.drafts(caller) or caller.uri in access.verifiers):
        raise Forbidden("objects are for the roles of a session")


def _may_use_logs(call: Call) -> None:
    access = call.gate.access
    if not (call.caller.uri in access.routers or call.caller.uri in access.verifiers):
        raise Forbidden("a commit log is for verifiers and routers")


def _matched(call: Call) -> int:
    """The number of records that If-Match names."""
    given = call.headers.get("if-match")
    if given is None:
        raise PreconditionRequired("if-match: an append is conditional (6.8)")
    if (match := _TAG.fullmatch(given)) is None:
        raise PreconditionFailed("if-match: not an entity tag of this log")
    return int(match[1])


def _records(body: bytes) -> tuple[Record, ...]:
    records, taken = cbor.decode_records(body)
    if taken != len(body):
        raise Malformed("body: its last record is cut off")
    return records


def _tag(records: int) -> str:
    return f'"{records}"'


def _leased(lease: Lease | None, wish: LeaseWish) -> Response:
    """``expires_ms`` counts from this answer: clocks of two machines have nothing to do with one another."""
    if lease is None:
        raise NotFound("path: no such object or lease")
    return octets(cbor.encode_value({"lease": lease.lease_id, "expires_ms": wish.ttl_ms}), CBOR)


def _ranged(body: bytes, wanted: str | None) -> Response:
    """The whole, or the one range that was asked for (RFC 9110, 14.2); what isn't understood is ignored."""
    match = None if wanted is None else _RANGE.fullmatch(wanted.strip())
    if match is None:
        return octets(body, OCTETS, accept_ranges="bytes")
    size = len(body)
    first, last, suffix = match[1], match[2], match[3]
    start = max(0, size - int(suffix)) if suffix is not None else int(first)
    end = size - 1 if suffix is not None or not last else min(int(last), size - 1)
    if start >= size or start > end:
        raise RangeNotSatisfiable(f"range: the object has {size} octets")
    return octets(body[start : end + 1], OCTETS, 206, content_range=f"bytes {start}-{end}/{size}")
