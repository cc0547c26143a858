"""The tiers under eight threads: any order of calls, 16 blocks of host memory, 16 of disk (C-39)."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.cache.blob import HEADER_BYTES, Blob, unpack
from sdcp_mono.cache.disk import DiskTier
from sdcp_mono.cache.host import HostTier
from sdcp_mono.cache.slabs import slot_bytes
from sdcp_mono.cache.tiers import Loaded, Tiers
from sdcp_mono.core.problems import Conflict, Unavailable

SIZE = 8192
BLOCKS = 16
KEYS = 48  # three times what host memory has room for, so that most is on disk or gone
THREADS = 8
OPERATIONS = 1300  # of one thread: 10,400 in all
HELD = 3  # loads that a thread keeps open
BLOBS = [Blob(f"mlc://local/-/target_kv/{n:064x}", SIZE, "bfloat16", (SIZE,)) for n in range(KEYS)]
CONTENT = [random.Random(n).randbytes(SIZE) for n in range(KEYS)]


class Worker:
    """One thread's operations. What it loaded it holds for a while, and looks at again before it lets go."""

    def __init__(self, tiers: Tiers, loop: asyncio.AbstractEventLoop, seed: int) -> None:
        self._tiers, self._loop, self._random = tiers, loop, random.Random(seed)
        self._held: list[tuple[int, Loaded]] = []
        self._lock = threading.Lock()
        self.accepted: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.seen: Counter[str] = Counter()
        self.error: BaseException | None = None

    def __call__(self) -> None:
        operations = (
            self.offer, self.offer, self.offer, self.load, self.load, self.load, self.close, self.put, self.get,
            self.drop, self.predict, self.evict, self.leave,
        )  # fmt: skip
        try:
            for _ in range(OPERATIONS):
                operation = self._random.choice(operations)
                operation(self._random.randrange(KEYS))
                self.seen[operation.__name__] += 1
            while self._held:
                self.close(0)
        except BaseException as error:
            self.error = error

    def offer(self, key: int) -> None:
        def done() -> None:
            with self._lock:  # it is called from the pool's threads
                self.done[key] += 1

        self.accepted[key] += self._tiers.offer(BLOBS[key], memoryview(CONTENT[key]), done)

    def load(self, key: int) -> None:
        seconds = self._random.choice((0.0, 0.0005, 30.0))
        count = self._random.randrange(1, 5)
        loaded = self._await(self._tiers.load(BLOBS[key : key + count], seconds))
        self.seen["loaded"] += len(loaded.blocks)
        self._look(key, loaded)
        self._held.append((key, loaded))
        if len(self._held) > HELD:
            self.close(key)

    def leave(self, key: int) -> None:
        """Ask for blobs and go away, at some moment: what comes is nobody's."""
        turns = self._random.randrange(4)

        async def leave() -> bool:
            loading = asyncio.ensure_future(self._tiers.load(BLOBS[key : key + 4], 30.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            loading.cancel()
            (ended,) = await asyncio.gather(loading, return_exceptions=True)
            if isinstance(ended, Loaded):  # it was quicker
                ended.close()
            return not isinstance(ended, Loaded)

        self.seen["left"] += self._await(leave())

    def close(self, _: int) -> None:
        if self._held:
            key, loaded = self._held.pop(self._random.randrange(len(self._held)))
            self._look(key, loaded)  # whatever happened meanwhile
            loaded.close()
            loaded.close()

    def put(self, key: int) -> None:
        try:
            self._await(self._tiers.put(BLOBS[key], memoryview(CONTENT[key])))
        except (Conflict, Unavailable) as refusal:
            self.seen[type(refusal).__name__] += 1

    def get(self, key: int) -> None:
        file = self._await(self._tiers.get(BLOBS[key].uri))
        if file is not None:
            self.seen["got"] += 1
            assert len(file) == HEADER_BYTES + SIZE
            assert unpack(file, BLOBS[key].uri) == (BLOBS[key], CONTENT[key])

    def drop(self, key: int) -> None:
        self._tiers.drop(BLOBS[key].uri)

    def predict(self, key: int) -> None:
        asked = BLOBS[key : key + 4]
        count, seconds = self._tiers.predict(asked)
        assert 0 <= count <= len(asked)
        assert (seconds > 0) == (count > 0)

    def evict(self, _: int) -> None:
        """Pressure from outside: half of the host tier has to go."""
        if self._random.randrange(8) == 0:
            self._tiers.host.evict(self._tiers.host.stats().capacity_bytes // 2)

    def _look(self, key: int, loaded: Loaded) -> None:
        for number, block in enumerate(loaded.blocks):
            assert block == CONTENT[key + number], f"block {number} of a load is not what was offered"

    def _await(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)


def _watch(tiers: Tiers, ended: threading.Event, wrong: list[BaseException]) -> None:
    """The accounts, at any moment: ``check`` recounts free, used and staging under the tier's lock."""
    try:
        while not ended.wait(0.002):
            tiers.host.check()
            assert tiers.disk is not None
            tiers.disk.check()  # type: ignore[attr-defined]
            for stats in tiers.stats():
                assert 0 <= stats.pinned_bytes <= stats.used_bytes
                assert stats.used_bytes + stats.staging_bytes <= stats.capacity_bytes
    except BaseException as error:
        wrong.append(error)


def _files_below(path: Path) -> list[str]:
    """What this process has open in ``path``."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the listing's own
            continue
    return [name for name in found if name.startswith(str(path))]


def _join(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", [1, 2])
def test_c_39_any_order_of_calls_from_eight_threads(tmp_path: Path, seed: int) -> None:
    threads_before = set(threading.enumerate())

    async def main() -> None:
        host = HostTier(BLOCKS * slot_bytes(SIZE), staging_bytes=8 * slot_bytes(SIZE))
        tiers = Tiers(host, DiskTier(tmp_path, BLOCKS * slot_bytes(HEADER_BYTES + SIZE), floor_bytes=0), None)
        tiers.start()
        loop, ended, wrong = asyncio.get_running_loop(), threading.Event(), []
        workers = [Worker(tiers, loop, 1000 * seed + number) for number in range(THREADS)]
        threads = [_join(worker) for worker in workers]
        watching = _join(lambda: _watch(tiers, ended, wrong))
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert await asyncio.to_thread(tiers.settle)
        ended.set()
        await asyncio.to_thread(watching.join)
        assert [worker.error for worker in workers] == [None] * THREADS
        assert wrong == []
        assert [worker.done for worker in workers] == [worker.accepted for worker in workers]
        for stats in tiers.stats():
            assert (stats.pinned_bytes, stats.staging_bytes, stats.corrupt, stats.errors) == (0, 0, 0, 0)
            assert stats.stored > 0
        seen = sum((worker.seen for worker in workers), Counter())
        assert min(seen["loaded"], seen["got"], tiers.stats()[1].hits) > 100  # it isn't right for want of work
        assert seen["left"] > 100
        await tiers.stop()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert _files_below(tmp_path) == []
    assert not (tmp_path / "quarantine").exists()
    left = {thread.name.split()[0] for thread in set(threading.enumerate()) - threads_before}
    assert not left & {"transfer", "evictor"}
