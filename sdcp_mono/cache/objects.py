"""The objects of an MLC, each kind where it belongs (design, section 5, points 3, 6 and 7; the draft, section 8).

    kind                                     | first                        | below, where there is a bucket
    q_rows, draft_kv (short-lived)           | memory, the fastest that     | nothing: never on a disk, never further
                                             | both sides reach             | than this process
    target_kv, prompt_kv, prefix_kv          | the tiers, else memory up to | a copy, for a day
                                             | half of it                   |
    prompt, tokens, anything else            | memory                       | a copy, also for others

Law of this module: every kind of a scope answers another scope as if nothing were there; KV is a cache, so it may be
gone at any time unless leased, and a failure below is a miss; what is not KV is there as long as was promised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from sdcp_mono.cache.blob import HEADER_BYTES, BadBlob, Blob, unpack
from sdcp_mono.cache.leases import MAX_TTL_MS, RETRY_MS, Leases
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.stats import TierStats
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.core.names import SHORT_LIVED, SHORT_TTL_MS, MlcUri
from sdcp_mono.core.ports import ByteSource, Got, Lease, ObjectMeta, ObjectStore
from sdcp_mono.core.problems import Conflict, Malformed, Refusal, Unavailable

log = logging.getLogger(__name__)

KV_KINDS: Final = frozenset({"target_kv", "prompt_kv", "prefix_kv"})
LONGEST_MS: Final = 600_000  # of what is short-lived, whatever is asked for: who needs it longer holds a lease
KV_MEMORY_MS: Final = 600_000  # of KV in memory, where nothing is evicted
LEASED_SHARE: Final = 4  # leases may pin 1/4 of the host tier: more would leave its evictor nothing to evict
AT_ONCE: Final = 16  # objects of a batch that are read at the same time
OCTETS: Final = "octets"  # dtype of KV that others wrote in a format of their own: kept whole, and checked all the same


class RoutedObjects:
    """``core.ports.ServedObjects`` over memory, the KV tiers and a bucket; the last two may be missing.

    For one event loop. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        memory: MemoryObjects,
        tiers: Tiers | None = None,
        bucket: ObjectStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = memory
        self.tiers = tiers
        self.bucket = bucket
        self.kv_leases = Leases(clock)
        self._doomed: set[str] = set()  # KV that was deleted while leased

    # ---- ObjectStore -----------------------------------------------------------------------------

    async def put(self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None) -> ObjectMeta:
        """Store once. Short-lived kinds live three minutes, or ``ttl_ms`` up to ten; KV as long as it is of use.

        Raises ``Conflict`` if the URI is taken, ``OverQuota`` or ``Unavailable`` if there is no room.
        """
        kind = MlcUri.parse(uri).kind
        if kind in SHORT_LIVED:
            return await self.memory.put(uri, value, ttl_ms=SHORT_TTL_MS if ttl_ms is None else min(ttl_ms, LONGEST_MS))
        if kind in KV_KINDS:
            return await self._put_kv(uri, value if isinstance(value, bytes) else value.to_bytes(), ttl_ms)
        if self.bucket is None:
            return await self.memory.put(uri, value, ttl_ms=ttl_ms)
        meta = await self.bucket.put(uri, value, ttl_ms=ttl_ms)
        with suppress(Conflict, Unavailable):  # it is stored; memory only answers sooner
            await self.memory.put(uri, value, ttl_ms=ttl_ms, etag=meta.etag)
        return meta

    async def get(self, uri: str, scope: bytes | None) -> bytes | ByteSource | None:
        """The value, or None where it is missing, expired or another scope's: all three look alike."""
        kind = _kind(uri, scope)
        if kind is None:
            return None
        if (tiers := self._tiers_of(kind)) is not None:
            return await self._get_kv(tiers, uri, scope)
        value = await self.memory.get(uri, scope)
        return value if value is not None else await self._below(uri, scope, kind)

    @asynccontextmanager
    async def reading(self, uri: str, scope: bytes | None) -> AsyncIterator[bytes | None]:
        """The bytes, held until the block is left."""
        kind = _kind(uri, scope)
        if kind is not None and self._tiers_of(kind) is None:
            async with self.memory.reading(uri, scope) as value:
                if value is not None:
                    yield value
                    return
        value = None if kind is None else _octets(await self.get(uri, scope))
        yield value  # a copy of its own: nothing has to be held

    async def get_range(self, uri: str, scope: bytes | None, start: int, stop: int) -> bytes | None:
        """Bytes start..stop of the value, fewer at its end; None as ``get``."""
        kind = _kind(uri, scope)
        if kind is None:
            return None
        start, stop = max(start, 0), max(stop, 0)
        if (tiers := self._tiers_of(kind)) is not None:  # a CRC covers the whole, so the whole is read
            value = await self._get_kv(tiers, uri, scope)
            return None if value is None else value[start:stop]
        part = await self.memory.get_range(uri, scope, start, stop)
        if part is None and (bucket := self._bucket_of(kind)) is not None:
            part = await bucket.get_range(uri, scope, start, stop)
        return part

    async def get_many(self, uris: Sequence[str], scope: bytes | None) -> Sequence[Got]:
        """One answer for each, in order: a failure of one is no failure of the others."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(uri: str) -> Got:
            async with slots:
                try:
                    value = await self.get(uri, scope)
                except Refusal:
                    return Got("failed")
            return Got("missing") if value is None else Got("ok", value)

        return await asyncio.gather(*map(one, uris))

    async def head(self, uri: str, scope: bytes | None) -> ObjectMeta | None:
        """Size and entity tag; None as ``get``."""
        kind = _kind(uri, scope)
        if kind is None:
            return None
        if (tiers := self._tiers_of(kind)) is not None:
            await self._drop_doomed()
            blob = _find(tiers, uri)
            meta = None if blob is None else _meta(blob)
        else:
            meta = await self.memory.head(uri, scope)
        if meta is None and (bucket := self._bucket_of(kind)) is not None:
            meta = await bucket.head(uri, scope)
        return meta

    async def lease(self, uri: str, ttl_ms: int, holder: str = "") -> Lease | None:
        """Hold an object; KV is pinned in host memory. Raises ``Unavailable`` where too much of that is pinned."""
        kind = _kind_of(uri)
        if (tiers := self._tiers_of(kind)) is not None:
            return await self._lease_kv(tiers, uri, ttl_ms, holder)
        lease = await self.memory.lease(uri, ttl_ms, holder)
        if lease is None and (bucket := self._bucket_of(kind)) is not None:
            lease = await bucket.lease(uri, ttl_ms, holder)
        return lease

    async def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None:
        kind = _kind_of(uri)
        if self._tiers_of(kind) is not None:
            return self.kv_leases.renew(uri, lease_id, ttl_ms)
        lease = await self.memory.renew(uri, lease_id, ttl_ms)
        if lease is None and (bucket := self._bucket_of(kind)) is not None:
            lease = await bucket.renew(uri, lease_id, ttl_ms)
        return lease

    async def unlease(self, uri: str, lease_id: str) -> None:
        if self.kv_leases.give_up(uri, lease_id):
            await self._drop_doomed()
        else:
            await self.memory.unlease(uri, lease_id)

    async def delete(self, uri: str) -> None:
        """It is gone once no lease is live."""
        kind = _kind_of(uri)
        if self._tiers_of(kind) is not None:
            self._doomed.add(uri)
            await self._drop_doomed()
        else:
            await self.memory.delete(uri)
        if (bucket := self._bucket_of(kind)) is not None:
            await bucket.delete(uri)

    def _tiers_of(self, kind: str) -> Tiers | None:
        """Where objects of this kind are, if that isn't memory."""
        return self.tiers if kind in KV_KINDS else None

    def _bucket_of(self, kind: str) -> ObjectStore | None:
        """Where copies of them are."""
        return None if not kind or kind in SHORT_LIVED else self.bucket

    # ---- KV --------------------------------------------------------------------------------------

    async def _put_kv(self, uri: str, value: bytes, ttl_ms: int | None) -> ObjectMeta:
        if self.tiers is None:
            self.memory.sweep()
            if self.memory.used_bytes + len(value) > self.memory.free_bytes:
                text = "no room for KV: half of memory is for rows and tokens; with tiers (kv_host_mb) there is more"
                raise Unavailable(text, retry_after_ms=RETRY_MS)
            return await self.memory.put(uri, value, ttl_ms=KV_MEMORY_MS if ttl_ms is None else ttl_ms)
        await self._drop_doomed()
        blob, payload = _blob(uri, value)
        await self.tiers.put(blob, payload)
        if self.bucket is not None:
            try:
                await self.bucket.put(uri, value, ttl_ms=MAX_TTL_MS)
            except Refusal as refusal:
                log.debug("KV could not be copied to the bucket: %s", refusal)
        return _meta(blob)

    async def _get_kv(self, tiers: Tiers, uri: str, scope: bytes | None) -> bytes | None:
        await self._drop_doomed()
        packed = await tiers.get(uri)
        if packed is not None:
            return _written(uri, packed)
        data = _octets(await self._below(uri, scope, _kind_of(uri)))
        if data is None:
            return None
        with suppress(Conflict, Unavailable):  # it is here for whoever asks next, or there is no room
            await tiers.put(*_blob(uri, data))
        return data

    async def _below(self, uri: str, scope: bytes | None, kind: str) -> bytes | ByteSource | None:
        """What the bucket has; a failure of it is a miss where the object can be computed again."""
        if (bucket := self._bucket_of(kind)) is None:
            return None
        try:
            return await bucket.get(uri, scope)
        except Unavailable as unavailable:
            if kind not in KV_KINDS:
                raise
            log.debug("KV could not be read from the bucket: %s", unavailable)
            return None

    async def _lease_kv(self, tiers: Tiers, uri: str, ttl_ms: int, holder: str) -> Lease | None:
        self.kv_leases.deadline(ttl_ms)
        await self._drop_doomed()
        key = Blob(uri, 0).key
        pin = tiers.host.pin(key, use=False)
        if pin is None and await tiers.get(uri) is not None:  # from disk to host memory
            pin = tiers.host.pin(key, use=False)
        if pin is None:
            return None
        stats = tiers.host.stats()
        if stats.pinned_bytes * LEASED_SHARE > stats.capacity_bytes:
            pin.release()
            raise Unavailable("leases hold a quarter of host memory", retry_after_ms=RETRY_MS)
        try:
            return self.kv_leases.grant(uri, ttl_ms, holder, pin.release)
        except Refusal:
            pin.release()
            raise

    async def _drop_doomed(self) -> None:
        """Let go of KV whose leases have run out, and drop what was deleted meanwhile."""
        self.kv_leases.sweep(AT_ONCE)
        for uri in [uri for uri in self._doomed if not self.kv_leases.live(uri)]:
            self._doomed.discard(uri)
            if self.tiers is not None:
                await asyncio.to_thread(self.tiers.drop, uri)

    # ---- for people ------------------------------------------------------------------------------

    def stats(self) -> list[TierStats]:
        """KV first, then what is held in memory."""
        return [*(() if self.tiers is None else self.tiers.stats()), self.memory.tier()]

    def forced(self) -> dict[str, int]:
        """Leases that ran out, by holder."""
        return dict(self.memory.leases.forced + self.kv_leases.forced)

    def counts(self) -> dict[str, int]:
        """Plain data for ``cache stat``."""
        stats = self.memory.stats()
        return {
            "objects": stats.objects, "scopes": stats.scopes, "leases": stats.leases + len(self.kv_leases),
            "expired": stats.expired, "forced": self.memory.leases.forced.total() + self.kv_leases.forced.total(),
            "refused": stats.refused, "over_quota": stats.over_quota,
        }  # fmt: skip


