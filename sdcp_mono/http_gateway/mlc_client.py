"""Clients of an MLC: objects, commit logs, and draft rows over the wire (section 8, AMB-137 to 139, 148 to 151).

Nothing is fetched but from the authorities that are given, over https, within the session's scope, without redirects.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from msgspec import Struct, structs

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.names import SHORT_TTL_MS, MlcUri, normalise_base
from sdcp_mono.core.ports import (
    AppendOutcome,
    ByteSource,
    CommitLog,
    Got,
    Lease,
    LogAppend,
    ObjectMeta,
    ObjectStore,
    RowSource,
    RowsProblem,
)
from sdcp_mono.core.problems import Conflict, Malformed, Refusal, TooLarge, Unavailable, UnknownSession, Unprocessable
from sdcp_mono.http_gateway.exchange import OCTETS
from sdcp_mono.http_gateway.mlc import BATCH, LOG, SEQUENCE
from sdcp_mono.http_gateway.peer import Peer
from sdcp_mono.http_gateway.problems import PreconditionFailed, PreconditionRequired, RangeNotSatisfiable

FETCH_SECONDS: Final = 2.0  # of draft rows; a round waits for them (AMB-138)
OBJECT_SECONDS: Final = 30.0
MAX_OBJECT: Final = 64 * 2**20  # octets, as much as a gateway takes
MAX_TOKENS: Final = 16 * 2**20  # octets of token ids behind a reference
MAX_LOG: Final = 64 * 2**20  # octets: 64 Ki rounds of a thousand
ROWS: Final = "q_rows"


class BatchEntry(Struct, frozen=True):
    """One answer of a batch."""

    status: str
    value: bytes | None = None


class MlcClient:
    """``ObjectStore`` and ``CommitLog`` of the MLC at ``peer``; URIs are ``mlc://…`` or the https form."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @property
    def base(self) -> str:
        return self._peer.base

    def uri(self, scope: bytes | None, kind: str, name: str) -> str:
        """The https form of an object here."""
        return f"{self.base}{'-' if scope is None else scope.hex()}/{kind}/{name}"

    # ---- ObjectStore -----------------------------------------------------------------------------

    async def put(self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None) -> ObjectMeta:
        path, _ = _split(uri)
        body = value if isinstance(value, bytes) else value.to_bytes()
        path += "" if ttl_ms is None else f"?ttl_ms={ttl_ms}"
        try:
            answer = await self._peer.call(
                "PUT", path, body, headers={"if-none-match": "*"}, seconds=OBJECT_SECONDS, content_type=OCTETS
            )
        except PreconditionFailed as failed:
            raise Conflict(failed.detail) from None
        return ObjectMeta(uri, len(body), answer.headers.get("etag", ""))

    async def get(
        self, uri: str, scope: bytes | None, *, limit: int = MAX_OBJECT, seconds: float = OBJECT_SECONDS
    ) -> bytes | None:
        """The octets, or None where there are none for this scope. Raises ``TooLarge`` beyond ``limit``."""
        path, of = _split(uri)
        if of != scope:
            return None
        try:
            answer = await self._peer.call("GET", path, headers={"accept": "*/*"}, seconds=seconds, limit=limit)
        except UnknownSession:
            return None
        return answer.body

    async def get_range(self, uri: str, scope: bytes | None, start: int, stop: int) -> bytes | None:
        """Octets start..stop, fewer at the end; None as ``get``."""
        path, of = _split(uri)
        start = max(start, 0)
        if of != scope:
            return None
        if stop <= start:
            return None if await self.head(uri, scope) is None else b""
        headers = {"accept": "*/*", "range": f"bytes={start}-{stop - 1}"}
        try:
            answer = await self._peer.call("GET", path, headers=headers, seconds=OBJECT_SECONDS, limit=MAX_OBJECT)
        except RangeNotSatisfiable:
            return b""
        except UnknownSession:
            return None
        return answer.body if answer.status == 206 else answer.body[start:stop]  # ranges are optional (RFC 9110, 14.2)

    async def get_many(self, uris: Sequence[str], scope: bytes | None) -> Sequence[Got]:
        """One answer for each, in order; what doesn't fit the answer of a batch is fetched by itself."""
        answers: list[Got] = []
        for at in range(0, len(uris), BATCH):
            answers += await self._batch(uris[at : at + BATCH], scope)
        return answers

    async def _batch(self, uris: Sequence[str], scope: bytes | None) -> list[Got]:
        paths = [_split(uri) for uri in uris]
        asked = [path.partition("/")[2] for path, of in paths if of == scope]
        body = cbor.encode_value({"objects": asked})
        path = f"{'-' if scope is None else scope.hex()}/batch"
        try:
            answer = await self._peer.call("POST", path, body, seconds=OBJECT_SECONDS, limit=cbor.MAX_BODY)
            told = cbor.decode_value(answer.body, tuple[BatchEntry, ...])
        except (Unavailable, Malformed):
            return [Got("missing" if of != scope else "failed") for _, of in paths]
        entries = iter(told)
        return [
            Got("missing") if of != scope else await self._got(uri, scope, next(entries, BatchEntry("failed")))
            for uri, (_, of) in zip(uris, paths, strict=True)
        ]

    async def _got(self, uri: str, scope: bytes | None, entry: BatchEntry) -> Got:
        if entry.status == "ok" and entry.value is not None:
            return Got("ok", entry.value)
        if entry.status != "large":
            return Got("missing" if entry.status == "missing" else "failed")
        try:
            value = await self.get(uri, scope)
        except Refusal:
            return Got("failed")
        return Got("missing") if value is None else Got("ok", value)

    async def head(self, uri: str, scope: bytes | None) -> ObjectMeta | None:
        path, of = _split(uri)
        if of != scope:
            return None
        try:
            answer = await self._peer.call("HEAD", path, headers={"accept": "*/*"})
        except UnknownSession:
            return None
        size = answer.headers.get("content-length", "")
        if not (size.isascii() and size.isdigit()):
            raise Unavailable(f"{self.base}: an object of unknown size")
        return ObjectMeta(uri, int(size), answer.headers.get("etag", ""))

    async def lease(self, uri: str, ttl_ms: int, holder: str = "") -> Lease | None:
        return await self._lease("POST", f"{_split(uri)[0]}/lease", ttl_ms, holder)

    async def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None:
        return await self._lease("PUT", f"{_split(uri)[0]}/lease/{lease_id}", ttl_ms)

    async def unlease(self, uri: str, lease_id: str) -> None:
        await self._peer.call("DELETE", f"{_split(uri)[0]}/lease/{lease_id}")

    async def delete(self, uri: str) -> None:
        await self._peer.call("DELETE", _split(uri)[0])

    async def _lease(self, method: str, path: str, ttl_ms: int, holder: str = "") -> Lease | None:
        asked = time.monotonic()
        wish = {"ttl_ms": ttl_ms} | ({"holder": holder} if holder else {})
        try:
            answer = await self._peer.call(method, path, cbor.encode_value(wish))
            told = cbor.decode_value(answer.body, dict[str, str | int])
            return Lease(str(told["lease"]), int(1000 * asked) + int(told["expires_ms"]))  # on this machine's clock
        except UnknownSession:
            return None
        except (Malformed, KeyError, ValueError) as error:
            raise Unavailable(f"{self.base}: its lease can't be read: {error}") from error

    # ---- CommitLog -------------------------------------------------------------------------------

    async def create(self, log: str) -> None:
        """An MLC may refuse the name of an empty log too; the router has made it then (AMB-071)."""
        try:
            await self._peer.call("PUT", _split(log)[0], b"", headers={"if-none-match": "*"}, content_type=SEQUENCE)
        except PreconditionFailed as failed:
            if await self.read(log):
                raise Conflict(failed.detail) from None

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        """One after the other: over HTTP each log is a resource of its own."""
        return [await self._append(append) for append in appends]

    async def _append(self, append: LogAppend) -> AppendOutcome:
        body = cbor.encode_record(append.record)
        headers = {"if-match": f'"{append.sequence}"'}
        try:
            await self._peer.call("POST", _split(append.log)[0], body, headers=headers, content_type=SEQUENCE)
        except Unavailable:
            return "unknown"
        except (Conflict, PreconditionFailed, UnknownSession):
            return "fenced"
        return "ok"

    async def fence(self, log: str, epoch: int) -> bool:
        body = cbor.encode_record(FenceRecord(epoch=epoch))
        while True:
            records = await self.read(log)
            if any(isinstance(record, FenceRecord) and record.epoch >= epoch for record in records):
                return False
            headers = {"if-match": f'"{len(records)}"'}
            try:
                await self._peer.call("POST", _split(log)[0], body, headers=headers, content_type=SEQUENCE)
            except (PreconditionFailed, PreconditionRequired):
                continue  # it has grown meanwhile; a verifier appends at most once a round
            except Conflict:
                return False
            return True

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]:
        path, _ = _split(log)
        answer = await self._peer.call("GET", path, headers={"accept": "*/*"}, seconds=OBJECT_SECONDS, limit=MAX_LOG)
        try:
            return cbor.decode_records(answer.body)[0][from_:]
        except Malformed as error:
            raise Unavailable(f"{self.base}: the log can't be read: {error.detail}") from error

    async def drop(self, log: str) -> None:
        await self._peer.call("DELETE", _split(log)[0])


