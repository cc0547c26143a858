"""The tiers when something fails, hangs, lies or leaves: a miss and a counter, and nothing is held (C-38 to C-40)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.cache import evictor, others, tiers, transfers
from sdcp_mono.cache.blob import HEADER_BYTES, Blob
from sdcp_mono.cache.disk import DiskTier
from sdcp_mono.cache.evictor import Evictor
from sdcp_mono.cache.host import HostTier
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.others import AT_ONCE
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.core.ports import ObjectMeta
from sdcp_mono.core.problems import Conflict, Unavailable, Unprocessable
from sdcp_mono.roles.restoring import Restorer

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


# ---- who asks goes away ----------------------------------------------------------------------------------------------


def test_a_load_that_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            await stored(made, 0, 1, 2)
            await asyncio.to_thread(made.flush)
            disk.go.clear()
            disk.reached.clear()
            loading = asyncio.ensure_future(made.load([blob(n) for n in range(3)], 30.0))
            await until(disk.reached.is_set)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            disk.go.set()
            await asyncio.to_thread(made.settle)
            assert made.host.stats().pinned_bytes == 0

    run(main())


def test_a_restore_that_is_cancelled_holds_its_bytes_while_the_model_reads_them(tmp_path: Path) -> None:
    """Otherwise another object could be written there, and its bytes published as this prefix's KV."""
    reading, go = threading.Event(), threading.Event()
    seen: list[bytes] = []

    class Model:
        block_tokens = 1

        def missing(self, session: bytes, tokens: Any, scope: bytes | None) -> list[bytes]:
            return [b"k"]

        def adopt(self, session: bytes, keys: Any, blocks: Any) -> int:
            reading.set()
            assert go.wait(30)
            seen.append(bytes(blocks[0]))
            return 1

    class Kv:
        def __init__(self, made: Tiers) -> None:
            self._made = made

        def predict(self, keys: Any, scope: bytes | None) -> tuple[int, float]:
            return 1, 0.0

        async def load(self, keys: Any, scope: bytes | None, seconds: float) -> Any:
            return await self._made.load([blob(0)], seconds)

    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            await stored(made, 0)
            model: Any = Model()
            tier: Any = Kv(made)
            with ThreadPoolExecutor(1) as thread:

                async def on_thread(call: Callable[[], Any]) -> Any:
                    return await asyncio.wrap_future(thread.submit(call))

                restore = Restorer(model, tier, on_thread, lambda tokens: 30.0)
                task = asyncio.ensure_future(restore(b"s" * 16, (1,), None))
                await until(reading.is_set)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert made.host.stats().pinned_bytes == slot_bytes(SIZE)  # still being read
                made.drop(blob(0).uri)
                for number in range(1, BLOCKS + 4):
                    made.offer(blob(number), content(number), lambda: None)
                await asyncio.to_thread(made.settle)
                go.set()
                await until(lambda: made.host.stats().pinned_bytes == 0)
            assert seen == [bytes(content(0))]

    run(main())


def test_a_transfer_that_fails_after_its_owner_has_gone_harms_nobody(tmp_path: Path) -> None:
    def gone() -> None:
        raise RuntimeError("the session is gone")

    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            assert made.offer(blob(0), content(0), gone)
            await asyncio.to_thread(made.settle)
            assert made.transfers.failed == 1
            made.host.check()
            assert made.host.stats().staging_bytes == 0
            await stored(made, 1)
            assert await made.get(blob(1).uri) is not None

    run(main())


# ---- what is asked is wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_bytes_of_another_size_are_refused(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            with pytest.raises(Unprocessable, match=f"data: {size} bytes where the object has {SIZE}"):
                await made.put(blob(0), content(0, size))
            with pytest.raises(Unprocessable, match="data"):
                made.offer(blob(0), content(0, size), lambda: None)
            assert made.host.stats().staging_bytes == 0

    run(main())


