"""The disk tier: blobs in segment files that survive a restart (design, section 5, points 5 and 8).

``segments.py`` says how the files look; a start reads the headers, there is no other index.

Law of this module: what is read is believed only if header and payload match their CRCs, so a torn write, a truncated
or a swapped file is a miss. A slot that is read or written belongs to nobody else until that is over. One lock, never
held during the IO of a blob. Nothing is synced: a cache may lose, it may not lie.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sdcp_mono.cache.blob import HEADER_BYTES, BadBlob, Blob, checksum, decode_header, encode_header
from sdcp_mono.cache.segments import QUARANTINED, ZEROS, Directory, Entry, SegmentFile, TierUnusable, scan
from sdcp_mono.cache.slabs import PAGE, Slabs, Slot, slot_bytes
from sdcp_mono.cache.slru import Slru
from sdcp_mono.cache.stats import TierStats

__all__ = ["DiskTier", "Entry", "TierUnusable", "scan"]

log = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 64 << 20  # large enough to be written in long runs, small enough to come and go
FLOOR_BYTES: Final = 1 << 30  # of the file system, left alone
OFF_SECONDS: Final = 30.0  # without writing after the disk was full or failed
LOG_SECONDS: Final = 1.0  # between two lines about damage: one bad segment has thousands of slots


class _AtFloor(Exception):
    """Another segment would take what is to be left alone."""


@dataclass(slots=True, eq=False)
class _Object:
    blob: Blob
    slot: Slot
    crc: int


class DiskTier:
    """Up to ``capacity_bytes`` in ``directory``, which one process may use at a time. Thread-safe; its calls block.

    Raises ``TierUnusable`` when opened. Afterwards a failure is a miss or a refusal, and a counter.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        floor_bytes: int = FLOOR_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        size = max(PAGE, min(segment_bytes, capacity_bytes) // PAGE * PAGE)
        self._clock = clock
        self._slabs = Slabs(capacity_bytes, size, self._opened, self._closed)
        self._slru = Slru(self._slabs.total_bytes)
        self._lock = threading.Lock()
        self._files: dict[int, SegmentFile] = {}
        self._objects: dict[bytes, _Object] = {}
        self._pins: dict[_Object, int] = {}  # how many read it; also what was dropped meanwhile
        self._pending: set[Slot] = set()  # being written, or to be wiped
        self._running = 0  # calls that may be doing IO
        self._ended = False
        self._off_until = self._quiet_until = float("-inf")
        self._note = ""  # why it is off
        self._tight = False  # no segment more: the floor of free space
        self._hits = self._misses = self._stored = self._evicted = self._refused = self._corrupt = self._errors = 0
        try:
            self._directory = Directory(directory, floor_bytes)
            try:
                self._restore()
            except BaseException:
                self._give_up()
                raise
        except OSError as error:
            raise TierUnusable(f"{directory} can't be used: {error}; choose another data folder") from error

    # ---- calls -----------------------------------------------------------------------------------

    def find(self, key: bytes) -> Blob | None:
        """What is stored under ``key``; no IO."""
        with self._lock:
            found = self._objects.get(key)
            return None if found is None else found.blob

    def write(self, blob: Blob, data: memoryview, crc: int) -> bool:
        """Store; True also if it is there already. Makes room by evicting what is used least.

        Raises ``ValueError`` if ``data`` is not ``blob.size`` bytes.
        """
        if len(data) != blob.size:
            raise ValueError(f"data: {len(data)} bytes instead of {blob.size}")
        with self._using() as usable:
            with self._lock:
                if blob.key in self._objects:
                    return True
                if not usable or self._clock() < self._off_until:
                    self._refused += 1
                    return False
            slot = self._room(slot_bytes(HEADER_BYTES + blob.size))
            if slot is None:
                return False
            try:
                self._files[slot.segment].write(slot.offset, encode_header(blob, crc), data)
                written = True
            except OSError as error:
                self._failed(error)
                written = False
            with self._lock:
                stored = written and blob.key not in self._objects
                if stored:
                    self._pending.remove(slot)
                    self._objects[blob.key] = _Object(blob, slot, crc)
                    self._slru.add(blob.key, slot.bytes)
                    self._stored += 1
            if not stored:
                self._wipe([slot])
            return written

    def read(self, key: bytes, out: memoryview) -> int | None:
        """The payload into ``out`` (``blob.size`` bytes), checked; its CRC32C, or None for a miss."""
        with self._using() as usable:
            with self._lock:
                found = self._objects.get(key)
                if not usable or found is None or found.blob.size != len(out):
                    self._misses += 1
                    return None
                self._pins[found] = self._pins.get(found, 0) + 1
            header, got, wrong = b"", 0, ""
            try:
                header, got = self._files[found.slot.segment].read(found.slot.offset, out)
                wrong = _wrong(found, header, out[:got])
            except OSError as error:
                wrong = str(error)
                self._failed(error)
            with self._lock:
                listed = self._objects.get(key) is found
                if wrong:
                    self._misses += 1
                    self._corrupt += listed and bool(header)
                    if listed:
                        self._take_out(key)
                else:
                    self._hits += 1
                    if listed:
                        self._slru.touch(key)
                last = self._unpin(found)
                dropped = self._objects.get(key) is not found
            if wrong and listed:
                self._say("a damaged object is dropped: %s: %s", found.blob.uri, wrong)
                self._keep(found.slot, header, out[:got])
            if last and dropped:
                self._wipe([found.slot])
            return None if wrong else found.crc

    def drop(self, key: bytes) -> bool:
        """Forget an object; False if it isn't here. What is being read is not found again; its room follows."""
        with self._using() as usable:
            with self._lock:
                found = self._objects.get(key)
                if not usable or found is None:
                    return False
                self._take_out(key)
                idle = found not in self._pins
            if idle:
                self._wipe([found.slot])
            return True

    def keys(self) -> tuple[bytes, ...]:
        with self._lock:
            return tuple(self._objects)

    def supervise(self) -> None:
        """Look after the files; call about once a second.

        What was removed or cut off by others is no longer counted. Below the floor of free space one segment a call is
        given up. Writing is allowed again when it has been off for long enough.
        """
        with self._using() as usable:
            if not usable:
                return
            with self._lock:
                files = dict(self._files)
            lost = [number for number, file in files.items() if not file.intact(self._slabs.segment_bytes)]
            try:
                self._directory.own()
                spare = self._directory.spare_bytes()
            except (TierUnusable, OSError) as error:
                self._failed(error)
                spare = 0
            with self._lock:
                busy = self._busy()
                gone = [n for n in lost if self._files.get(n) is files[n] and n not in busy]
                for number in gone:
                    self._forget(number)
                self._errors += len(gone)
                if spare < 0:
                    self._give_way(busy)
                self._tight &= spare < self._slabs.segment_bytes
                if self._clock() >= self._off_until:
                    self._note = ""
            if gone:
                self._say("%d segments were removed or cut off by somebody else, as %s", len(gone), files[gone[0]].path)

    def stats(self) -> TierStats:
        with self._lock:
            pending = sum(slot.bytes for slot in self._pending)
            note = self._note or ("too little of the file system is free" if self._tight else "")
            return TierStats(
                name="disk", capacity_bytes=self._slabs.total_bytes, used_bytes=self._slabs.used_bytes - pending,
                pinned_bytes=sum(o.slot.bytes for o in self._pins if o.slot not in self._pending),
                staging_bytes=pending, objects=len(self._objects), hits=self._hits, misses=self._misses,
                stored=self._stored, evicted=self._evicted, refused=self._refused, corrupt=self._corrupt,
                errors=self._errors, healthy=not note, note=note,
            )  # fmt: skip

    def check(self) -> None:
        """Recount everything; ``AssertionError`` if used bytes are not the sum of what is there."""
        with self._lock:
            self._slabs.check()
            used = sum(o.slot.bytes for o in self._objects.values()) + sum(slot.bytes for slot in self._pending)
            assert self._slabs.used_bytes == used
            assert not self._pending & {o.slot for o in self._objects.values()}
            assert set(self._slru.victims()) == self._objects.keys()
            assert all(pins > 0 for pins in self._pins.values())
            assert sum(file.size for file in self._files.values()) <= self._slabs.total_bytes

    def close(self) -> None:
        """Give the directory up, at once or when the last call is over; may be called again."""
        with self._lock:
            first, self._ended = not self._ended, True
            if first and not self._running:
                self._give_up()

    @contextmanager
    def _using(self) -> Iterator[bool]:
        """Around every call that does IO; False after the end. Files stay open so long: their numbers are reused."""
        with self._lock:
            usable = not self._ended
            self._running += usable
        try:
            yield usable
        finally:
            with self._lock:
                self._running -= usable
                if usable and self._ended and not self._running:
                    self._give_up()

    def _give_up(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._objects.clear()
        self._directory.release()

    # ---- room ------------------------------------------------------------------------------------

    def _room(self, need: int) -> Slot | None:
        """A slot for a write, pending; evicts what is in the way. Never what would not help."""
        for _ in range(len(self._objects) + 1):
            with self._lock:
                others = need <= self._slabs.segment_bytes  # may another class give a segment up for this one?
                try:
                    slot = self._slabs.allocate(need)
                except _AtFloor:
                    slot, others = None, False
                    self._at_floor()
                except OSError as error:
                    slot, others = None, False
                    self._off(error)
                if slot is not None:
                    self._pending.add(slot)
                    return slot
                victims = self._victims(need, others)
                self._evicted += len(victims)
                gone = [self._take_out(key) for key in victims]
            if not gone:
                break
            self._wipe(gone)
        with self._lock:
            self._refused += 1
        return None

    def _victims(self, need: int, others: bool) -> list[bytes]:
        """What goes for one slot of ``need`` bytes: the least used of its class, else a whole segment of another."""
        for key in self._slru.victims():
            found = self._objects[key]
            if found.slot.bytes == need and found not in self._pins:
                return [key]
        return self._segment_to_go(self._busy()) if others else []

    def _segment_to_go(self, busy: set[int]) -> list[bytes]:
        """What is in the segment whose most used object is used least; nothing if all are busy."""
        segments: dict[int, list[bytes]] = {}
        for key in self._slru.victims():
            number = self._objects[key].slot.segment
            keys = segments.setdefault(number, [])
            keys.append(key)
            if len(keys) == self._slabs.used_in(number) and number not in busy:
                return keys
        return []

    def _busy(self) -> set[int]:
        """Segments with a slot that is being read, written or wiped."""
        return {slot.segment for slot in self._pending} | {found.slot.segment for found in self._pins}

    def _take_out(self, key: bytes) -> Slot:
        """No longer found; its slot is pending until it is wiped."""
        self._slru.remove(key)
        slot = self._objects.pop(key).slot
        self._pending.add(slot)
        return slot

    def _unpin(self, found: _Object) -> bool:
        """Was it the last one?"""
        self._pins[found] -= 1
        if self._pins[found]:
            return False
        del self._pins[found]
        return True

    def _wipe(self, slots: list[Slot]) -> None:
        """Clear the headers of pending slots and free them. Without the lock."""
        for slot in slots:
            try:
                self._files[slot.segment].wipe(slot.offset)
            except OSError as error:  # at worst it is found again after a restart: the same bytes, checked
                self._failed(error)
            with self._lock:
                self._pending.remove(slot)
                self._slabs.free(slot)

    # ---- files -----------------------------------------------------------------------------------

    def _opened(self, segment: int, size: int) -> None:
        """A new segment file for ``Slabs``; raises ``OSError``, or ``_AtFloor``."""
        if self._directory.spare_bytes() < self._slabs.segment_bytes:
            raise _AtFloor
        self._files[segment] = self._directory.create(segment, size, self._slabs.segment_bytes)

    def _closed(self, segment: int) -> None:
        file = self._files.pop(segment)
        try:
            file.remove()
        except OSError as error:  # the next start removes it, or counts it
            self._off(error)

    def _forget(self, segment: int) -> None:
        """A segment and what is in it, none of which is busy."""
        for key in [key for key, found in self._objects.items() if found.slot.segment == segment]:
            self._slru.remove(key)
            del self._objects[key]
        self._slabs.forget(segment)
        self._closed(segment)

    def _give_way(self, busy: set[int]) -> None:
        """Others need the disk: an empty segment goes, else the one that is used least."""
        self._at_floor()
        number = next((n for n in self._files if not self._slabs.used_in(n) and n not in busy), None)
        keys = self._segment_to_go(busy) if number is None else []
        if keys:
            number = self._objects[keys[0]].slot.segment
        if number is not None:
            self._evicted += len(keys)
            self._forget(number)

    def _restore(self) -> None:
        """Count what an earlier process left; what has no place here is removed."""
        for path, number, size in self._directory.leftovers():
            fits = size == slot_bytes(size) <= self._slabs.segment_bytes and number < self._slabs.segments
            if fits and number not in self._files and path.stat().st_size == self._slabs.segment_bytes:
                self._files[number] = file = SegmentFile(path)
                self._slabs.restore(number, size, self._restored(file, number, size))
            else:
                path.unlink()

    def _restored(self, file: SegmentFile, number: int, size: int) -> list[int]:
        """The slots of a segment that hold something; the others are made free."""
        used = []
        for index in range(self._slabs.segment_bytes // size):
            slot = Slot(number, index, index * size, size)
            header = file.header(slot.offset)
            if header == ZEROS:
                continue
            try:
                blob, crc = decode_header(header)
                good = slot_bytes(HEADER_BYTES + blob.size) == size
            except BadBlob:
                good = False
            if good and blob.key not in self._objects:
                self._objects[blob.key] = _Object(blob, slot, crc)
                self._slru.add(blob.key, size)
                used.append(index)
                continue
            if not good:
                self._corrupt += 1
                if self._corrupt <= QUARANTINED:
                    self._keep(slot, *self._bytes_of(file, slot))
            file.wipe(slot.offset)
        return used

    @staticmethod
    def _bytes_of(file: SegmentFile, slot: Slot) -> tuple[bytes, memoryview]:
        payload = memoryview(bytearray(slot.bytes - HEADER_BYTES))
        header, got = file.read(slot.offset, payload)
        return header, payload[:got]

    # ---- what went wrong -------------------------------------------------------------------------

    def _failed(self, error: OSError | TierUnusable) -> None:
        with self._lock:
            self._off(error)

    def _off(self, error: OSError | TierUnusable) -> None:
        """No writing for a while: a full or failing disk doesn't get better by trying."""
        self._errors += 1
        if self._clock() >= self._off_until:
            log.warning("the disk tier takes nothing for %.0f s: %s", OFF_SECONDS, error)
        self._off_until, self._note = self._clock() + OFF_SECONDS, str(error)

    def _at_floor(self) -> None:
        if not self._tight:
            self._tight = True
            self._errors += 1
            log.warning("the disk tier takes no more room: its floor of free space is reached")

    def _keep(self, slot: Slot, header: bytes, payload: memoryview) -> None:
        try:
            if header:
                self._directory.keep(slot, header, payload)
        except OSError as error:
            self._say("a damaged object could not be kept to look at: %s", error)

    def _say(self, line: str, *values: object) -> None:
        """Counters tell how often; the log tells what, now and then."""
        with self._lock:
            now = self._clock()
            told, self._quiet_until = now < self._quiet_until, max(self._quiet_until, now + LOG_SECONDS)
        if not told:
            log.error(line, *values)


def _wrong(found: _Object, header: bytes, payload: memoryview) -> str:
    """What is wrong with what was read; "" if nothing is."""
    if len(payload) != found.blob.size:
        return f"{len(header) + len(payload)} bytes are left of {HEADER_BYTES + found.blob.size}"
    try:
        if decode_header(header) != (found.blob, found.crc):
            return "it isn't what was written there"
    except BadBlob as bad:
        return str(bad)
    return "" if checksum(payload) == found.crc else "payload: its CRC32C is wrong"