class Caches:
    """The MLCs that references may name, by base URI, and this process's own store (SDCP-204).

    ``own_base`` is where others reach ``own`` over https; references to it are answered from memory.
    """

    def __init__(
        self,
        trusted: Mapping[str, MlcClient],
        own: ObjectStore | None = None,
        *,
        authority: str = "",
        own_base: str = "",
    ) -> None:
        self._trusted = {normalise_base(base): client for base, client in trusted.items()}
        self._own = own
        self._authority = authority
        self._own_base = normalise_base(own_base) if own_base else ""

    def trust(self, client: MlcClient) -> None:
        """From now on references may name the MLC behind ``client`` too."""
        self._trusted[client.base] = client

    def local(self, uri: str) -> str | None:
        """The ``mlc:`` URI of a reference to this process's own store; None for any other."""
        if self._own is None:
            return None
        if self._own_base and uri.startswith(self._own_base):
            uri = f"mlc://{self._authority}/{uri[len(self._own_base) :]}"
        try:
            name = MlcUri.parse(uri)
        except Malformed:
            return None
        return str(name) if name.authority == self._authority else None

    def reference(self, name: MlcUri) -> str:
        """How others name an object of this process's own store: by its https form, where it is served."""
        return str(name).replace(f"mlc://{self._authority}/", self._own_base, 1) if self._own_base else str(name)

    async def fetch(self, uri: str, scope: bytes | None, *, limit: int, seconds: float) -> bytes | ByteSource | None:
        """The object behind a reference; None if it isn't there. Raises ``Unprocessable`` for one not to be fetched."""
        local = self.local(uri)
        if local is not None and self._own is not None:
            return await self._own.get(local, scope)
        if (client := self.trusted(uri)) is None:
            raise Unprocessable("cache-ref: not a cache that is trusted here")
        return await client.get(uri, scope, limit=limit, seconds=seconds)

    def trusted(self, uri: str) -> MlcClient | None:
        """The client for a reference to a trusted MLC: its base, and nothing but scope, kind and name after it."""
        for base, client in self._trusted.items():
            if uri.startswith(base):
                return client if uri == base + _split(uri)[0] else None
        return None

    async def tokens(self, uri: str, scope: bytes | None) -> tuple[int, ...]:
        """A ``TokenFetcher``: the token ids behind a reference (AMB-037, AMB-038)."""
        try:
            value = await self.fetch(uri, scope, limit=MAX_TOKENS, seconds=OBJECT_SECONDS)
        except (TooLarge, Malformed) as refusal:
            raise Unprocessable(f"cache-ref: {refusal.detail}") from None
        if value is None:
            raise Unavailable("cache-ref: the object is absent", retry_after_ms=1000)
        try:
            return cbor.decode_value(value if isinstance(value, bytes) else value.to_bytes(), tuple[int, ...])
        except Refusal as refusal:
            raise Unprocessable(f"cache-ref: {refusal.detail}") from None


