"""The tiers below the device as one: host memory, disk, and what others hold (design, section 5).

    offer (write-through)  -> host -> remote (best effort)
    second use, or eviction from host -> disk
    load: host, else disk -> host, else remote -> host; each promotion is checked against the blob's CRC

Law of this module: a failure is a miss and a counter, never wrong bytes and never an exception for who asks; nobody
waits without a deadline, and nothing holds room while it waits for other room.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
from msgspec import structs

from sdcp_mono.cache.blob import Blob, checksum, pack
from sdcp_mono.cache.evictor import Evictor
from sdcp_mono.cache.host import HostTier, Pin, Room
from sdcp_mono.cache.others import Others
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.stats import Rate, TierStats
from sdcp_mono.cache.transfers import STOP_SECONDS, Transfers
from sdcp_mono.core.ports import ObjectStore
from sdcp_mono.core.problems import Conflict, Unavailable, Unprocessable

log = logging.getLogger(__name__)

HIGH, LOW = 0.90, 0.80  # of host memory: where the evictor begins, and where it stops
CHUNK: Final = 8  # blobs a job loads: a long prefix is read by all threads, a short one costs one job
HOST_GUESS, DISK_GUESS = 2e9, 1e8  # bytes a second before anything was measured: careful, not hopeless
SECOND_USE: Final = 2  # touches: storing counts as one
GET_SECONDS: Final = 10.0  # of an object that another machine asks for
PUT_SECONDS: Final = 10.0  # of one that it sends: a disk that makes no room in that time hangs


class Disk(Protocol):
    """What is asked of ``DiskTier``; blocking."""

    def find(self, key: bytes) -> Blob | None: ...
    def write(self, blob: Blob, data: memoryview, crc: int) -> bool: ...
    def read(self, key: bytes, out: memoryview) -> int | None: ...
    def drop(self, key: bytes) -> bool: ...
    def keys(self) -> Sequence[bytes]: ...
    def stats(self) -> TierStats: ...
    def supervise(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Load:
    """One load under way: its jobs fill ``pins`` until ``deadline``; afterwards they let go of what they get."""

    blobs: Sequence[Blob]
    deadline: float
    pins: list[Pin | None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False

    def give(self, index: int, pin: Pin) -> bool:
        with self.lock:
            if self.over:
                pin.release()
                return False
            self.pins[index] = pin
            return True

    def take(self) -> list[Pin]:
        """End it: the leading ones; the rest is released."""
        with self.lock:
            self.over = True
            count = next((i for i, pin in enumerate(self.pins) if pin is None), len(self.pins))
            for pin in self.pins[count:]:
                if pin is not None:
                    pin.release()
            return [pin for pin in self.pins[:count] if pin is not None]


class Loaded:
    """Blobs in host memory, pinned until ``close``; a second call does nothing."""

    def __init__(self, pins: Sequence[Pin]) -> None:
        self._pins = list(pins)
        self.blocks: Sequence[memoryview] = [pin.data for pin in self._pins]

    def close(self) -> None:
        pins, self._pins = self._pins, []
        for pin in pins:
            pin.release()


class Tiers:
    """``disk`` and ``remote`` may be missing.

    ``start`` and ``stop`` belong to one event loop, where loads are asked.
    """

    def __init__(
        self, host: HostTier, disk: Disk | None, remote: ObjectStore | None, transfers: Transfers | None = None
    ) -> None:
        self.host = host
        self.disk = disk
        self.others = None if remote is None else Others(remote, partial(host.pin, use=False))
        self.transfers = transfers or Transfers()
        self.evictor = Evictor(self._tidy)
        self._host_rate, self._disk_rate = Rate(HOST_GUESS), Rate(DISK_GUESS)
        self._corrupt = 0  # found damaged in host memory
        self._unsaved = 0  # writes that the disk raised at
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tidying = threading.Lock()
        self._storing = threading.Condition()
        self._being_stored: set[bytes] = set()  # keys

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.evictor.start()

    async def stop(self) -> None:
        """End it within about twice ``STOP_SECONDS``, also while the disk hangs: then its threads are left to it."""
        if self.others is not None:
            await self.others.stop()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # A thread of its own: the loop's may all be busy, and are joined however long they take.
        threading.Thread(
            target=self._end, args=(partial(_finish_soon, loop, ended),), name="ending", daemon=True
        ).start()
        await ended

    def _end(self, finished: Callable[[], None]) -> None:
        try:
            ended = self.transfers.stop()
            if not (self.evictor.stop(STOP_SECONDS) and ended):
                log.error("the disk tier hangs: what was being copied to it is lost")
            elif self.disk is not None:
                self.disk.close()
        except Exception:
            log.exception("the tiers could not be ended in order")
        finally:
            finished()

    # ---- down: from the device -------------------------------------------------------------------

    def offer(self, blob: Blob, data: memoryview, done: Callable[[], None]) -> bool:
        """Copy ``data`` to host memory soon; ``done`` is called once when it isn't read any more.

        False: it is there, or too many wait; then ``done`` is not called. Any thread; never waits.
        """
        _check_size(blob, data)
        if blob.key in self.host:
            return False
        return self.transfers.submit(partial(self._store, blob, data, done), done)

    def _store(self, blob: Blob, data: memoryview, done: Callable[[], None]) -> None:
        try:
            stored = self._take(blob, data)
        finally:
            done()
        if stored and self.others is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: nothing is sent any more
                self._loop.call_soon_threadsafe(self.others.send_soon, blob)

    def _take(self, blob: Blob, data: memoryview, *, new: bool = False) -> bool | None:
        """Copy bytes to host memory; False if the URI is taken there (``new``: or on disk), None without room."""
        with self._alone(blob.key) as alone:
            if not alone:
                return None
            # In this order: what leaves host memory is on disk before it goes.
            if blob.key in self.host or (new and self._on_disk(blob.key)):
                return False
            room = self._room(blob)
            if room is None:
                return None
            try:
                np.copyto(np.frombuffer(room.data, np.uint8), np.frombuffer(data, np.uint8))
                crc = checksum(room.data)
            except BaseException:
                room.abort()
                raise
            return room.commit(crc)

    @contextmanager
    def _alone(self, key: bytes) -> Iterator[bool]:
        """One at a time stores a key: it could be in host memory, on disk and gone again between a look and a commit.

        False if another one takes too long.
        """
        with self._storing:
            alone = self._storing.wait_for(lambda: key not in self._being_stored, PUT_SECONDS)
            if alone:
                self._being_stored.add(key)
        try:
            yield alone
        finally:
            if alone:
                with self._storing:
                    self._being_stored.discard(key)
                    self._storing.notify_all()

    async def _taken(self, blob: Blob, data: memoryview, *, new: bool, seconds: float) -> bool | None:
        """``_take`` on a thread that nobody else waits for; None also where it takes too long, or too many wait."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        finished = partial(_finish_soon, loop, done)
        taken: list[bool | None] = []

        def take() -> None:
            try:
                taken.append(self._take(blob, data, new=new))
            finally:
                finished()

        if self.transfers.submit(take, finished):
            await asyncio.wait([done], timeout=seconds)
        return taken[0] if taken else None

    def _on_disk(self, key: bytes) -> bool:
        return self.disk is not None and self.disk.find(key) is not None

    def _room(self, blob: Blob, *, staging: bool = False) -> Room | None:
        """Room in host memory; makes some where that takes no waiting for others."""
        room = self.host.reserve(blob, staging=staging)
        if room is None:
            self._free(slot_bytes(blob.size))
            room = self.host.reserve(blob, staging=staging)
        if self._over():
            self.evictor.wake()
        return room

    def _over(self) -> bool:
        stats = self.host.stats()
        return stats.used_bytes + stats.staging_bytes > HIGH * stats.capacity_bytes

    def _free(self, want: int) -> None:
        """Make ``want`` bytes free, what is used least first; what goes is on disk before it goes."""
        refused: set[bytes] = set()

        def keep(key: bytes) -> bool:
            if not self._saved(key):
                refused.add(key)
            return key in refused

        self.host.evict(want, keep)
        # What the disk did not take is lost, and a miss; but not what came meanwhile and it was never asked to take.
        self.host.evict(want, lambda key: not (key in refused or self._on_disk(key)))

    def _save(self, key: bytes) -> None:
        self._saved(key)

    def _saved(self, key: bytes) -> bool:
        """Have an object of host memory on disk too; True where there is no disk. It is pinned while it is written."""
        if self.disk is None or self._on_disk(key):
            return True
        pin = self.host.pin(key, use=False)
        if pin is None:
            return True
        with pin:
            try:
                saved = self.disk.write(pin.blob, pin.data, pin.crc)
                if pin.dropped:  # while it was written: it must not come back
                    self.disk.drop(key)
            except Exception:
                self._unsaved += 1
                log.exception("an object could not be written to disk")
                return False
            return saved

    # ---- up: to the device -----------------------------------------------------------------------

    def predict(self, blobs: Sequence[Blob]) -> tuple[int, float]:
        """How many of the leading blobs are in host memory or on disk, and the seconds that loading them would take.

        Where there are others to ask, the rest is counted as if they had it: whether they do shows in the loading.
        """
        count, seconds = 0, 0.0
        for blob in blobs:
            if blob.key in self.host:
                rate = self._host_rate
            elif self._on_disk(blob.key):
                rate = self._disk_rate
            elif self.others is not None:
                rate = self.others.rate
            else:
                break
            count += 1
            seconds += rate.seconds(blob.size)
        return count, seconds

    async def load(self, blobs: Sequence[Blob], seconds: float) -> Loaded:
        """The leading blobs, pinned in host memory and checked; fewer if one is missing, damaged or late.

        What neither host memory nor disk has is asked of others first.
        """
        load = _Load(blobs, time.monotonic() + seconds, [None] * len(blobs))
        if self.others is not None:
            await self._ask(self.others, blobs, seconds / 2)  # the rest is for what did arrive
        loop = asyncio.get_running_loop()
        waiting = []
        try:
            for start in range(0, len(blobs), CHUNK):
                done: asyncio.Future[None] = loop.create_future()
                finished = partial(_finish_soon, loop, done)
                if not self.transfers.submit(partial(self._load, load, start, finished), finished):
                    break
                waiting.append(done)
            if waiting:
                await asyncio.wait(waiting, timeout=max(0.0, load.deadline - time.monotonic()))
        except BaseException:  # who asked has gone: nobody would release what comes
            for pin in load.take():
                pin.release()
            raise
        return Loaded(load.take())

    async def _ask(self, others: Others, blobs: Sequence[Blob], seconds: float) -> None:
        """Have in host memory what is neither there nor on disk, as far as it comes in time."""

        async def take(blob: Blob, data: memoryview) -> bool:
            return await self._taken(blob, data, new=False, seconds=seconds) is not None

        missing = [blob for blob in blobs if blob.key not in self.host and not self._on_disk(blob.key)]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await others.fetch(missing, take)

    def _load(self, load: _Load, start: int, finished: Callable[[], None]) -> None:
        try:
            for index in range(start, min(start + CHUNK, len(load.blobs))):
                if load.over or time.monotonic() >= load.deadline:
                    return
                pin = self._promote(load.blobs[index])
                if pin is None or not load.give(index, pin):
                    return
        finally:
            finished()

    def _promote(self, blob: Blob) -> Pin | None:
        """A checked pin on a blob, from host memory or from disk; None is a miss."""
        started = time.perf_counter()
        pin = self.host.pin(blob.key)
        if pin is None:
            return self._from_disk(blob)
        if pin.blob.size != blob.size:  # it is somebody else's business what it is
            pin.release()
            return None
        if checksum(pin.data) == pin.crc:
            self._host_rate.measured(blob.size, time.perf_counter() - started)
            if self.host.touches(blob.key) == SECOND_USE:
                self.transfers.submit(partial(self._save, blob.key), lambda: None)
            return pin
        pin.release()
        self.host.drop(blob.key)
        self._corrupt += 1
        log.error("an object in host memory was damaged and is dropped: %s", blob.uri)
        return self._from_disk(blob)

    def _from_disk(self, blob: Blob) -> Pin | None:
        found = None if self.disk is None else self.disk.find(blob.key)
        if self.disk is None or found is None or found.size != blob.size:
            return None
        room = self._room(blob, staging=True)
        if room is None:
            return None
        started = time.perf_counter()
        try:
            crc = self.disk.read(blob.key, room.data)
        except BaseException:
            room.abort()
            raise
        if crc is None:
            room.abort()
            return None
        self._disk_rate.measured(blob.size, time.perf_counter() - started)
        promoted = room.commit(crc)
        pin = self.host.pin(blob.key)
        if promoted and not self._on_disk(blob.key):  # dropped while it was read: it must not come back
            self.host.drop(blob.key)
        return pin

    # ---- for the MLC's resources -----------------------------------------------------------------

    async def put(self, blob: Blob, data: memoryview) -> None:
        """Store what somebody else has computed.

        Raises ``Conflict`` if the URI is taken, ``Unavailable`` without room, ``Unprocessable`` for another size.
        ``data`` may still be read after an ``Unavailable`` or a cancellation.
        """
        _check_size(blob, data)
        stored = await self._taken(blob, data, new=True, seconds=PUT_SECONDS)
        if stored is None:
            raise Unavailable(f"no room for {blob.size} bytes", retry_after_ms=1000)
        if not stored:
            raise Conflict("the object's URI is taken: objects are immutable")

    async def get(self, uri: str) -> bytes | None:
        """Header and payload, checked; None if it isn't here, or was damaged."""
        blob = self._find(uri)
        if blob is None:
            return None
        loaded = await self.load([blob], GET_SECONDS)
        try:
            return pack(blob, loaded.blocks[0]) if loaded.blocks else None
        finally:
            loaded.close()

    def contains(self, uri: str) -> bool:
        return self._find(uri) is not None

    def drop(self, uri: str) -> bool:
        """Forget an object in every tier of this process."""
        key = Blob(uri, 0).key
        above = self.host.drop(key)  # first, so that who is saving it to disk sees that it is gone
        below = self.disk is not None and self.disk.drop(key)
        return above or below

    def _find(self, uri: str) -> Blob | None:
        key = Blob(uri, 0).key
        pin = self.host.pin(key, use=False)
        if pin is not None:
            with pin:
                return pin.blob
        return None if self.disk is None else self.disk.find(key)

    # ---- for people and tests ---------------------------------------------------------------------

    def stats(self) -> tuple[TierStats, ...]:
        host, evictor = self.host.stats(), self.evictor
        host = structs.replace(
            host, corrupt=self._corrupt, errors=host.errors + evictor.failures + self.transfers.failed + self._unsaved,
            healthy=host.healthy and evictor.healthy,
            note=host.note or ("" if evictor.healthy else "the evictor failed"),
        )  # fmt: skip
        disk = () if self.disk is None else (self.disk.stats(),)
        return (host, *disk, *(() if self.others is None else (self.others.stats(),)))

    def settle(self, seconds: float = 30.0) -> bool:
        """Wait until nothing is on its way and the watermarks hold; blocks. False if that takes longer."""
        deadline = time.monotonic() + seconds
        settled = self.transfers.settle(seconds)
        return self._make_room_ahead(max(0.0, deadline - time.monotonic())) and settled

    def flush(self) -> None:
        """Everything that is in host memory and not in use to disk, and only there; blocks."""
        self.settle()
        self._free(self.host.stats().capacity_bytes)

    # ---- ahead of need ---------------------------------------------------------------------------

    def _tidy(self) -> None:
        self._make_room_ahead()
        if self.disk is not None:
            self.disk.supervise()

    def _make_room_ahead(self, seconds: float = -1) -> bool:
        """Above the high watermark, down to the low one: then an offer rarely has to wait for the disk.

        False if somebody else is still at it after ``seconds`` (-1: whenever it ends).
        """
        if not self._tidying.acquire(timeout=seconds):
            return False
        try:
            if self._over():
                self._free(int((1 - LOW) * self.host.stats().capacity_bytes))
        finally:
            self._tidying.release()
        return True


def _check_size(blob: Blob, data: memoryview) -> None:
    if data.nbytes != blob.size:
        raise Unprocessable(f"data: {data.nbytes} bytes where the object has {blob.size}")


def _finish_soon(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(_finish, done)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
