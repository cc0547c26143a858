"""The host tier: objects in this machine's memory (design, section 5).

Law of this module:
- Room is *free*, *staging* (promised to a writer that has neither committed nor aborted) or *used* (by an object), in
  whole slots; ``free + used + staging == total`` at every moment, and total is at most the capacity.
- A reservation is a promise: no commit fails for want of room. Only ``evict`` evicts.
- While an object is pinned its bytes neither change nor move. A pinned one that is dropped is found no more, and its
  room is free after its last pin.
- One lock, held for bookkeeping (and to map a new segment), never while bytes are copied or a caller is asked.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sdcp_mono.cache.blob import Blob
from sdcp_mono.cache.slabs import PAGE, Slabs, Slot, slot_bytes
from sdcp_mono.cache.slru import Slru
from sdcp_mono.cache.stats import TierStats

SEGMENT_BYTES: Final = 16 << 20  # room for tens of KV blocks, small beside any cache; a larger object is refused


def anonymous(size: int) -> memoryview:
    """``size`` bytes of private zeroed memory from a page boundary on, unmapped when nothing refers to it any more."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@dataclass(slots=True, eq=False)
class _Object:
    blob: Blob
    slot: Slot
    data: memoryview  # read-only
    crc: int
    pins: int = 0
    touches: int = 1


class HostTier:
    """Up to ``capacity_bytes``, of which rooms with ``staging`` may hold ``staging_bytes`` at a time. Thread-safe.

    Its segments have ``segment_bytes`` or more, but under twice as many, or all the capacity where that is less.
    ``memory(n)`` makes n writable bytes that begin at a page boundary, when they are first needed; if it raises
    ``OSError`` or ``MemoryError``, the room is refused and the tier is not healthy until it succeeds.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        staging_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        memory: Callable[[int], memoryview] = anonymous,
    ) -> None:
        segment = capacity_bytes // max(1, capacity_bytes // segment_bytes) // PAGE * PAGE  # no remainder to lose
        self._slabs = Slabs(capacity_bytes, max(PAGE, segment), self._open_segment, self._close_segment)
        self._slru = Slru(self._slabs.total_bytes)
        self._staging_limit = staging_bytes
        self._memory = memory
        self._lock = threading.Lock()
        self._segments: dict[int, memoryview] = {}
        self._objects: dict[bytes, _Object] = {}
        self._dropped: set[_Object] = set()  # pinned ones that are found no more
        self._rooms: set[Room] = set()
        self._used = self._pinned = self._staging = 0  # bytes; staging of the rooms that asked for it
        self._hits = self._misses = self._stored = self._evicted = self._refused = self._errors = 0
        self._wanted = 0  # bytes of the slot that was refused last, 0 if none was: the next eviction makes one
        self._note = ""

    def reserve(self, blob: Blob, *, staging: bool = False) -> Room | None:
        """Room to write ``blob`` into; None if there is none now. Never evicts, never waits.

        After a None, ``evict(slot_bytes(blob.size))`` makes room if any can be made.
        """
        size = slot_bytes(blob.size)
        with self._lock:
            over = staging and self._staging + size > self._staging_limit
            slot = None if over else self._allocate(size)
            if slot is None:
                self._refused += 1
                return None
            self._staging += size if staging else 0
            room = Room(self, blob, slot, self._view(slot, blob), staging)
            self._rooms.add(room)
            return room

    def pin(self, key: bytes, *, use: bool = True) -> Pin | None:
        """Hold the object ``key`` where and as it is until the pin is released; None, and a miss, if it isn't here.

        Without ``use`` it is only looked after: neither hit nor miss, and no more worth keeping than before.
        """
        with self._lock:
            found = self._objects.get(key)
            if found is None:
                self._misses += use
                return None
            if use:
                self._hits += 1
                self._slru.touch(key)
                found.touches += 1
            self._pinned += 0 if found.pins else found.slot.bytes
            found.pins += 1
            return Pin(self, found)

    def touches(self, key: bytes) -> int:
        """How often the object was of use: 1 after storing, one more per pin; 0 if it isn't here."""
        with self._lock:
            found = self._objects.get(key)
            return found.touches if found else 0

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._objects

    def keys(self) -> tuple[bytes, ...]:
        with self._lock:
            return tuple(self._objects)

    def drop(self, key: bytes) -> bool:
        """Forget an object; False if it isn't here."""
        with self._lock:
            return self._drop(key)

    def evict(self, want: int, keep: Callable[[bytes], bool] = lambda key: False) -> int:
        """Drop objects, least useful first, until ``want`` bytes are free and what was refused last would fit.

        Pinned objects stay, and those that ``keep`` says to keep. Returns the bytes freed.
        """
        with self._lock:
            order = tuple(self._slru.victims())
        freed = 0
        goners: dict[int, list[bytes]] = {}  # segment -> what in it could go
        for key in order:
            with self._lock:
                if self._slabs.free_bytes >= want and self._wanted_fits():
                    break
            if keep(key):
                continue
            with self._lock:
                found = self._objects.get(key)
                if found is None or found.pins:
                    continue
                keys = [key]
                if self._slabs.free_bytes >= want:
                    # Enough is free, but in segments of other classes: the first segment that can go whole has to.
                    keys = goners.setdefault(found.slot.segment, [])
                    keys.append(key)
                    if len(keys) < self._slabs.used_in(found.slot.segment):
                        continue
                freed += self._evict(keys)
        with self._lock:
            if self._wanted_fits():
                self._wanted = 0
        return freed

    def stats(self) -> TierStats:
        """Now; objects that are dropped but still pinned count as used, not as objects."""
        with self._lock:
            return TierStats(
                name="host", capacity_bytes=self._slabs.total_bytes, used_bytes=self._used, pinned_bytes=self._pinned,
                staging_bytes=self._slabs.used_bytes - self._used, objects=len(self._objects), hits=self._hits,
                misses=self._misses, stored=self._stored, evicted=self._evicted, refused=self._refused,
                errors=self._errors, healthy=not self._note, note=self._note,
            )  # fmt: skip

    def check(self) -> None:
        """Recount everything; ``AssertionError`` if the law does not hold."""
        with self._lock:
            self._slabs.check()
            objects = [*self._objects.values(), *self._dropped]
            slots = [held.slot for held in objects] + [room.slot for room in self._rooms]
            assert len(set(slots)) == len(slots), "two writers or objects in one slot"
            assert self._slabs.used_bytes == sum(slot.bytes for slot in slots)
            assert self._used == sum(held.slot.bytes for held in objects)
            assert self._pinned == sum(held.slot.bytes for held in objects if held.pins)
            assert self._staging == sum(room.slot.bytes for room in self._rooms if room.staging)
            assert all(held.pins >= 0 for held in objects)
            assert all(held.pins for held in self._dropped)
            assert sorted(self._slru.victims()) == sorted(self._objects)

    # Below, down to the classes: called with the lock held.

    def _allocate(self, size: int) -> Slot | None:
        try:
            slot = self._slabs.allocate(size)
        except (OSError, MemoryError) as e:
            self._errors += 1
            self._note = f"no memory for a segment: {e}"
            return None
        if slot is None and size <= self._slabs.segment_bytes:
            self._wanted = size
        return slot

    def _open_segment(self, segment: int, slot_bytes: int) -> None:
        self._segments[segment] = self._memory(self._slabs.segment_bytes)
        self._note = ""

    def _close_segment(self, segment: int) -> None:
        del self._segments[segment]

    def _view(self, slot: Slot, blob: Blob) -> memoryview:
        return self._segments[slot.segment][slot.offset : slot.offset + blob.size]

    def _wanted_fits(self) -> bool:
        return not self._wanted or self._slabs.fits(self._wanted)

    def _drop(self, key: bytes) -> bool:
        found = self._objects.pop(key, None)
        if found is None:
            return False
        self._slru.remove(key)
        if found.pins:
            self._dropped.add(found)
        else:
            self._free(found)
        return True

    def _evict(self, keys: list[bytes]) -> int:
        before = self._slabs.free_bytes
        for key in keys:
            found = self._objects.get(key)
            if found and not found.pins:
                self._evicted += self._drop(key)
        return self._slabs.free_bytes - before

    def _free(self, gone: _Object) -> None:
        self._slabs.free(gone.slot)
        self._used -= gone.slot.bytes

    def _end(self, room: Room, crc: int | None) -> bool:
        if room not in self._rooms:
            raise ValueError("room: was committed or aborted before")
        self._rooms.remove(room)
        self._staging -= room.slot.bytes if room.staging else 0
        key = room.blob.key
        if crc is None or key in self._objects:
            self._slabs.free(room.slot)
            return False
        self._objects[key] = _Object(room.blob, room.slot, self._view(room.slot, room.blob).toreadonly(), crc)
        self._slru.add(key, room.slot.bytes)
        self._used += room.slot.bytes
        self._stored += 1
        return True

    def _unpin(self, held: _Object) -> None:
        held.pins -= 1
        if not held.pins:
            self._pinned -= held.slot.bytes
            if held in self._dropped:
                self._dropped.remove(held)
                self._free(held)