class Logs:
    """``CommitLog`` by reference: a log of this process's own MLC under its one name, a trusted one over HTTP.

    A foreign router names our logs by their https form; without this the store would hold them under two names. Any
    other reference is ``Unprocessable``: the verifier would write where nobody can fence it.
    """

    def __init__(self, own: CommitLog, caches: Caches) -> None:
        self._own = own
        self._caches = caches

    async def create(self, log: str) -> None:
        store, name = self._find(log)
        await store.create(name)

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        """Those of one store in one call, so that rounds of our own store still share a transaction."""
        outcomes: list[AppendOutcome] = ["unknown"] * len(appends)
        groups: dict[int, list[int]] = {}
        found = [self._find(append.log) for append in appends]
        for index, (store, _) in enumerate(found):
            groups.setdefault(id(store), []).append(index)
        for indices in groups.values():
            store = found[indices[0]][0]
            batch = [structs.replace(appends[i], log=found[i][1]) for i in indices]
            for i, outcome in zip(indices, await store.append(batch), strict=True):
                outcomes[i] = outcome
        return outcomes

    async def fence(self, log: str, epoch: int) -> bool:
        store, name = self._find(log)
        return await store.fence(name, epoch)

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]:
        store, name = self._find(log)
        return await store.read(name, from_)

    async def drop(self, log: str) -> None:
        store, name = self._find(log)
        await store.drop(name)

    def _find(self, log: str) -> tuple[CommitLog, str]:
        if (name := self._caches.local(log)) is not None:
            found: tuple[CommitLog, str] = self._own, name
        elif (client := self._caches.trusted(log)) is not None:
            found = client, log
        else:
            raise Unprocessable("commit_log: not a cache that is trusted here")
        if MlcUri.parse(f"mlc://x/{_split(log)[0]}").kind != LOG:
            raise Unprocessable("commit_log: not the name of a log")
        return found


