"""Files of the disk tier: segments cut into equal slots, what a scan makes of them, and who owns the directory.

A segment ``<directory>/segments/<number>-<slot bytes>.seg`` is preallocated. A slot is a header page (``blob.py``) and
the payload. A header of zeros is a free slot; there is no other index, so no damaged page hides another slot.

Law of this module: a slot's header is zero from before its payload changes until after the payload is whole. So a valid
header over a payload that doesn't match is damage, also to a scan that looks on while a server writes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from sdcp_mono.cache.blob import HEADER_BYTES, BadBlob, Blob, checksum, decode_header
from sdcp_mono.cache.slabs import PAGE, Slot, slot_bytes

SEGMENTS: Final = "segments"  # folders and files of the directory
QUARANTINE: Final = "quarantine"
LOCK: Final = "lock"
QUARANTINED: Final = 16  # damaged slots that are kept to look at
TRIES: Final = 3  # readings of a slot that changes under a scan
STAGING: Final = 1 << 20  # bytes a thread moves at once for memory that isn't made of whole pages
ZEROS: Final = bytes(HEADER_BYTES)
_NAME: Final = re.compile(r"([0-9]{6,})-([0-9]{1,12})\.seg")
_local = threading.local()
log = logging.getLogger(__name__)


class TierUnusable(Exception):
    """The directory can't be a disk tier here; one sentence with what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One slot as ``scan`` found it."""

    segment: int
    offset: int
    blob: Blob | None
    state: Literal["ok", "damaged", "changing", "free"]
    detail: str = ""


def _parse(name: str) -> tuple[int, int] | None:
    """Number and slot size from a segment file's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


class SegmentFile:
    """An open segment. Its calls block and raise ``OSError``; threads may share it as long as their slots differ.

    O_DIRECT where the file system has it, so that the page cache holds nothing twice; else the pages are let go after
    each call. Memory that O_DIRECT can't take passes through ``STAGING`` bytes of the calling thread.
    """

    __slots__ = ("_fd", "_inode", "direct", "path")

    def __init__(self, path: Path, create_bytes: int = 0) -> None:
        """Open what is there, or make a new one of ``create_bytes``, its room taken from the file system at once."""
        flags = os.O_CREAT | os.O_TRUNC if create_bytes else 0
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            if create_bytes:
                os.posix_fallocate(self._fd, 0, create_bytes)
            self._inode = os.fstat(self._fd).st_ino
            self.direct = self._go_direct()
        except OSError:
            os.close(self._fd)
            if create_bytes:
                path.unlink(missing_ok=True)
            raise

    def _go_direct(self) -> bool:
        if not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [_scratch()[:PAGE]], 0)  # some take the flag and refuse the IO
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def intact(self, size: int) -> bool:
        """Is the file still where it was, and ``size`` bytes long?"""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return found.st_ino == self._inode and found.st_size == size

    def read(self, offset: int, out: memoryview) -> tuple[bytes, int]:
        """The header page at ``offset`` and how many bytes of the payload came into ``out``: less where it ends."""
        page, chunk = _scratch()[:PAGE], _scratch()[PAGE:]
        if not self.direct or _whole_pages(out):
            got = os.preadv(self._fd, [page, out], offset)
            if not self.direct:
                os.posix_fadvise(self._fd, offset, PAGE + len(out), os.POSIX_FADV_DONTNEED)
            return bytes(page[:got]), max(0, got - PAGE)
        header, done = self.header(offset), 0
        while done < len(out):
            some = min(len(out) - done, STAGING)
            got = min(some, os.preadv(self._fd, [chunk[: -(-some // PAGE) * PAGE]], offset + PAGE + done))
            out[done : done + got] = chunk[:got]
            done += got
            if got < some:
                break
        return header, done

    def header(self, offset: int) -> bytes:
        page = _scratch()[:PAGE]
        return bytes(page[: os.preadv(self._fd, [page], offset)])

    def write(self, offset: int, header: bytes, data: memoryview) -> None:
        """Into a slot whose header is zero: the payload, and the header when the payload is whole."""
        page, chunk = _scratch()[:PAGE], _scratch()[PAGE:]
        if not self.direct or _whole_pages(data):
            self._put(offset + PAGE, data)
        else:
            for start in range(0, len(data), STAGING):
                some = min(len(data) - start, STAGING)
                padded = chunk[: -(-some // PAGE) * PAGE]
                padded[:some] = data[start : start + some]
                padded[some:] = bytes(len(padded) - some)
                self._put(offset + PAGE + start, padded)
        page[:] = header
        self._put(offset, page)
        if not self.direct:
            os.posix_fadvise(self._fd, offset, PAGE + len(data), os.POSIX_FADV_DONTNEED)

    def wipe(self, offset: int) -> None:
        """Mark a slot free, so that what was dropped doesn't come back at a restart."""
        page = _scratch()[:PAGE]
        page[:] = ZEROS
        self._put(offset, page)

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _put(self, offset: int, data: memoryview) -> None:
        done = os.pwritev(self._fd, [data], offset)
        if done != len(data):  # what the kernel does when the room ends in the middle
            raise OSError(errno.ENOSPC, f"{done} of {len(data)} bytes were written")


