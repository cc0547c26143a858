"""The in-memory tier of the multi-level cache (design, section 5): immutable objects, leases, hard byte caps.

Law of this module:
- An object lives until its TTL has passed *and* no lease is live. ``delete`` ends the TTL and leaves leases standing.
- Nothing is evicted: what is stored was promised. Without room a put is refused, and without room in its scope's share
  whatever the others leave free.
- What is being read (``reading``) keeps its room when its life ends, until the last reader has left.
- There is no background thread. Every call inspects a few objects in turn and drops the dead ones; a put that finds no
  room inspects them all, which ``max_objects`` bounds.
- ``used_bytes`` is the size of all that is stored or still read; ``used_bytes + free_bytes`` is the cap, always.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from sdcp_mono.cache.leases import RETRY_MS, Leases
from sdcp_mono.cache.stats import TierStats
from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.ports import ByteSource, Got, Lease, ObjectMeta
from sdcp_mono.core.problems import Conflict, OverQuota, Unavailable

SWEEP: Final = 8  # objects inspected per call: more than the one a call can add, so the dead can't pile up
MAX_OBJECTS: Final = 4096  # two live objects per session and round, many sessions; a full inspection takes about 1 ms


class MemoryStats(Struct, frozen=True):
    """What the store holds now, and what it did since the start."""

    objects: int
    used_bytes: int
    free_bytes: int
    scopes: int  # that hold something
    leases: int
    expired: int  # objects dropped because their time had come
    forced: int  # leases that ran out: their holder neither renewed them nor gave them up
    refused: int  # puts refused for want of room
    over_quota: int  # puts refused because their scope has used up its share


@dataclass(slots=True)
class _Object:
    value: bytes | ByteSource
    size: int
    scope: bytes | None
    expires: float  # seconds on the store's clock; inf without a TTL
    etag: str
    readers: int = 0
    gone: bool = False  # found no more; its room is free when nobody reads it


@dataclass(slots=True)
class _Share:
    """What one scope takes."""

    used: int = 0
    objects: int = 0


class MemoryObjects:
    """``core.ports.ServedObjects`` in this process, for one event loop.

    A ``ByteSource`` is kept as it is and handed out again uncopied; its size is its ``nbytes`` where it has one, else
    the length of its bytes. ``clock`` is monotonic, in seconds. The scope of an object is the one its URI names; one
    scope may take ``scope_percent`` of the bytes and of the objects.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_objects: int = MAX_OBJECTS,
        scope_percent: int = 100,
    ) -> None:
        if capacity_bytes < 0 or max_objects < 1 or not 1 <= scope_percent <= 100:
            raise ValueError("capacity_bytes must not be negative, max_objects positive, scope_percent from 1 to 100")
        self._capacity = capacity_bytes
        self._max_objects = max_objects
        self._scope_bytes = capacity_bytes * scope_percent // 100
        self._scope_objects = max(1, max_objects * scope_percent // 100)
        self._clock = clock
        self._objects: OrderedDict[str, _Object] = OrderedDict()  # in the order of the next inspection
        self._shares: dict[bytes | None, _Share] = {}
        self._used = self._expired = self._refused = self._over = self._stored = self._hits = self._misses = 0
        self._etags = itertools.count(1)
        self.leases = Leases(clock)

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def free_bytes(self) -> int:
        return self._capacity - self._used

    async def put(
        self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None, etag: str | None = None
    ) -> ObjectMeta:
        """Store once. Without ``ttl_ms`` the object stays until it is deleted; a copy has the ``etag`` of its original.

        Raises ``Conflict`` if the URI is taken, ``OverQuota`` or ``Unavailable`` if there is no room, ``Malformed`` for
        a URI and ``Unprocessable`` for a TTL that can't be.
        """
        scope = MlcUri.parse(uri).scope
        expires = float("inf") if ttl_ms is None else self.leases.deadline(ttl_ms)
        size = _size(value)
        self._sweep(SWEEP)
        if self._find(uri) is not None:
            raise Conflict("the object's URI is taken: objects are immutable")
        if self._no_room(size, scope) is not None:
            self._sweep(len(self._objects))
        if (refusal := self._no_room(size, scope)) is not None:
            self._over += isinstance(refusal, OverQuota)
            self._refused += not isinstance(refusal, OverQuota)
            raise refusal
        etag = etag or f'"{next(self._etags)}"'
        self._objects[uri] = _Object(value, size, scope, expires, etag)
        share = self._shares.setdefault(scope, _Share())
        share.used += size
        share.objects += 1
        self._used += size
        self._stored += 1
        return ObjectMeta(uri=uri, size=size, etag=etag)

    async def get(self, uri: str, scope: bytes | None) -> bytes | ByteSource | None:
        """The value, or None where it is missing, expired or another scope's: all three look alike."""
        found = self._look_up(uri, scope)
        return None if found is None else found.value

    @asynccontextmanager
    async def reading(self, uri: str, scope: bytes | None) -> AsyncIterator[bytes | None]:
        """The bytes for whoever sends them elsewhere: their room is not given away before the block is left.

        What became bytes only now is looked at again afterwards: if its life has ended meanwhile, it is missing.
        """
        found = self._look_up(uri, scope)
        if found is None:
            yield None
            return
        found.readers += 1
        try:
            if isinstance(found.value, bytes):
                yield found.value
            else:
                copied = await asyncio.to_thread(found.value.to_bytes)
                yield copied if self._find(uri) is found else None
        finally:
            found.readers -= 1
            self._let_go(found)

    async def get_range(self, uri: str, scope: bytes | None, start: int, stop: int) -> bytes | None:
        """Bytes start..stop of the value, fewer at its end; None as ``get``."""
        async with self.reading(uri, scope) as value:
            return None if value is None else value[max(start, 0) : max(stop, 0)]

    async def get_many(self, uris: Sequence[str], scope: bytes | None) -> Sequence[Got]:
        """One answer for each, in order; values that are not bytes stay what they are."""
        values = [await self.get(uri, scope) for uri in uris]
        return tuple(Got("missing") if value is None else Got("ok", value) for value in values)

    async def head(self, uri: str, scope: bytes | None) -> ObjectMeta | None:
        """Size and entity tag; None as ``get``."""
        self._sweep(SWEEP)
        found = self._find(uri)
        return ObjectMeta(uri, found.size, found.etag) if found is not None and found.scope == scope else None

    async def lease(self, uri: str, ttl_ms: int, holder: str = "") -> Lease | None:
        """Hold an object for ``ttl_ms``; None if it is missing. Raises ``TooManyRequests`` at 64 live leases."""
        self.leases.deadline(ttl_ms)
        self._sweep(SWEEP)
        return None if self._find(uri) is None else self.leases.grant(uri, ttl_ms, holder)

    async def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None:
        """Let a live lease end ``ttl_ms`` from now; None if it has run out or was given up (AMB-093)."""
        self._sweep(SWEEP)
        return self.leases.renew(uri, lease_id, ttl_ms)

    async def unlease(self, uri: str, lease_id: str) -> None:
        """Give a lease up; an object that nothing else keeps is gone at once."""
        self._sweep(SWEEP)
        if self.leases.give_up(uri, lease_id):
            self._find(uri)

    async def delete(self, uri: str) -> None:
        """End the object's TTL now: it is gone once no lease is live."""
        self._sweep(SWEEP)
        if (found := self._find(uri)) is not None:
            found.expires = float("-inf")
            self._find(uri)

    def stats(self) -> MemoryStats:
        """Counts as of the last inspection of each object; at most ``max_objects`` steps."""
        return MemoryStats(
            objects=len(self._objects),
            used_bytes=self._used,
            free_bytes=self.free_bytes,
            scopes=len(self._shares),
            leases=len(self.leases),
            expired=self._expired,
            forced=self.leases.forced.total(),
            refused=self._refused,
            over_quota=self._over,
        )

    def tier(self) -> TierStats:
        """The same as any other tier reports itself."""
        return TierStats(
            name="objects", capacity_bytes=self._capacity, used_bytes=self._used, objects=len(self._objects),
            pinned_bytes=sum(o.size for uri, o in self._objects.items() if self.leases.live(uri)), hits=self._hits,
            misses=self._misses, stored=self._stored, refused=self._refused + self._over,
        )  # fmt: skip

    def sweep(self) -> None:
        """Inspect every object now: what is dead is dropped and counted."""
        self._sweep(len(self._objects))

    def _look_up(self, uri: str, scope: bytes | None) -> _Object | None:
        self._sweep(SWEEP)
        found = self._find(uri)
        if found is not None and found.scope != scope:
            found = None
        self._hits += found is not None
        self._misses += found is None
        return found

    def _sweep(self, count: int) -> None:
        for uri in list(itertools.islice(self._objects, count)):
            if self._find(uri) is not None:
                self._objects.move_to_end(uri)

    def _find(self, uri: str) -> _Object | None:
        """The object under ``uri`` if it is alive; a dead one is dropped and counted here, and only here."""
        if (stored := self._objects.get(uri)) is None:
            return None
        if self.leases.live(uri) or self._clock() < stored.expires:
            return stored
        del self._objects[uri]
        self._expired += stored.expires != float("-inf")
        stored.gone = True
        self._let_go(stored)
        return None

    def _let_go(self, stored: _Object) -> None:
        """Free the room of what is neither found nor read any more."""
        if not stored.gone or stored.readers:
            return
        self._used -= stored.size
        share = self._shares[stored.scope]
        share.used -= stored.size
        share.objects -= 1
        if not share.objects:
            del self._shares[stored.scope]

    def _no_room(self, size: int, scope: bytes | None) -> Unavailable | None:
        """Why an object of ``scope`` can't be stored now; what could never be stored is not to be retried."""
        share = self._shares.get(scope, _Share())
        if share.used + size > self._scope_bytes and self._scope_bytes < self._capacity:
            text = f"scope_bytes: {size} more than the {share.used} of this scope are above {self._scope_bytes}"
            return OverQuota(text, retry_after_ms=RETRY_MS if size <= self._scope_bytes else None)
        if share.objects >= self._scope_objects < self._max_objects:
            text = f"scope_objects: this scope has {self._scope_objects} objects already"
            return OverQuota(text, retry_after_ms=RETRY_MS)
        if size > self.free_bytes or len(self._objects) >= self._max_objects:
            text = f"no room for {size} bytes: {self.free_bytes} are free"
            return Unavailable(text, retry_after_ms=RETRY_MS if size <= self._capacity else None)
        return None


def _size(value: bytes | ByteSource) -> int:
    if isinstance(value, bytes):
        return len(value)
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else len(value.to_bytes())
