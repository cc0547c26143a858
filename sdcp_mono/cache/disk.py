"""The disk tier: blobs in preallocated segment files that survive a restart (design, section 5, points 5 and 8).

A segment ``<directory>/segments/<number>-<slot bytes>.seg`` is cut into equal slots: a header page, then the payload.
There is no other index; a start reads the headers.

Law of this module: what is read is believed only if header and payload match their CRCs, so a torn write, a truncated
or a swapped file is a miss. A slot is pinned while it is read or written. One lock, never held during the IO of a blob.
Nothing is synced: a cache may lose, it may not lie.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from sdcp_mono.cache.blob import HEADER_BYTES, BadBlob, Blob, checksum, decode_header, encode_header
from sdcp_mono.cache.slabs import PAGE, Slabs, Slot, slot_bytes
from sdcp_mono.cache.slru import Slru
from sdcp_mono.cache.stats import TierStats

log = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 64 << 20  # large enough to be written in long runs, small enough to come and go
FLOOR_BYTES: Final = 1 << 30  # of the file system, left alone
OFF_SECONDS: Final = 30.0  # without writing after the disk was full or failed
QUARANTINED: Final = 16  # damaged slots that are kept to look at
TRIES: Final = 3  # readings of a slot that changes under a scan
ZEROS: Final = bytes(HEADER_BYTES)
_NAME: Final = re.compile(r"([0-9]{6})-([0-9]{1,12})\.seg")


class TierUnusable(Exception):
    """The directory can't be a disk tier here; one sentence with what to do."""


@dataclass(slots=True)
class _File:
    path: Path
    buffered: int
    direct: int | None  # with O_DIRECT, where the file system has it
    inode: int

    def close(self) -> None:
        os.close(self.buffered)
        if self.direct is not None:
            os.close(self.direct)