class RowsFromBytes(Protocol):
    """Makes the runner's rows of M * V little-endian binary32 and checks them; raises ``RowsProblem``."""

    def __call__(self, data: bytes, tokens: tuple[int, ...]) -> Any: ...


class HttpRows:
    """``RowSource`` over HTTP, and over this process's own store for references that name it.

    ``local`` serves rows that never became bytes; ``publish_to`` is the MLC new rows go to, None for ``local``. Octets
    are fetched once, whole, within 2 s, at most one more than M * V * 4 (AMB-134, 138, 139).
    """

    def __init__(
        self,
        caches: Caches,
        vocab_size: int,
        rows_from_bytes: RowsFromBytes,
        *,
        local: RowSource | None = None,
        publish_to: MlcClient | None = None,
    ) -> None:
        self._caches = caches
        self._vocab_size = vocab_size
        self._rows_from_bytes = rows_from_bytes
        self._local = local
        self._publish_to = publish_to
        self._published: set[str] = set()

    async def fetch(self, uri: str, tokens: tuple[int, ...], scope: bytes | None) -> Any:
        size = len(tokens) * self._vocab_size * 4
        try:
            value = await self._caches.fetch(uri, scope, limit=size + 1, seconds=FETCH_SECONDS)
        except TooLarge:
            raise RowsProblem(f"q_rows: more than the {size} octets of {len(tokens)} rows", unavailable=False) from None
        except Refusal as refusal:
            raise RowsProblem(f"q_rows: {refusal.detail}", unavailable=True) from None
        if value is None:
            raise RowsProblem("q_rows: names rows that are not there", unavailable=True)
        if isinstance(value, bytes):
            return self._rows_from_bytes(value, tokens)
        local = self._caches.local(uri)
        assert local is not None
        if self._local is None:
            return self._rows_from_bytes(value.to_bytes(), tokens)
        return await self._local.fetch(local, tokens, scope)

    async def publish(self, rows: Any, scope: bytes | None) -> str:
        if self._publish_to is None:
            if self._local is None:
                raise Unavailable("there is no cache to publish rows to")
            return self._caches.reference(MlcUri.parse(await self._local.publish(rows, scope)))
        uri = self._publish_to.uri(scope, ROWS, secrets.token_hex(16))
        await self._publish_to.put(uri, rows, ttl_ms=SHORT_TTL_MS)
        self._published.add(uri)
        return uri

    async def release(self, uri: str) -> None:
        """The object's short TTL stands for its lease, so giving it up is deleting it."""
        if uri not in self._published:
            if self._local is not None:
                await self._local.release(self._caches.local(uri) or uri)
            return
        self._published.discard(uri)
        assert self._publish_to is not None
        try:
            await self._publish_to.delete(uri)
        except Refusal:
            return  # it ends by itself


def _split(uri: str) -> tuple[str, bytes | None]:
    """Path below the MLC's base, and scope, of a reference in either form; raises ``Unprocessable``.

    The last three segments are checked as those of an ``mlc:`` URI: no escapes, no dots, no query.
    """
    parts = urlsplit(uri)
    tail = parts.path.split("/")[-3:]
    try:
        if parts.scheme not in ("https", "mlc") or parts.query or parts.fragment or len(tail) != 3:
            raise Malformed("")
        name = MlcUri.parse(f"mlc://x/{'/'.join(tail)}")
    except Malformed:
        raise Unprocessable("cache-ref: expected …/scope/kind/name of an MLC") from None
    return "/".join(tail), name.scope


__all__ = ["Caches", "HttpRows", "Logs", "MlcClient", "RowsFromBytes"]
