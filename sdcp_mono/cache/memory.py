"""The in-memory tier of the multi-level cache (design, section 5): immutable objects, leases, one hard byte cap.

Law of this module:
- An object lives until its TTL has passed *and* no lease is live. ``delete`` ends the TTL and leaves leases standing.
- Nothing is evicted: what is stored was promised. Without room a put is refused.
- There is no background thread. Every call inspects a few objects in turn and drops the dead ones; a put that finds no
  room inspects them all, which ``max_objects`` bounds.
- ``used_bytes`` is the sum of the sizes of what is stored; ``used_bytes + free_bytes`` is the cap, always.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.ports import ByteSource, Got, Lease, ObjectMeta
from sdcp_mono.core.problems import Conflict, TooManyRequests, Unavailable, Unprocessable

SWEEP: Final = 8  # objects inspected per call: more than the one a call can add, so the dead can't pile up
MAX_OBJECTS: Final = 4096  # two live objects per session and round, many sessions; a full inspection takes about 1 ms
MAX_LEASES: Final = 64  # per object: its readers, and the retries of their lost answers
MAX_TTL_MS: Final = 24 * 3600 * 1000  # a day; what must last longer belongs in a durable tier
RETRY_MS: Final = 1000  # room appears when TTLs pass, which takes seconds


class MemoryStats(Struct, frozen=True):
    """What the store holds now, and what it did since the start."""

    objects: int
    used_bytes: int
    free_bytes: int
    leases: int
    expired: int  # objects dropped because their time had come
    forced: int  # leases that ran out: their holder neither renewed them nor gave them up
    refused: int  # puts refused for want of room


@dataclass(slots=True)
class _Object:
    value: bytes | ByteSource
    size: int
    scope: bytes | None
    expires: float  # seconds on the store's clock; inf without a TTL
    etag: str
    leases: dict[str, float] = field(default_factory=dict)  # lease id -> seconds on the store's clock


class MemoryObjects:
    """``core.ports.ObjectStore`` in this process, for one event loop.

    A ``ByteSource`` is kept as it is and handed out again uncopied; its size is its ``nbytes`` where it has one, else
    the length of its bytes. ``clock`` is monotonic, in seconds. The scope of an object is the one its URI names.
    """

    def __init__(
        self, capacity_bytes: int, *, clock: Callable[[], float] = time.monotonic, max_objects: int = MAX_OBJECTS
    ) -> None:
        if capacity_bytes < 0 or max_objects < 1:
            raise ValueError("capacity_bytes must not be negative, max_objects must be positive")
        self._capacity = capacity_bytes
        self._max_objects = max_objects
        self._clock = clock
        self._objects: OrderedDict[str, _Object] = OrderedDict()  # in the order of the next inspection
        self._used = self._expired = self._forced = self._refused = 0
        self._etags = itertools.count(1)

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def free_bytes(self) -> int:
        return self._capacity - self._used

    async def put(self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None) -> ObjectMeta:
        """Store once. Without ``ttl_ms`` the object stays until it is deleted.

        Raises ``Conflict`` if the URI is taken, ``Unavailable`` if there is no room, ``Malformed`` for a URI and
        ``Unprocessable`` for a TTL that can't be.
        """
        scope = MlcUri.parse(uri).scope
        expires = float("inf") if ttl_ms is None else self._deadline(ttl_ms)
        size = _size(value)
        self._sweep(SWEEP)
        if self._find(uri) is not None:
            raise Conflict("the object's URI is taken: objects are immutable")
        if not self._fits(size):
            self._sweep(len(self._objects))
        if not self._fits(size):
            self._refused += 1
            retry_after_ms = RETRY_MS if size <= self._capacity else None
            raise Unavailable(f"no room for {size} bytes: {self.free_bytes} are free", retry_after_ms=retry_after_ms)
        etag = f'"{next(self._etags)}"'
        self._objects[uri] = _Object(value, size, scope, expires, etag)
        self._used += size
        return ObjectMeta(uri=uri, size=size, etag=etag)

    async def get(self, uri: str, scope: bytes | None) -> bytes | ByteSource | None:
        """The value, or None where it is missing, expired or another scope's: all three look alike."""
        self._sweep(SWEEP)
        found = self._find(uri)
        return found.value if found is not None and found.scope == scope else None

    async def get_range(self, uri: str, scope: bytes | None, start: int, stop: int) -> bytes | None:
        """Bytes start..stop of the value, fewer at its end; None as ``get``."""
        value = await self.get(uri, scope)
        if value is None:
            return None
        return (value if isinstance(value, bytes) else value.to_bytes())[max(start, 0) : max(stop, 0)]

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
        expires = self._deadline(ttl_ms)
        self._sweep(SWEEP)
        if (found := self._find(uri)) is None:
            return None
        if len(found.leases) >= MAX_LEASES:
            raise TooManyRequests(f"the object has {MAX_LEASES} leases already", retry_after_ms=RETRY_MS)
        return self._grant(found, secrets.token_hex(16), expires)

    async def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None:
        """Let a live lease end ``ttl_ms`` from now; None if it has run out or was given up (AMB-093)."""
        expires = self._deadline(ttl_ms)
        self._sweep(SWEEP)
        if (found := self._find(uri)) is None or lease_id not in found.leases:
            return None
        return self._grant(found, lease_id, expires)

    async def unlease(self, uri: str, lease_id: str) -> None:
        """Give a lease up; an object that nothing else keeps is gone at once."""
        self._sweep(SWEEP)
        if (found := self._find(uri)) is not None and found.leases.pop(lease_id, None) is not None:
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
            leases=sum(len(stored.leases) for stored in self._objects.values()),
            expired=self._expired,
            forced=self._forced,
            refused=self._refused,
        )

    def sweep(self) -> None:
        """Inspect every object now: what is dead is dropped and counted."""
        self._sweep(len(self._objects))

    def _sweep(self, count: int) -> None:
        for uri in list(itertools.islice(self._objects, count)):
            if self._find(uri) is not None:
                self._objects.move_to_end(uri)

    def _find(self, uri: str) -> _Object | None:
        """The object under ``uri`` if it is alive; a dead one is dropped and counted here, and only here."""
        if (stored := self._objects.get(uri)) is None:
            return None
        now = self._clock()
        for lease_id in [lease_id for lease_id, expires in stored.leases.items() if expires <= now]:
            del stored.leases[lease_id]
            self._forced += 1
        if stored.leases or now < stored.expires:
            return stored
        del self._objects[uri]
        self._used -= stored.size
        self._expired += stored.expires != float("-inf")
        return None

    def _grant(self, stored: _Object, lease_id: str, expires: float) -> Lease:
        stored.leases[lease_id] = expires
        return Lease(lease_id=lease_id, expires_ms=int(expires * 1000))

    def _fits(self, size: int) -> bool:
        return size <= self.free_bytes and len(self._objects) < self._max_objects

    def _deadline(self, ttl_ms: int) -> float:
        if not 0 < ttl_ms <= MAX_TTL_MS:
            raise Unprocessable(f"ttl_ms must be from 1 to {MAX_TTL_MS}, not {ttl_ms}")
        return self._clock() + ttl_ms / 1000


def _size(value: bytes | ByteSource) -> int:
    if isinstance(value, bytes):
        return len(value)
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else len(value.to_bytes())