@dataclass(slots=True, eq=False)
class _Object:
    blob: Blob
    slot: Slot
    crc: int
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One slot as ``scan`` found it."""

    segment: int
    offset: int
    blob: Blob | None
    state: Literal["ok", "damaged", "changing", "free"]
    detail: str = ""


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
    ) -> None:
        size = max(PAGE, min(segment_bytes, capacity_bytes) // PAGE * PAGE)
        self._directory, self._floor = directory, floor_bytes
        self._slabs = Slabs(capacity_bytes, size, self._opened, self._closed)
        self._slru = Slru(self._slabs.total_bytes)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._files: dict[int, _File] = {}
        self._objects: dict[bytes, _Object] = {}
        self._pending = 0  # bytes of slots being written or wiped
        self._off_until = 0.0
        self._closed_down = False
        self._note = ""
        self._hits = self._misses = self._stored = self._evicted = self._refused = self._corrupt = self._errors = 0
        try:
            (directory / "segments").mkdir(parents=True, exist_ok=True, mode=0o700)
            self._owner = _own(directory / "lock")
            self._restore()
        except OSError as error:
            raise TierUnusable(f"{directory} can't be used: {error}; choose another data folder") from error

    # ---- calls -----------------------------------------------------------------------------------

    def find(self, key: bytes) -> Blob | None:
        """What is stored under ``key``; no IO."""
        with self._lock:
            found = self._objects.get(key)
            return None if found is None else found.blob

    def write(self, blob: Blob, data: memoryview, crc: int) -> bool:
        """Store; True also if it is there already. Makes room by evicting what is used least."""
        with self._lock:
            if blob.key in self._objects:
                return True
            if time.monotonic() < self._off_until:
                self._refused += 1
                return False
        slot = self._room(slot_bytes(HEADER_BYTES + blob.size))
        if slot is None:
            return False
        header = self._page()
        header[:] = encode_header(blob, crc)
        try:
            done = self._io(slot, os.pwritev, header, data)
        except OSError as error:
            self._failed(error)
            done = -1
        stored = done == HEADER_BYTES + blob.size
        with self._lock:
            self._pending -= slot.bytes
            if not stored or blob.key in self._objects:
                self._give_back(slot)
            else:
                self._objects[blob.key] = _Object(blob, slot, crc)
                self._slru.add(blob.key, slot.bytes)
                self._stored += 1
        return stored

    def read(self, key: bytes, out: memoryview) -> int | None:
        """The payload into ``out`` (``blob.size`` bytes), checked; its CRC32C, or None for a miss."""
        with self._lock:
            found = self._objects.get(key)
            if found is None or found.blob.size != len(out):
                self._misses += 1
                return None
            found.pins += 1
        header, wrong = self._page(), ""
        try:
            got = self._io(found.slot, os.preadv, header, out)
            if got != HEADER_BYTES + found.blob.size:
                wrong = f"{got} bytes are left of {HEADER_BYTES + found.blob.size}"
            elif decode_header(header) != (found.blob, found.crc) or checksum(out) != found.crc:
                wrong = "it isn't what was written there"
        except BadBlob as bad:
            wrong = str(bad)
        except OSError as error:
            wrong = str(error)
            self._failed(error)
        with self._lock:
            found.pins -= 1
            self._hits += not wrong
            self._misses += bool(wrong)
            if not wrong:
                if self._objects.get(key) is found:
                    self._slru.touch(key)
                return found.crc
            self._corrupt += 1
        log.error("a damaged object is dropped: %s: %s", found.blob.uri, wrong)
        self._quarantine(found, bytes(header), out)
        self.drop(key)
        return None

    def drop(self, key: bytes) -> bool:
        """Forget an object; False if it isn't here, or is being read."""
        with self._lock:
            found = self._objects.get(key)
            if found is None or found.pins:
                return False
            self._take_out(key)
        self._wipe([found.slot])
        return True

    def touch(self, key: bytes) -> None:
        with self._lock:
            if key in self._objects:
                self._slru.touch(key)

    def keys(self) -> tuple[bytes, ...]:
        with self._lock:
            return tuple(self._objects)

    def supervise(self) -> None:
        """Look after the files: what was removed or cut off by others is no longer counted. Call once a second."""
        with self._lock:
            for number, file in list(self._files.items()):
                try:
                    found = os.stat(file.path)
                    good = found.st_ino == file.inode and found.st_size == self._slabs.segment_bytes
                except OSError:
                    good = False
                busy = any(o.pins for o in self._objects.values() if o.slot.segment == number)
                if good or busy or self._pending:
                    continue
                for key in [key for key, o in self._objects.items() if o.slot.segment == number]:
                    self._slru.remove(key)
                    del self._objects[key]
                self._slabs.forget(number)
                self._closed(number)
                self._errors += 1
                log.error("segment %s was removed or cut off by somebody else", file.path)
            if self._note and time.monotonic() >= self._off_until:
                self._note = ""

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name="disk", capacity_bytes=self._slabs.total_bytes, used_bytes=self._slabs.used_bytes - self._pending,
                pinned_bytes=sum(o.slot.bytes for o in self._objects.values() if o.pins), staging_bytes=self._pending,
                objects=len(self._objects), hits=self._hits, misses=self._misses, stored=self._stored,
                evicted=self._evicted, refused=self._refused, corrupt=self._corrupt, errors=self._errors,
                healthy=not self._note, note=self._note,
            )  # fmt: skip

    def check(self) -> None:
        """Recount everything; ``AssertionError`` if used bytes are not the sum of what is there."""
        with self._lock:
            self._slabs.check()
            assert self._slabs.used_bytes == sum(o.slot.bytes for o in self._objects.values()) + self._pending
            assert set(self._slru.victims()) == self._objects.keys()
            assert all(o.pins >= 0 for o in self._objects.values())
            files = sum(os.fstat(file.buffered).st_size for file in self._files.values())
            assert files <= self._slabs.total_bytes

    def close(self) -> None:
        """Give the directory up; may be called again."""
        with self._lock:
            if self._closed_down:
                return
            self._closed_down = True
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._objects.clear()
            os.close(self._owner)

    # ---- room ------------------------------------------------------------------------------------

    def _room(self, need: int) -> Slot | None:
        """A slot for a write, counted as pending; evicts what is in the way."""
        for _ in range(len(self._objects) + 1):
            with self._lock:
                try:
                    slot = self._slabs.allocate(need)
                except OSError as error:
                    self._off(error)
                    slot = None
                if slot is not None:
                    self._pending += slot.bytes
                    return slot
                victims = self._victims(need)
                self._evicted += len(victims)
                gone = [self._take_out(key) for key in victims]
            if not gone:
                break
            self._wipe(gone)
        with self._lock:
            self._refused += 1
        return None

    def _victims(self, need: int) -> list[bytes]:
        """What has to go for one slot of this class: one object of it, else a whole segment of another."""
        free = [key for key in self._slru.victims() if not self._objects[key].pins]
        same = next((key for key in free if self._objects[key].slot.bytes == need), None)
        if same is not None:
            return [same]
        segments: dict[int, list[bytes]] = {}
        for key in free:
            keys = segments.setdefault(self._objects[key].slot.segment, [])
            keys.append(key)
            if len(keys) == self._slabs.used_in(self._objects[key].slot.segment):
                return keys
        return []

    def _take_out(self, key: bytes) -> Slot:
        """With the lock held: no longer found; its slot is pending until it is wiped."""
        self._slru.remove(key)
        slot = self._objects.pop(key).slot
        self._pending += slot.bytes
        return slot

    def _wipe(self, slots: list[Slot]) -> None:
        """Clear the headers, so that what was dropped doesn't come back at a restart, and free the slots."""
        for slot in slots:
            file = self._files.get(slot.segment)
            try:
                if file is not None:
                    os.pwrite(file.buffered, ZEROS, slot.offset)
            except OSError as error:
                self._failed(error)
            with self._lock:
                self._pending -= slot.bytes
                self._give_back(slot)

    def _give_back(self, slot: Slot) -> None:
        if slot.segment in self._files:
            self._slabs.free(slot)

    # ---- files -----------------------------------------------------------------------------------

    def _path(self, segment: int, size: int) -> Path:
        return self._directory / "segments" / f"{segment:06d}-{size}.seg"

    def _opened(self, segment: int, size: int) -> None:
        """A new segment file, its room taken from the file system at once; raises ``OSError``."""
        space = os.statvfs(self._directory)
        if space.f_bavail * space.f_frsize < self._floor + self._slabs.segment_bytes:
            raise OSError(errno.ENOSPC, f"only {self._floor} bytes and less than a segment are free")
        path = self._path(segment, size)
        file = _open(path, os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(file.buffered, 0, self._slabs.segment_bytes)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._files[segment] = file

    def _closed(self, segment: int) -> None:
        file = self._files.pop(segment)
        file.path.unlink(missing_ok=True)
        file.close()

    def _restore(self) -> None:
        """Count what an earlier process left; what has no place here is removed."""
        for path in sorted((self._directory / "segments").iterdir()):
            match = _NAME.fullmatch(path.name)
            number, size = (int(match[1]), int(match[2])) if match else (-1, 0)
            fits = size == slot_bytes(size) <= self._slabs.segment_bytes and number < self._slabs.segments
            if match and not (fits and path.stat().st_size == self._slabs.segment_bytes):
                path.unlink()
            elif match and number not in self._files:
                self._files[number] = file = _open(path, 0)
                found = {}
                for index in range(self._slabs.segment_bytes // size):
                    try:
                        blob, crc = decode_header(os.pread(file.buffered, HEADER_BYTES, index * size))
                    except BadBlob:
                        continue
                    if blob.key not in self._objects and slot_bytes(HEADER_BYTES + blob.size) == size:
                        found[index] = (blob, crc)
                        self._objects[blob.key] = _Object(blob, Slot(number, index, index * size, size), crc)
                        self._slru.add(blob.key, size)
                self._slabs.restore(number, size, found)

    def _page(self) -> memoryview:
        """This thread's header page, aligned."""
        if not hasattr(self._local, "page"):
            self._local.page = memoryview(mmap.mmap(-1, HEADER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        page: memoryview = self._local.page
        return page

    def _io(self, slot: Slot, call: Callable[..., int], header: memoryview, data: memoryview) -> int:
        file = self._files.get(slot.segment)
        if file is None:
            raise OSError(errno.ENOENT, "the segment is gone")
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        aligned = len(data) % PAGE == 0 and address % PAGE == 0
        return call(file.direct if aligned and file.direct is not None else file.buffered, [header, data], slot.offset)

    def _failed(self, error: OSError) -> None:
        with self._lock:
            self._off(error)

    def _off(self, error: OSError) -> None:
        """No writing for a while: a full or failing disk doesn't get better by trying."""
        self._errors += 1
        if time.monotonic() >= self._off_until:
            log.warning("the disk tier takes nothing for %.0f s: %s", OFF_SECONDS, error)
        self._off_until, self._note = time.monotonic() + OFF_SECONDS, str(error)

    def _quarantine(self, found: _Object, header: bytes, payload: memoryview) -> None:
        folder = self._directory / "quarantine"
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
            for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[: -QUARANTINED + 1 or None]:
                old.unlink()
            (folder / f"{found.blob.key.hex()}.blob").write_bytes(header + bytes(payload))
        except OSError as error:
            log.warning("a damaged object could not be kept to look at: %s", error)


def scan(directory: Path, *, payload: bool = False) -> Iterator[Entry]:
    """Every slot of a directory, which a server may be using; ``payload`` also checks the bytes. Read-only."""
    for path in sorted((directory / "segments").glob("*.seg")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        number, size = int(match[1]), int(match[2])
        with path.open("rb") as file:
            for offset in range(0, path.stat().st_size // size * size, size):
                yield _examine(file.fileno(), number, offset, payload)


def _examine(fd: int, number: int, offset: int, payload: bool) -> Entry:
    blob, detail = None, ""
    for _ in range(TRIES):
        header = os.pread(fd, HEADER_BYTES, offset)
        if header == ZEROS or not header.startswith(b"sdcpblob"):
            return Entry(number, offset, None, "free")
        try:
            blob, crc = decode_header(header)
            if not payload or checksum(os.pread(fd, blob.size, offset + HEADER_BYTES)) == crc:
                return Entry(number, offset, blob, "ok")
            detail = "payload: its CRC32C is wrong"
        except BadBlob as bad:
            detail = str(bad)
        if os.pread(fd, HEADER_BYTES, offset) == header:
            return Entry(number, offset, blob, "damaged", detail)
    return Entry(number, offset, blob, "changing", detail)


def _own(path: Path) -> int:
    """Lock the directory until the process ends; raises ``TierUnusable`` if another has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise TierUnusable(f"{path.parent} is used by process {owner}; give each server a data folder") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _open(path: Path, flags: int) -> _File:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        direct: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        direct = None
    return _File(path, fd, direct, os.fstat(fd).st_ino)