def test_a_uri_asked_with_another_size_is_a_miss_and_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            await stored(made, 0)
            loaded = await made.load([blob(0, SIZE // 2)], 5.0)
            assert list(loaded.blocks) == []
            loaded.close()
            assert await made.get(blob(0).uri) is not None
            assert made.stats()[0].corrupt == 0

    run(main())


def test_of_two_puts_of_one_uri_one_succeeds(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            for number in range(12):
                tries = [made.put(blob(number), content(number)) for _ in range(4)]
                outcomes = await asyncio.gather(*tries, return_exceptions=True)
                assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict"] * 3 + ["NoneType"]

    run(main())


def test_what_is_dropped_while_it_is_written_to_disk_does_not_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            await stored(made, 0)
            disk.go.clear()
            disk.reached.clear()
            (await made.load([blob(0)], 5.0)).close()  # its second use
            await until(disk.reached.is_set)
            assert made.drop(blob(0).uri)
            disk.go.set()
            await asyncio.to_thread(made.settle)
            assert disk.stats().stored == 1
            assert not made.contains(blob(0).uri)

    run(main())


# ---- the disk fails or hangs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(5, "input/output error"), RuntimeError("nobody thought of it")])
def test_a_disk_that_raises_is_a_miss_and_a_counter(tmp_path: Path, error: Exception) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            await stored(made, *range(4))
            await asyncio.to_thread(made.flush)
            disk.error = error
            loaded = await made.load([blob(0)], 5.0)
            assert list(loaded.blocks) == []
            for number in range(20, 20 + 2 * BLOCKS):
                await stored(made, number)  # what makes room can't be saved, and is lost
            assert made.stats()[0].errors > 0
            disk.error = None
            assert await made.get(blob(0).uri) is not None

    run(main())


def test_a_disk_that_hangs_ends_a_load_at_its_deadline_and_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiers, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(transfers.Transfers.stop, "__defaults__", (0.05,))

    async def main() -> None:
        async with opened(tmp_path) as (made, disk):
            await stored(made, 0, 1)
            await asyncio.to_thread(made.flush)
            disk.go.clear()
            loaded = await made.load([blob(0)], 0.05)
            assert list(loaded.blocks) == []
            with caplog.at_level(logging.ERROR):
                await made.stop()
            assert "hangs" in caplog.text
            disk.go.set()
            assert await asyncio.to_thread(made.transfers.settle, 30)
            disk.close()

    run(main())


def test_everything_pinned_is_refused_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            await stored(made, *range(BLOCKS - 2))
            loaded = await made.load([blob(number) for number in range(BLOCKS - 2)], 5.0)
            held = len(loaded.blocks)
            for number in range(50, 50 + BLOCKS - held):
                await stored(made, number)
            others = await made.load([blob(number) for number in range(50, 50 + BLOCKS - held)], 5.0)
            assert held + len(others.blocks) == BLOCKS
            with pytest.raises(Unavailable, match="no room"):
                await made.put(blob(99), content(99))
            assert [bytes(block) for block in loaded.blocks] == [bytes(content(n)) for n in range(held)]
            loaded.close()
            others.close()
            await stored(made, 99)

    run(main())


# ---- the evictor -----------------------------------------------------------------------------------------------------


def test_the_evictor_looks_less_often_while_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    recovered = threading.Event()
    fails = [5]

    def tidy() -> None:
        if fails[0]:
            fails[0] -= 1
            raise RuntimeError("x")
        recovered.set()

    monkeypatch.setattr(evictor, "MAX_PAUSE_SECONDS", 8.0)
    made = Evictor(tidy, tick_seconds=1.0)
    real = made._ended.wait
    made._ended.wait = lambda seconds=None: waited.append(seconds) or real(0)  # type: ignore[method-assign, func-returns-value]
    made.wake()
    for _ in range(6):
        made.wake()
    waking = threading.Event()

    def keep_waking() -> None:
        while not recovered.is_set():
            made.wake()
            waking.wait(0.001)

    threading.Thread(target=keep_waking, daemon=True).start()
    made.start()
    assert recovered.wait(30)
    assert made.stop(30)
    assert waited == [2.0, 4.0, 8.0, 8.0, 8.0]
    assert (made.failures, made.healthy) == (5, True)


def test_the_evictor_sleeps_below_the_watermark(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, blocks=4 * BLOCKS) as (made, _):
            woken: list[None] = []
            made.evictor.wake = lambda: woken.append(None)  # type: ignore[method-assign]
            await stored(made, *range(BLOCKS))
            assert woken == []

    run(main())


# ---- others ----------------------------------------------------------------------------------------------------------


class SlowObjects(MemoryObjects):
    """Others that store nothing until they are let go."""

    def __init__(self) -> None:
        super().__init__(1 << 22)
        self.go = asyncio.Event()
        self.at_once = self.most = 0

    async def put(self, uri: str, value: Any, *, ttl_ms: int | None = None) -> ObjectMeta:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await self.go.wait()
            return await super().put(uri, value, ttl_ms=ttl_ms)
        finally:
            self.at_once -= 1


def test_slow_others_hold_a_few_copies_at_most(tmp_path: Path) -> None:
    async def main() -> None:
        slow = SlowObjects()
        async with opened(tmp_path, slow, blocks=64) as (made, _):
            assert made.others is not None
            for number in range(40):
                made.offer(blob(number), content(number), lambda: None)
            await asyncio.to_thread(made.settle)
            await until(lambda: slow.at_once == AT_ONCE)
            slow.go.set()
            await made.others.sent()
            assert slow.most == AT_ONCE
            assert made.stats()[-1].stored == 40

    run(main())


def test_more_than_others_can_follow_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "WAITING", 10)

    async def main() -> None:
        slow = SlowObjects()
        async with opened(tmp_path, slow, blocks=64) as (made, _):
            assert made.others is not None
            for number in range(40):
                made.offer(blob(number), content(number), lambda: None)
            await asyncio.to_thread(made.settle)
            await until(lambda: made.stats()[-1].refused == 30)
            slow.go.set()
            await made.others.sent()

    run(main())


def test_what_others_take_is_measured(tmp_path: Path) -> None:
    """A prediction follows what fetching really took, so that a slow store stops being asked."""

    class Distant(MemoryObjects):
        async def get(self, uri: str, scope: bytes | None) -> Any:
            await asyncio.to_thread(partial(threading.Event().wait, 0.02))
            return await super().get(uri, scope)

    async def main() -> None:
        distant = Distant(1 << 22)
        async with opened(tmp_path / "a", distant) as (made, _):
            assert made.others is not None
            for number in range(4):
                made.offer(blob(number), content(number), lambda: None)
            await asyncio.to_thread(made.settle)
            await asyncio.sleep(0)
            await made.others.sent()
        async with opened(tmp_path / "b", distant) as (made, _):
            _, before = made.predict([blob(0)])
            for number in range(4):
                (await made.load([blob(number)], 5.0)).close()
            assert made.stats()[-1].hits == 4
            _, after = made.predict([blob(9)])
            assert after > before

    run(main())


def test_a_conflict_names_what_is_wrong(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            await stored(made, 0)
            with pytest.raises(Conflict, match="immutable"):
                await made.put(blob(0), content(0))

    run(main())