def _scratch() -> memoryview:
    """This thread's pages: one for a header, then ``STAGING`` bytes that take memory only if they are used."""
    if not hasattr(_local, "pages"):
        _local.pages = memoryview(mmap.mmap(-1, PAGE + STAGING, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    pages: memoryview = _local.pages
    return pages


def _whole_pages(data: memoryview) -> bool:
    return len(data) % PAGE == 0 and (not len(data) or np.frombuffer(data, np.uint8).ctypes.data % PAGE == 0)


class Directory:
    """The directory of a tier, this process's until it ends, however it ends. Thread-safe; raises ``OSError``."""

    def __init__(self, path: Path, floor_bytes: int) -> None:
        """Make it if need be, and lock it; raises ``TierUnusable`` if another process has it."""
        self.path = path
        self._floor = floor_bytes
        self._mutex = threading.Lock()
        self._owner = -1  # descriptor of the lock file
        self.own()

    def own(self) -> None:
        """Have the lock, also where somebody removed its file; raises ``TierUnusable`` if another process has it."""
        with self._mutex:
            if self._owner >= 0 and self._held():
                return
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = _locked(self.path)
            if self._owner >= 0:
                os.close(self._owner)
            self._owner = owner

    def release(self) -> None:
        os.close(self._owner)

    def _held(self) -> bool:
        """False where the next process would not find it locked."""
        try:
            return os.path.samestat(os.stat(self.path / LOCK), os.fstat(self._owner))
        except FileNotFoundError:
            return False

    def spare_bytes(self) -> int:
        """Free space of the file system above the floor; negative below it."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize - self._floor

    def create(self, number: int, size: int, file_bytes: int) -> SegmentFile:
        folder = self.path / SEGMENTS
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # again, where it was removed by hand
        return SegmentFile(folder / f"{number:06d}-{size}.seg", file_bytes)

    def leftovers(self) -> list[tuple[Path, int, int]]:
        """Path, number and slot size of each segment file, sorted. What is unknown is left alone, and said once."""
        folder = self.path / SEGMENTS
        folder.mkdir(exist_ok=True, mode=0o700)
        unknown = [path for path in self.path.iterdir() if path.name not in (LOCK, SEGMENTS, QUARANTINE)]
        found = []
        for path in sorted(folder.iterdir()):
            named = _parse(path.name)
            if named is None:
                unknown.append(path)
            elif path.is_symlink() or not path.is_file():
                raise TierUnusable(f"{path} is no file; move it away, or choose another data folder")
            else:
                found.append((path, *named))
        if unknown:
            log.warning("%s: %d files are not of the disk tier and stay, as %s", self.path, len(unknown), unknown[0])
        return found

    def keep(self, slot: Slot, header: bytes, payload: memoryview) -> None:
        """A damaged slot, to look at: the last ``QUARANTINED`` of them, as far as that leaves the floor alone."""
        with self._mutex:
            if self.spare_bytes() < slot.bytes:
                return
            folder = self.path / QUARANTINE
            folder.mkdir(exist_ok=True, mode=0o700)
            kept = sorted(path for path in folder.glob("*.slot") if path.name[:8].isdigit())
            for old in kept[: -QUARANTINED + 1]:
                old.unlink(missing_ok=True)
            count = int(kept[-1].name[:8]) + 1 if kept else 0
            path = folder / f"{count:08d}-{slot.segment:06d}-{slot.offset}.slot"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines((header, payload))


def _locked(directory: Path) -> int:
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise TierUnusable(f"{directory} is used by process {owner}; give each server a data folder") from None
    except OSError:
        os.close(fd)
        raise
    return fd


# ---- looking on --------------------------------------------------------------------------------------


def scan(directory: Path, *, payload: bool = False) -> Iterator[Entry]:
    """Every slot of a directory, which a server may be using; ``payload`` also checks the bytes. Read-only."""
    for path in sorted((directory / SEGMENTS).glob("*.seg")):
        named = _parse(path.name)
        if named is None or named[1] != slot_bytes(named[1]) or path.is_symlink() or path.is_dir():
            continue  # no server would open it
        number, size = named
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # given up meanwhile
            continue
        try:
            length = os.fstat(fd).st_size
            for offset in range(0, length, size):
                entry = _examine(fd, number, offset, size, payload)
                if entry.state != "free" or offset + size <= length:  # the rest of a file is no slot
                    yield entry
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _examine(fd: int, number: int, offset: int, size: int, payload: bool) -> Entry:
    """Damaged is what was read ``TRIES`` times under one header and was wrong each time."""
    blob: Blob | None = None
    detail, changed = "", False
    for _ in range(TRIES):
        header = os.pread(fd, HEADER_BYTES, offset)
        if header == ZEROS:
            return Entry(number, offset, None, "free")
        blob, detail = None, ""
        try:
            blob, crc = decode_header(header)
            if slot_bytes(HEADER_BYTES + blob.size) != size:
                detail = f"header: {blob.size} bytes are not kept in slots of {size}"
            elif payload and checksum(os.pread(fd, blob.size, offset + HEADER_BYTES)) != crc:
                detail = "payload: its CRC32C is wrong"
        except BadBlob as bad:
            detail = str(bad)
        if not detail:
            return Entry(number, offset, blob, "ok")
        changed |= os.pread(fd, HEADER_BYTES, offset) != header
    return Entry(number, offset, blob, "changing" if changed else "damaged", detail)
