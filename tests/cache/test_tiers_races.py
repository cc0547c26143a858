"""The tiers while two do something to one object at once, or the disk hangs meanwhile (C-38 to C-40)."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdcp_mono.cache import tiers
from sdcp_mono.cache.blob import Blob, pack
from sdcp_mono.cache.host import HostTier, Room
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.objects import RoutedObjects
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.core.problems import Conflict, Unavailable

from .gated import BLOCKS, SIZE, GatedDisk, blob, content, opened, run, stored, until


class GatedHost(HostTier):
    """Host memory whose first reservation waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(BLOCKS * slot_bytes(SIZE), staging_bytes=BLOCKS * slot_bytes(SIZE))
        self.go, self.reached = threading.Event(), threading.Event()

    def reserve(self, blob: Blob, *, staging: bool = False) -> Room | None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(30)
        return super().reserve(blob, staging=staging)


async def outcome(call: Any) -> str:
    try:
        await call
    except (Conflict, Unavailable) as refusal:
        return type(refusal).__name__
    return "stored"


# ---- two at once -----------------------------------------------------------------------------------------------------


def test_of_two_puts_one_succeeds_though_its_object_is_on_disk_when_the_other_goes_on(tmp_path: Path) -> None:
    """An object is immutable: if both were told that they stored it, one of them would read the other's bytes."""

    async def main() -> None:
        host, disk = GatedHost(), GatedDisk(tmp_path)
        made = Tiers(host, disk, None)
        made.start()
        first = asyncio.ensure_future(outcome(made.put(blob(0), content(1))))
        await asyncio.to_thread(host.reached.wait, 30)
        second = asyncio.ensure_future(outcome(made.put(blob(0), content(2))))
        for _ in range(200):  # as far as it comes beside the first
            await asyncio.sleep(0)
        made.host.evict(host.stats().capacity_bytes, lambda key: not made._saved(key))
        host.go.set()
        ended = [await first, await second]
        assert sorted(ended) == ["Conflict", "stored"]
        await asyncio.to_thread(made.flush)
        assert await made.get(blob(0).uri) == pack(blob(0), content(1 + ended.index("stored")))
        await made.stop()

    run(main())


