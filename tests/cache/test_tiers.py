"""The tiers as one: what is offered comes back right or not at all, and nothing is held when all is done (C-39)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdcp_mono.cache.blob import Blob, pack
from sdcp_mono.cache.disk import DiskTier
from sdcp_mono.cache.host import HostTier
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.cache.transfers import Transfers
from sdcp_mono.core.problems import Conflict

SIZE = 8192
BLOCKS = 16
HOST = BLOCKS * slot_bytes(SIZE)


def blob(number: int) -> Blob:
    return Blob(f"mlc://local/-/target_kv/{number:064x}", SIZE, "bfloat16", (SIZE,))


def content(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(SIZE))


class World:
    """Tiers, and how often each offer was told that its data is not read any more."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.accepted: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self._lock = threading.Lock()

    def offer(self, number: int) -> bool:
        def done() -> None:
            with self._lock:
                self.done[number] += 1

        accepted = self.tiers.offer(blob(number), content(number), done)
        with self._lock:
            self.accepted[number] += accepted
        return accepted

    async def settle(self) -> None:
        assert await asyncio.to_thread(self.tiers.settle)

    async def load(self, *numbers: int, seconds: float = 30.0) -> int:
        """How many of the leading ones came; what came must be right."""
        loaded = await self.tiers.load([blob(number) for number in numbers], seconds)
        try:
            for number, data in zip(numbers, loaded.blocks, strict=False):
                assert data == content(number)
            return len(loaded.blocks)
        finally:
            loaded.close()
            loaded.close()

    def nothing_held(self) -> None:
        self.tiers.host.check()
        host = self.tiers.host.stats()
        assert (host.pinned_bytes, host.staging_bytes) == (0, 0)
        if self.tiers.disk is not None:
            self.tiers.disk.check()
        assert self.done == self.accepted


@asynccontextmanager
async def world(path: Path | None, remote: Any = None, **options: Any) -> AsyncIterator[World]:
    disk = None if path is None else DiskTier(path, BLOCKS * slot_bytes(SIZE + 4096), floor_bytes=0)
    tiers = Tiers(HostTier(HOST, staging_bytes=HOST), disk, remote, Transfers(**options))
    tiers.start()
    made = World(tiers)
    try:
        yield made
        await made.settle()
        made.nothing_held()
    finally:
        await tiers.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_what_is_offered_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            assert all(w.offer(number) for number in range(4))
            await w.settle()
            assert not w.offer(0)  # it is there
            assert w.tiers.predict([blob(i) for i in (0, 1, 9, 2)])[0] == 2  # only a leading run counts
            assert await w.load(0, 1, 2, 3) == 4
            assert await w.load(0, 9, 1) == 1
            assert await w.load(9) == 0

    run(main())


def test_what_leaves_host_memory_is_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            for number in range(BLOCKS + 6):
                assert w.offer(number)
                await w.settle()
            assert w.tiers.host.stats().used_bytes <= HOST
            assert await w.load(*range(3)) == 3
            disk = w.tiers.disk.stats()
            assert disk.stored > 0
            assert disk.hits > 0

    run(main())


def test_the_second_use_writes_it_to_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            w.offer(1), w.offer(2)
            await w.settle()
            assert w.tiers.disk.keys() == ()
            await w.load(1)
            await w.settle()
            assert w.tiers.disk.keys() == (blob(1).key,)

    run(main())


def test_without_a_disk_the_oldest_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(None) as w:
            for number in range(BLOCKS + 4):
                w.offer(number)
                await w.settle()
            assert await w.load(BLOCKS + 3) == 1
            assert await w.load(0) == 0

    run(main())


def test_a_flipped_bit_in_host_memory_is_never_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            w.offer(1)
            await w.settle()
            with w.tiers.host.pin(blob(1).key) as pin:
                array = np.frombuffer(pin.data, np.uint8)
                address = array.__array_interface__["data"][0]
            import ctypes

            ctypes.memset(address + 100, content(1)[100] ^ 1, 1)
            assert await w.load(1) == 0
            assert w.tiers.stats()[0].corrupt == 1
            assert w.offer(1)
            await w.settle()
            assert await w.load(1) == 1

    run(main())


def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            w.offer(1), w.offer(2)
            await w.settle()
            await asyncio.to_thread(w.tiers.flush)
            for file in (tmp_path / "segments").iterdir():
                data = bytearray(file.read_bytes())
                data[4096 + 5] ^= 1
                file.write_bytes(data)
            assert await w.load(1) + await w.load(2) == 1
            assert w.tiers.disk.stats().corrupt == 1

    run(main())


