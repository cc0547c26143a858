"""The MLC over HTTP, so that others can reach what a ``cache-ref`` names (AMB-092, 148, 149, 155).

``https://host/mlc/<scope>/<kind>/<name>`` is the object ``mlc://<authority>/<scope>/<kind>/<name>`` of this process.
Objects are immutable: PUT once, GET (one range), HEAD, DELETE, leases; ``POST https://host/mlc/<scope>/batch`` reads
many at once, each with a status of its own. Kind ``log`` names a commit log instead: a CBOR sequence whose entity tag
is its number of records, appended to with If-Match by POST of one record or by PUT of the whole. The log itself
enforces epochs, so a fenced verifier can't append, however it asks.

The scope in the path is the capability: who doesn't know it finds nothing there, and can't tell a wrong scope from a
missing object.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from starlette.responses import Response

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.names import SHORT_LIVED, SHORT_TTL_MS, MlcUri
from sdcp_mono.core.ports import ByteSource, CommitLog, Lease, LogAppend, ObjectMeta, ServedObjects
from sdcp_mono.core.problems import Conflict, Forbidden, Malformed, Refusal, TooLarge, Unavailable
from sdcp_mono.http_gateway.exchange import CBOR, OCTETS, Call, empty, octets, problem
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
BATCH: Final = 256  # objects of one batch: the KV blocks of a prefix of 4 Ki tokens; their names fit a message
BATCH_OCTETS: Final = 8 * 2**20  # of their values: half of what a reader of CBOR takes; the others are "large"
_RANGE: Final = re.compile(r"bytes=(?:([0-9]{1,15})-([0-9]{0,15})|-([0-9]{1,15}))")
_TAG: Final = re.compile(r'"([0-9]{1,18})"')
_TTL: Final = re.compile(r"[1-9][0-9]{0,9}")

Record = CommitRecord | FenceRecord


class LeaseWish(Struct, frozen=True):
    ttl_ms: Annotated[int, Meta(ge=1)]
    holder: Annotated[str, Meta(max_length=200)] = ""  # what for, for whoever looks into why an object stays


class BatchWish(Struct, frozen=True):
    """``objects``: kind/name of each."""

    objects: tuple[str, ...]


class MlcResources:
    """``authority`` is what this process calls itself in ``mlc:`` URIs."""

    def __init__(self, objects: ServedObjects, commit_log: CommitLog, authority: str) -> None:
        self._objects = objects
        self._log = commit_log
        self._authority = authority

    @property
    def resources(self) -> Resources:
        return {
            "/{scope}/{kind}/{name}": {
                "GET": self.get, "HEAD": self.head, "PUT": self.put, "DELETE": self.delete, "POST": self.append,
            },
            "/{scope}/batch": {"POST": self.batch},
            "/{scope}/{kind}/{name}/lease": {"POST": self.lease},
            "/{scope}/{kind}/{name}/lease/{lease}": {"PUT": self.renew, "DELETE": self.unlease},
        }  # fmt: skip

    def _uri(self, call: Call) -> MlcUri:
        return self._named(call.path["scope"], call.path["kind"], call.path["name"])

    def _named(self, scope: str, kind: str, name: str) -> MlcUri:
        """The object; a path that can't name one names nothing."""
        try:
            return MlcUri.parse(f"mlc://{self._authority}/{scope}/{kind}/{name}")
        except Malformed:
            raise NotFound("path: no such object") from None

    # ---- objects ---------------------------------------------------------------------------------

    async def head(self, call: Call) -> Response:
        uri = self._uri(call)
        if uri.kind == LOG:
            return await self._get_log(call, uri)
        meta = await self._meta(call, uri)
        return octets(b"", OCTETS, content_length=str(meta.size), etag=meta.etag, accept_ranges="bytes")

    async def get(self, call: Call) -> Response:
        uri = self._uri(call)
        if uri.kind == LOG:
            return await self._get_log(call, uri)
        meta = await self._meta(call, uri)
        try:
            wanted = _range(call, meta)
        except RangeNotSatisfiable as refusal:
            return problem(refusal, {"content-range": f"bytes */{meta.size}"})
        if wanted is None:
            value = await call.held.enter_async_context(self._objects.reading(str(uri), uri.scope))
            return octets(_there(value), OCTETS, etag=meta.etag, accept_ranges="bytes")
        start, end = wanted
        part = _there(await self._objects.get_range(str(uri), uri.scope, start, end + 1))
        at = f"bytes {start}-{end}/{meta.size}"
        return octets(part, OCTETS, 206, content_range=at, etag=meta.etag, accept_ranges="bytes")

    async def batch(self, call: Call) -> Response:
        """Many objects of one scope: an array with ``status``, and ``value`` or, where that is too large, ``size``."""
        _may_use_objects(call)
        call.must_accept()
        wish = cbor.decode_value(await call.cbor_body(), BatchWish)
        if len(wish.objects) > BATCH:
            raise TooLarge(f"objects: more than {BATCH}; ask for them in parts")
        scope = self._named(call.path["scope"], "any", "any").scope
        answers: list[dict[str, Any]] = []
        left = BATCH_OCTETS
        for name in wish.objects:
            uri = f"mlc://{self._authority}/{call.path['scope']}/{name}"
            answers.append(await self._entry(uri, scope, left))
            left -= len(answers[-1].get("value", b""))
        return octets(cbor.encode_value(answers), CBOR)

    async def _entry(self, uri: str, scope: bytes | None, room: int) -> dict[str, Any]:
        """One answer of a batch; what goes wrong with it is no failure of the others."""
        try:
            meta = None if uri.split("/")[4] == LOG else await self._objects.head(uri, scope)
            if meta is None:
                return {"status": "missing"}
            if meta.size > room:
                return {"status": "large", "size": meta.size}
            (got,) = await self._objects.get_many((uri,), scope)
        except Refusal:
            return {"status": "failed"}
        return {"status": got.status} | ({} if got.value is None else {"value": _octets(got.value)})

    async def _meta(self, call: Call, uri: MlcUri) -> ObjectMeta:
        _may_use_objects(call)
        if (meta := await self._objects.head(str(uri), uri.scope)) is None:
            raise NotFound("path: no such object")
        return meta

    async def put(self, call: Call) -> Response:
        uri = self._uri(call)
        if uri.kind == LOG:
            return await self._put_log(call, uri)
        _may_use_objects(call)
        ttl = call.query.get("ttl_ms", str(SHORT_TTL_MS if uri.kind in SHORT_LIVED else TTL_MS))
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
        holder = f"{call.caller.uri} {wish.holder}".rstrip()
        return _leased(await self._objects.lease(uri, wish.ttl_ms, holder), wish)

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


def _range(call: Call, meta: ObjectMeta) -> tuple[int, int] | None:
    """First and last octet of the one range that was asked for (RFC 9110, 14.2); what isn't understood is ignored."""
    wanted = call.headers.get("range", "")
    match = _RANGE.fullmatch(wanted.strip())
    if match is None or call.headers.get("if-range", meta.etag) != meta.etag:
        return None
    size, first, last, suffix = meta.size, match[1], match[2], match[3]
    start = max(0, size - int(suffix)) if suffix is not None else int(first)
    end = size - 1 if suffix is not None or not last else min(int(last), size - 1)
    if start >= size or start > end:
        raise RangeNotSatisfiable(f"range: the object has {size} octets")
    return start, end


def _there(value: bytes | None) -> bytes:
    if value is None:  # it ended after it was looked at
        raise NotFound("path: no such object")
    return value


def _octets(value: bytes | ByteSource) -> bytes:
    return value if isinstance(value, bytes) else value.to_bytes()