def test_a_put_after_one_that_found_no_room_is_no_conflict(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            made.evictor.stop(30)  # it would let go of what is about to be pinned
            await stored(made, *range(BLOCKS))
            held = await made.load([blob(number) for number in range(BLOCKS)], 30.0)
            assert len(held.blocks) == BLOCKS
            tries = await asyncio.gather(*(outcome(made.put(blob(99), content(99))) for _ in range(3)))
            assert tries == ["Unavailable"] * 3  # nobody has stored it
            held.close()

    run(main())


def test_what_is_stored_while_room_is_made_is_not_lost_for_it(tmp_path: Path) -> None:
    """What the disk refuses is given up for room; what it was never asked to take is not."""

    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            made.evictor.stop(30)
            await stored(made, 0)
            real = disk.write

            def write(blob_: Blob, data: memoryview, crc: int) -> bool:
                made._take(blob(1), content(1))
                return False

            disk.write = write  # type: ignore[method-assign]
            made._free(made.host.stats().capacity_bytes)
            assert (blob(0).key in made.host, blob(1).key in made.host) == (False, True)
            disk.write = real  # type: ignore[method-assign]

    run(main())


def test_what_is_dropped_while_it_is_read_from_disk_does_not_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            await stored(made, 0)
            await asyncio.to_thread(made.flush)
            real, dropped = disk.read, []

            def read(key: bytes, out: memoryview) -> int | None:
                crc = real(key, out)
                dropped.append(made.drop(blob(0).uri))
                return crc

            disk.read = read  # type: ignore[method-assign]
            loaded = await made.load([blob(0)], 5.0)
            assert [bytes(block) for block in loaded.blocks] in ([], [bytes(content(0))])
            loaded.close()
            assert dropped == [True]
            assert not made.contains(blob(0).uri)
            disk.read = real  # type: ignore[method-assign]
            await made.put(blob(0), content(7))  # its name is free again
            assert await made.get(blob(0).uri) == pack(blob(0), content(7))

    run(main())


def test_c_40_a_lease_that_runs_out_during_a_copy_tears_nothing(tmp_path: Path, clock: Any) -> None:
    """The lease's pin goes while the object is on its way to disk: the copy has a pin of its own."""

    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            objects = RoutedObjects(MemoryObjects(1 << 20, clock=clock), made, clock=clock)
            await stored(made, 0)
            assert await objects.lease(blob(0).uri, 1000, "https://reader/") is not None
            disk.go.clear()
            disk.reached.clear()
            (await made.load([blob(0)], 5.0)).close()  # its second use: it is saved
            await until(disk.reached.is_set)
            clock.pass_ms(1000)
            assert await objects.head(blob(99).uri, None) is None  # whoever comes looks after leases
            assert objects.forced() == {"https://reader/": 1}
            assert made.host.stats().pinned_bytes == slot_bytes(SIZE)  # the copy's
            for number in range(1, 2 * BLOCKS):
                made.offer(blob(number), content(number), lambda: None)
            disk.go.set()
            await asyncio.to_thread(made.settle)
            await asyncio.to_thread(made.flush)
            assert made.host.stats().pinned_bytes == 0
            if made.contains(blob(0).uri):
                assert await made.get(blob(0).uri) == pack(blob(0), content(0))
            assert made.stats()[1].corrupt == 0

    run(main())


# ---- time ------------------------------------------------------------------------------------------------------------


def test_asking_others_and_reading_share_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    """What was allowed is what recomputing takes: it doesn't begin again when the others have answered."""

    class Slow(MemoryObjects):
        async def get_many(self, *asked: Any) -> Any:
            clock.pass_ms(4000)
            return await super().get_many(*asked)

    async def main() -> None:
        async with opened(tmp_path, Slow(1 << 20)) as (made, disk):
            await stored(made, 0, 1)
            await asyncio.to_thread(made.flush)
            real = disk.read

            def read(key: bytes, out: memoryview) -> int | None:
                clock.pass_ms(6001)
                return real(key, out)

            disk.read = read  # type: ignore[method-assign]
            monkeypatch.setattr(tiers, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
            loaded = await made.load([blob(0), blob(1), blob(2)], 10.0)
            assert len(loaded.blocks) <= 1
            assert disk.stats().hits == 1
            loaded.close()
            monkeypatch.undo()

    run(main())


def test_settling_has_a_deadline_while_the_evictor_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            await stored(made, *range(BLOCKS - 1))
            disk.reached.clear()
            disk.go.clear()
            await stored(made, BLOCKS - 1)  # above the watermark
            made.evictor.wake()
            await until(disk.reached.is_set)
            ended = asyncio.ensure_future(asyncio.to_thread(made.settle, 0.05))
            done, _ = await asyncio.wait([ended], timeout=10)
            disk.go.set()
            assert done
            assert await ended is False

    run(main())


# ---- a disk that hangs -----------------------------------------------------------------------------------------------


def test_a_put_that_the_disk_holds_up_is_refused_and_takes_no_thread_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own threads are joined at the end of the process, and tokenisers and files need them until then."""
    monkeypatch.setattr(tiers, "PUT_SECONDS", 0.05, raising=False)

    async def main() -> None:
        disk = GatedDisk(tmp_path)
        made = Tiers(HostTier(BLOCKS * slot_bytes(SIZE), staging_bytes=0), disk, None)  # no evictor: puts make room
        await stored(made, *range(BLOCKS))
        disk.go.clear()
        disk.reached.clear()
        putting = asyncio.ensure_future(outcome(made.put(blob(50), content(50))))
        await until(disk.reached.is_set)
        refused, _ = await asyncio.wait([putting], timeout=10)
        ending = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
        ended, _ = await asyncio.wait([ending], timeout=10)
        disk.go.set()
        await ending
        assert refused
        assert ended
        assert await putting == "Unavailable"
        await made.stop()
        made.host.check()
        assert made.host.stats().staging_bytes == 0

    run(main())


def test_the_end_needs_no_thread_of_others(tmp_path: Path) -> None:
    async def main() -> None:
        loop, go = asyncio.get_running_loop(), threading.Event()
        with ThreadPoolExecutor(1) as only:
            loop.set_default_executor(only)
            made = Tiers(HostTier(1 << 20, staging_bytes=1 << 20), GatedDisk(tmp_path), None)
            made.start()
            busy = loop.run_in_executor(None, go.wait, 30)
            ended, _ = await asyncio.wait([asyncio.ensure_future(made.stop())], timeout=10)
            go.set()
            await busy
            assert ended

    run(main())


def test_after_a_disk_that_hung_at_the_end_stop_may_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiers, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(tiers.Transfers.stop, "__defaults__", (0.05,))

    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            await stored(made, 0)
            disk.go.clear()
            disk.reached.clear()
            (await made.load([blob(0)], 5.0)).close()
            await until(disk.reached.is_set)
            with caplog.at_level(logging.ERROR):
                await made.stop()
            assert "hangs" in caplog.text
            with pytest.raises(Unavailable):
                await made.put(blob(1), content(1))
            disk.go.set()
            assert await asyncio.to_thread(made.transfers.settle, 30)
            await made.stop()  # now it is given up in order
            assert disk._ended

    run(main())
