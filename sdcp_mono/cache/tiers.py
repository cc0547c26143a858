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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
from msgspec import structs

from sdcp_mono.cache.blob import BadBlob, Blob, checksum, pack, unpack
from sdcp_mono.cache.host import HostTier, Pin, Room
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.stats import TierStats
from sdcp_mono.cache.transfers import Transfers
from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.ports import ObjectStore
from sdcp_mono.core.problems import Conflict, Unavailable

log = logging.getLogger(__name__)

HIGH, LOW = 0.90, 0.80  # of host memory: where the evictor begins, and where it stops
TICK_SECONDS: Final = 1.0  # between two looks of the evictor when nobody wakes it
CHUNK: Final = 8  # blobs a job loads: a long prefix is read by all threads, a short one costs one job
GUESS: Final = {
    "host": 2e9,
    "disk": 1e8,
    "remote": 5e7,
}  # bytes a second before anything was measured: careful, not hopeless
LEARN: Final = 0.2  # weight of one measurement
SECOND_USE: Final = 2  # touches: storing counts as one
REMOTE_SECONDS: Final = 10.0  # of storing one blob with others
REMOTE_AT_ONCE: Final = 8  # fetches of one load; the others' limits are about a hundred
GET_SECONDS: Final = 10.0  # of an object that another machine asks for