def test_everything_pinned_ends_as_a_miss_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            for number in range(BLOCKS):
                w.offer(number)
                await w.settle()
            w.tiers.flush()
            loads = [await w.tiers.load([blob(n) for n in range(BLOCKS)], 30.0)]
            held = len(loads[0].blocks)
            assert held > 0
            before = [bytes(block) for block in loads[0].blocks]
            for number in range(100, 100 + BLOCKS):
                w.offer(number)
            await w.settle()
            assert [bytes(block) for block in loads[0].blocks] == before
            loads[0].close()

    run(main())


def test_late_is_a_miss_and_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            w.offer(1)
            await w.settle()
            assert await w.load(1, seconds=0.0) == 0
            assert await w.load(1) == 1

    run(main())


def test_a_full_queue_refuses_and_tells_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, threads=1, limit=2) as w:
            go_on = threading.Event()
            w.tiers.transfers.submit(lambda: go_on.wait(30) and None, lambda: None)
            accepted = [w.offer(number) for number in range(6)]
            assert not all(accepted)
            go_on.set()

    run(main())


def test_the_end_gives_up_what_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, threads=1) as w:
            go_on = threading.Event()
            w.tiers.transfers.submit(lambda: go_on.wait(30) and None, lambda: None)
            for number in range(6):
                w.offer(number)
            stopping = asyncio.ensure_future(w.tiers.stop())
            await asyncio.sleep(0)
            go_on.set()
            await stopping
            assert w.done == w.accepted
            assert not w.offer(7)

    run(main())


def test_the_evictor_is_started_again_when_it_dies(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            supervise: Callable[[], None] = w.tiers.disk.supervise
            died = threading.Event()

            def once() -> None:
                w.tiers.disk.supervise = supervise
                died.set()
                raise RuntimeError("something nobody thought of")

            w.tiers.disk.supervise = once
            w.tiers.evictor.wake()
            assert await asyncio.to_thread(died.wait, 30)
            for number in range(2 * BLOCKS):
                w.offer(number)
            await w.settle()
            assert await w.load(2 * BLOCKS - 1) == 1
            assert w.tiers.stats()[0].errors >= 1

    run(main())


# ---- others ------------------------------------------------------------------------------------------


def test_another_process_finds_what_this_one_offered(tmp_path: Path) -> None:
    async def main() -> None:
        shared = MemoryObjects(1 << 22)
        async with world(tmp_path / "a", shared) as a, world(tmp_path / "b", shared) as b:
            for number in range(5):
                a.offer(number)
            await a.settle()
            await asyncio.sleep(0)  # what was copied is on its way to the loop
            await a.tiers.others.sent()
            assert await b.load(*range(7)) == 5
            assert b.tiers.stats()[-1].hits == 5
            assert await b.load(*range(5)) == 5  # from its own memory now

    run(main())


@pytest.mark.parametrize("answer", ["raise", "junk", "other", "short"])
def test_others_that_lie_or_fail_are_a_miss(tmp_path: Path, answer: str) -> None:
    class Others(MemoryObjects):
        async def get(self, uri: str, scope: bytes | None) -> bytes | None:
            good = pack(blob(1), content(1))
            match answer:
                case "raise":
                    raise OSError("down")
                case "junk":
                    return b"x" * len(good)
                case "other":
                    return pack(blob(2), content(1))
                case _:
                    return good[:-1]

    async def main() -> None:
        async with world(tmp_path, Others(1 << 22)) as w:
            assert await w.load(1) == 0
            remote = w.tiers.stats()[-1]
            assert remote.errors + remote.corrupt == 1
            w.offer(1)
            await w.settle()
            assert await w.load(1) == 1

    run(main())


def test_objects_for_other_machines(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            await w.tiers.put(blob(1), content(1))
            with pytest.raises(Conflict):
                await w.tiers.put(blob(1), content(1))
            assert await w.tiers.get(blob(1).uri) == pack(blob(1), content(1))
            await asyncio.to_thread(w.tiers.flush)
            assert await w.tiers.get(blob(1).uri) == pack(blob(1), content(1))
            assert w.tiers.drop(blob(1).uri)
            assert await w.tiers.get(blob(1).uri) is None

    run(main())