def _kind_of(uri: str) -> str:
    """Empty for what can't be an object: it is missing everywhere."""
    try:
        return MlcUri.parse(uri).kind
    except Malformed:
        return ""


def _kind(uri: str, scope: bytes | None) -> str | None:
    """The kind of an object that ``scope`` may see; None for one that isn't its own, or can't be."""
    try:
        name = MlcUri.parse(uri)
    except Malformed:
        return None
    return name.kind if name.scope == scope else None


def _octets(value: bytes | ByteSource | None) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else value.to_bytes()


def _blob(uri: str, value: bytes) -> tuple[Blob, memoryview]:
    """What the tiers store for ``value``: its own header's, or all of it behind a header of ours."""
    try:
        blob, payload = unpack(value, uri)
        if blob.dtype != OCTETS:
            return blob, payload
    except BadBlob:
        pass  # another implementation's KV, opaque here (draft, section 1.4)
    return Blob(uri, len(value), OCTETS, (len(value),)), memoryview(value)


def _written(uri: str, packed: bytes) -> bytes:
    """What was put, of what the tiers answer."""
    blob, payload = unpack(packed, uri)
    return bytes(payload) if blob.dtype == OCTETS else packed


def _find(tiers: Tiers, uri: str) -> Blob | None:
    key = Blob(uri, 0).key
    if (pin := tiers.host.pin(key, use=False)) is not None:
        with pin:
            return pin.blob
    return None if tiers.disk is None else tiers.disk.find(key)


def _meta(blob: Blob) -> ObjectMeta:
    """The tag names the object: its bytes never change."""
    return ObjectMeta(blob.uri, blob.size + (0 if blob.dtype == OCTETS else HEADER_BYTES), f'"{blob.key.hex()[:32]}"')