class Disk(Protocol):
    """What is asked of ``DiskTier``; blocking."""

    def find(self, key: bytes) -> Blob | None: ...
    def write(self, blob: Blob, data: memoryview, crc: int) -> bool: ...
    def read(self, key: bytes, out: memoryview) -> int | None: ...
    def touch(self, key: bytes) -> None: ...
    def drop(self, key: bytes) -> bool: ...
    def keys(self) -> Sequence[bytes]: ...
    def stats(self) -> TierStats: ...
    def supervise(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Rate:
    """Bytes a second of a tier, as measured."""

    bytes_per_second: float

    def after(self, size: int, seconds: float) -> None:
        if size and seconds > 0:
            self.bytes_per_second += LEARN * (size / seconds - self.bytes_per_second)


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
        self.remote = remote
        self.transfers = transfers or Transfers()
        self._rates = {name: _Rate(rate) for name, rate in GUESS.items()}
        self._sending: set[asyncio.Task[None]] = set()
        self._corrupt = 0  # found damaged in host memory
        self._remote = {"hits": 0, "misses": 0, "stored": 0, "corrupt": 0, "errors": 0, "refused": 0}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._evict = threading.Event()
        self._tidying = threading.Lock()
        self._ended = False
        self._deaths = 0
        self._healthy = True
        self._evictor: threading.Thread | None = None

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._evictor = threading.Thread(target=self._supervised, name="evictor", daemon=True)
        self._evictor.start()

    async def stop(self) -> None:
        self._ended = True
        self._evict.set()
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self.transfers.stop()
        if self._evictor is not None:
            self._evictor.join()
        if self.disk is not None:
            self.disk.close()

    # ---- down: from the device -------------------------------------------------------------------

    def offer(self, blob: Blob, data: memoryview, done: Callable[[], None]) -> bool:
        """Copy ``data`` to host memory soon; ``done`` is called once when it isn't read any more.

        False: it is there, or too many wait; then ``done`` is not called. Any thread; never waits.
        """
        if blob.key in self.host:
            return False
        return self.transfers.submit(partial(self._store, blob, data, done), done)

    def _store(self, blob: Blob, data: memoryview, done: Callable[[], None]) -> None:
        try:
            room = self._room(blob)
            if room is None:
                return
            np.copyto(np.frombuffer(room.data, np.uint8), np.frombuffer(data, np.uint8))
        finally:
            done()
        self._commit(room)
        if self.remote is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._send_soon, blob)

    @staticmethod
    def _commit(room: Room) -> bool:
        try:
            crc = checksum(room.data)
        except BaseException:
            room.abort()
            raise
        return room.commit(crc)

    def _room(self, blob: Blob, *, staging: bool = False) -> Room | None:
        """Room in host memory; makes some where that takes no waiting for others."""
        room = self.host.reserve(blob, staging=staging)
        if room is None:
            self._free(slot_bytes(blob.size))
            room = self.host.reserve(blob, staging=staging)
        self._evict.set()
        return room

    def _free(self, want: int) -> None:
        """Make ``want`` bytes free, what is used least first; what goes is on disk before it goes."""
        self.host.evict(want, lambda key: not self._saved(key))
        self.host.evict(want)  # the disk takes nothing: what is lost is a miss

    def _save(self, key: bytes) -> None:
        self._saved(key)

    def _saved(self, key: bytes) -> bool:
        """Have an object of host memory on disk too; True where there is no disk. It is pinned while it is written."""
        if self.disk is None or self.disk.find(key) is not None:
            return True
        pin = self.host.pin(key, use=False)
        if pin is None:
            return True
        with pin:
            return self.disk.write(pin.blob, pin.data, pin.crc)

    def _send_soon(self, blob: Blob) -> None:
        if len(self._sending) >= self.transfers.limit:
            self._remote["refused"] += 1
            return
        task = asyncio.ensure_future(self._send(blob))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, blob: Blob) -> None:
        """Let others find it; best effort."""
        pin = self.host.pin(blob.key, use=False)
        if pin is None or self.remote is None:
            return
        with pin:
            file = pack(blob, pin.data)
        try:
            async with asyncio.timeout(REMOTE_SECONDS):
                await self.remote.put(blob.uri, file)
            self._remote["stored"] += 1
        except Conflict:
            pass  # somebody else was faster: it is the same
        except Exception as error:
            self._remote["errors"] += 1
            log.debug("a blob could not be stored with others: %s", error)

    # ---- up: to the device -----------------------------------------------------------------------

    def predict(self, blobs: Sequence[Blob]) -> tuple[int, float]:
        """How many of the leading blobs are in host memory or on disk, and the seconds that loading them would take.

        Where there are others to ask, the rest is counted as if they had it: whether they do shows in the loading.
        """
        count, seconds = 0, 0.0
        for blob in blobs:
            if blob.key in self.host:
                name = "host"
            elif self.disk is not None and self.disk.find(blob.key) is not None:
                name = "disk"
            elif self.remote is not None:
                name = "remote"
            else:
                break
            count += 1
            seconds += blob.size / self._rates[name].bytes_per_second
        return count, seconds

    async def load(self, blobs: Sequence[Blob], seconds: float) -> Loaded:
        """The leading blobs, pinned in host memory and checked; fewer if one is missing, damaged or late.

        What neither host memory nor disk has is asked of ``remote`` first.
        """
        if self.remote is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds / 2):  # the rest is for what did arrive
                    await self._fetch(blobs)
        load = _Load(blobs, time.monotonic() + seconds, [None] * len(blobs))
        loop = asyncio.get_running_loop()
        waiting = []
        for start in range(0, len(blobs), CHUNK):
            done: asyncio.Future[None] = loop.create_future()
            finished = partial(_finish_soon, loop, done)
            if not self.transfers.submit(partial(self._load, load, start, finished), finished):
                break
            waiting.append(done)
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, load.deadline - time.monotonic()))
        return Loaded(load.take())

    async def _fetch(self, blobs: Sequence[Blob]) -> None:
        """Bring what only others hold to host memory; each group ends at the first that nobody has."""
        missing = [b for b in blobs if b.key not in self.host and (self.disk is None or self.disk.find(b.key) is None)]
        for start in range(0, len(missing), REMOTE_AT_ONCE):
            if not all(await asyncio.gather(*map(self._fetch_one, missing[start : start + REMOTE_AT_ONCE]))):
                return

    async def _fetch_one(self, blob: Blob) -> bool:
        assert self.remote is not None
        try:
            value = await self.remote.get(blob.uri, MlcUri.parse(blob.uri).scope)
            if value is None:
                self._remote["misses"] += 1
                return False
            found, payload = unpack(value if isinstance(value, bytes) else value.to_bytes(), blob.uri)
            if found != blob:
                raise BadBlob(f"{found.size} bytes of {found.dtype} instead of {blob.size} of {blob.dtype}")
        except BadBlob as bad:
            self._remote["corrupt"] += 1
            log.error("what others hold of %s can't be used: %s", blob.uri, bad)
            return False
        except Exception as error:  # down, slow, or confused: the KV is computed instead
            self._remote["errors"] += 1
            log.debug("a blob could not be fetched: %s", error)
            return False
        stored = await asyncio.to_thread(self._take, blob, payload)
        self._remote["hits"] += stored
        return stored

    def _take(self, blob: Blob, payload: memoryview) -> bool:
        """Store bytes that came from elsewhere and were checked."""
        room = self._room(blob)
        if room is None:
            return False
        np.copyto(np.frombuffer(room.data, np.uint8), np.frombuffer(payload, np.uint8))
        self._commit(room)
        return True

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
        if pin is not None:
            if pin.blob.size == blob.size and checksum(pin.data) == pin.crc:
                self._rates["host"].after(blob.size, time.perf_counter() - started)
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
        self._rates["disk"].after(blob.size, time.perf_counter() - started)
        room.commit(crc)
        return self.host.pin(blob.key)

    # ---- for the MLC's resources -----------------------------------------------------------------

    async def put(self, blob: Blob, data: memoryview) -> None:
        """Store what somebody else has computed. Raises ``Conflict`` if it is there, ``Unavailable`` without room."""
        if self.contains(blob.uri):
            raise Conflict("the object's URI is taken: objects are immutable")
        if not await asyncio.to_thread(self._take, blob, data):
            raise Unavailable(f"no room for {blob.size} bytes", retry_after_ms=1000)

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
        below = self.disk is not None and self.disk.drop(key)
        return self.host.drop(key) or below

    def _find(self, uri: str) -> Blob | None:
        key = Blob(uri, 0).key
        pin = self.host.pin(key, use=False)
        if pin is not None:
            with pin:
                return pin.blob
        return None if self.disk is None else self.disk.find(key)

    # ---- for people and tests ---------------------------------------------------------------------

    def stats(self) -> tuple[TierStats, ...]:
        host = self.host.stats()
        host = structs.replace(
            host, corrupt=self._corrupt, errors=host.errors + self._deaths + self.transfers.failed,
            healthy=host.healthy and self._healthy, note=host.note or ("" if self._healthy else "the evictor failed"),
        )  # fmt: skip
        tiers = [host] if self.disk is None else [host, self.disk.stats()]
        if self.remote is not None:
            counts = self._remote
            tiers.append(
                TierStats(
                    name="remote", hits=counts["hits"], misses=counts["misses"], stored=counts["stored"],
                    refused=counts["refused"], corrupt=counts["corrupt"], errors=counts["errors"],
                )
            )  # fmt: skip
        return tuple(tiers)

    def settle(self, seconds: float = 30.0) -> bool:
        """Wait until nothing is on its way and the watermarks hold; blocks. False if that takes longer."""
        settled = self.transfers.settle(seconds)
        self._make_room_ahead()
        return settled

    def flush(self) -> None:
        """Everything that is in host memory and not in use to disk, and only there; blocks."""
        self.settle()
        self._free(self.host.stats().capacity_bytes)

    # ---- the evictor -----------------------------------------------------------------------------

    def _supervised(self) -> None:
        while not self._ended:
            try:
                self._tidy()
            except Exception:  # it must not stay dead: memory would fill and every copy would make its own room
                self._deaths += 1
                self._healthy = False
                log.exception("the evictor failed and is started again")
                self._evict.wait(TICK_SECONDS)
                self._evict.clear()

    def _tidy(self) -> None:
        while not self._ended:
            self._evict.wait(TICK_SECONDS)
            self._evict.clear()
            self._make_room_ahead()
            if self.disk is not None:
                self.disk.supervise()
            self._healthy = True

    def _make_room_ahead(self) -> None:
        """Above the high watermark, down to the low one: then an offer rarely has to wait for the disk."""
        with self._tidying:
            stats = self.host.stats()
            if stats.used_bytes + stats.staging_bytes > HIGH * stats.capacity_bytes:
                self._free(int((1 - LOW) * stats.capacity_bytes))


def _finish_soon(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(_finish, done)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
