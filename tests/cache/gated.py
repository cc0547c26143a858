"""Tiers over a disk that waits until it is let go, or fails: for tests of what then becomes of whoever asks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sdcp_mono.cache.blob import HEADER_BYTES, Blob
from sdcp_mono.cache.disk import DiskTier
from sdcp_mono.cache.host import HostTier
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.tiers import Tiers

SIZE = 8192
_SLEEP = asyncio.sleep
BLOCKS = 16


def blob(number: int, size: int = SIZE) -> Blob:
    return Blob(f"mlc://local/-/target_kv/{number:064x}", size, "bfloat16", (size,))


def content(number: int, size: int = SIZE) -> memoryview:
    return memoryview(bytes([number]) * size)


class GatedDisk(DiskTier):
    """A disk whose reads and writes wait until they are let go, or fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BLOCKS * slot_bytes(HEADER_BYTES + SIZE), floor_bytes=0)
        self.go, self.reached = threading.Event(), threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def _gate(self) -> None:
        self.reached.set()
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error

    def read(self, key: bytes, out: memoryview) -> int | None:
        self._gate()
        return super().read(key, out)

    def write(self, blob: Blob, data: memoryview, crc: int) -> bool:
        self._gate()
        return super().write(blob, data, crc)

    def close(self) -> None:
        self.go.set()
        super().close()


@asynccontextmanager
async def opened(path: Path, remote: Any = None, blocks: int = BLOCKS) -> AsyncIterator[tuple[Tiers, GatedDisk]]:
    disk = GatedDisk(path)
    made = Tiers(HostTier(blocks * slot_bytes(SIZE), staging_bytes=blocks * slot_bytes(SIZE)), disk, remote)
    made.start()
    try:
        yield made, disk
        disk.go.set()
        disk.error = None
        assert await asyncio.to_thread(made.settle)
        made.host.check()
        if not disk._ended:
            disk.check()
        host = made.host.stats()
        assert (host.pinned_bytes, host.staging_bytes) == (0, 0)
    finally:
        disk.go.set()
        await made.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await _SLEEP(0)


async def stored(made: Tiers, *numbers: int) -> None:
    for number in numbers:
        await made.put(blob(number), content(number))