class Room:
    """Memory promised to one writer: ``data`` is ``blob.size`` writable bytes from a page boundary on, not zeroed.

    ``commit`` or ``abort`` ends it, once; a second time is a ``ValueError`` and changes nothing.
    """

    __slots__ = ("_tier", "blob", "data", "slot", "staging")

    def __init__(self, tier: HostTier, blob: Blob, slot: Slot, data: memoryview, staging: bool) -> None:
        self._tier, self.blob, self.slot, self.data, self.staging = tier, blob, slot, data, staging

    def commit(self, crc: int) -> bool:
        """Store what was written, whose CRC32C is ``crc``; False, and given back, if the key was stored meanwhile."""
        with self._tier._lock:
            stored = self._tier._end(self, crc)
        _close(self.data)
        return stored

    def abort(self) -> None:
        """Give the room back unused."""
        with self._tier._lock:
            self._tier._end(self, None)
        _close(self.data)


class Pin:
    """A hold on a stored object: ``data``, read-only, stays as and where it is until ``release``; a context manager."""

    __slots__ = ("_held", "_tier", "blob", "crc", "data")

    def __init__(self, tier: HostTier, held: _Object) -> None:
        self._tier = tier
        self._held: _Object | None = held
        self.blob, self.crc, self.data = held.blob, held.crc, held.data[:]

    @property
    def dropped(self) -> bool:
        """Whether the object was dropped since it was pinned."""
        with self._tier._lock:
            return self._held in self._tier._dropped

    def release(self) -> None:
        """Let go, once; a second time is a ``ValueError`` and changes nothing."""
        with self._tier._lock:
            if self._held is None:
                raise ValueError("pin: was released before")
            self._tier._unpin(self._held)
            self._held = None
        _close(self.data)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _close(view: memoryview) -> None:
    """End a view of memory that may be another object's from now on: a late use of it raises ``ValueError``."""
    with contextlib.suppress(BufferError):  # an array over it is still alive; its owner answers for it
        view.release()
