"""KV that comes back for a session: it stays pinned while it is read, and what is near is loaded without the far."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sdcp_mono.roles.restoring import Restorer

SESSION = b"s" * 16
CONTENT = b"what was computed"


class Load:
    """Bytes that are overwritten as soon as they are let go, as room in host memory is."""

    def __init__(self) -> None:
        self._data = bytearray(CONTENT)
        self.blocks = [memoryview(self._data)]
        self.closed = threading.Event()

    def close(self) -> None:
        self._data[:] = bytes(len(CONTENT))
        self.closed.set()


class Tiers:
    """All blocks are there: the leading ``near`` for nothing, the others at one second each."""

    def __init__(self, near: int = 100) -> None:
        self.near = near
        self.loaded: list[int] = []
        self.load_made = Load()

    def offer(self, key: bytes, scope: bytes | None, data: memoryview, done: Callable[[], None]) -> bool:
        return False

    def predict(self, keys: Sequence[bytes], scope: bytes | None) -> tuple[int, float]:
        return len(keys), float(max(0, len(keys) - self.near))

    async def load(self, keys: Sequence[bytes], scope: bytes | None, seconds: float) -> Load:
        self.loaded.append(len(keys))
        return self.load_made


class Model:
    """Reads what it adopts only when it is let go."""

    tiers = None
    block_tokens = 1

    def __init__(self, blocks: int = 1) -> None:
        self._blocks = blocks
        self.reading, self.go = threading.Event(), threading.Event()
        self.seen: list[bytes] = []
        self.error: Exception | None = None

    def missing(self, session: bytes, tokens: Sequence[int], scope: bytes | None) -> Sequence[bytes]:
        return [b"k"] * self._blocks

    def adopt(self, session: bytes, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        self.reading.set()
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        self.seen.append(bytes(blocks[0]))
        return len(blocks)


OnThread = Callable[[Callable[[], Any]], Awaitable[Any]]


def restorer(model: Any, tiers: Any, thread: ThreadPoolExecutor, compute: float = 30.0) -> Restorer:
    def on_thread(call: Callable[[], Any]) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(thread, call)  # as ``Batcher.call``

    return Restorer(model, tiers, on_thread, lambda tokens: compute * tokens)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def until(condition: Callable[[], Any]) -> None:
    turn = asyncio.sleep
    while not condition():
        await turn(0)


@pytest.mark.parametrize("everything", [False, True], ids=["the session ends", "the loop ends"])
def test_c_38_bytes_are_held_while_the_model_reads_them(everything: bool) -> None:
    """Torn KV would be published as this prefix's. At the end of a loop every task is cancelled, ours as well."""

    async def main() -> None:
        model, tiers, ours = Model(), Tiers(), asyncio.all_tasks()
        with ThreadPoolExecutor(1) as thread:
            task = asyncio.ensure_future(restorer(model, tiers, thread)(SESSION, (1,), None))
            await until(model.reading.is_set)
            for each in asyncio.all_tasks() - ours if everything else {task}:
                each.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not tiers.load_made.closed.is_set()
            model.go.set()
            assert await asyncio.to_thread(tiers.load_made.closed.wait, 30)
        assert model.seen == [CONTENT]

    run(main())


def test_what_the_model_never_came_to_read_is_let_go() -> None:
    async def main() -> None:
        model, tiers, busy = Model(), Tiers(), threading.Event()
        with ThreadPoolExecutor(1) as thread:
            task = asyncio.ensure_future(restorer(model, tiers, thread)(SESSION, (1,), None))
            loading = tiers.load

            async def load(*asked: Any) -> Load:
                thread.submit(busy.wait, 30)  # from now on the thread is somebody else's
                return await loading(*asked)

            tiers.load = load  # type: ignore[method-assign]
            await until(lambda: tiers.loaded)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            model.go.set()
            busy.set()
            assert await asyncio.to_thread(tiers.load_made.closed.wait, 30)
        assert set(model.seen) <= {CONTENT}  # read whole, or not at all

    run(main())


def test_a_model_that_raises_leaves_nothing_held() -> None:
    async def main() -> None:
        model, tiers = Model(), Tiers()
        model.error = RuntimeError("no such session")
        model.go.set()
        with ThreadPoolExecutor(1) as thread:
            assert await restorer(model, tiers, thread)(SESSION, (1,), None) == 0
        assert tiers.load_made.closed.is_set()

    run(main())


def test_what_came_back_is_counted() -> None:
    async def main() -> None:
        model, tiers = Model(), Tiers()
        model.go.set()
        with ThreadPoolExecutor(1) as thread:
            restore = restorer(model, tiers, thread)
            assert await restore(SESSION, (1,), None) == 1
        assert (restore.restored, restore.declined, tiers.load_made.closed.is_set()) == (1, 0, True)

    run(main())


@pytest.mark.parametrize(("near", "loaded"), [(64, [64]), (40, [32]), (0, [])])
def test_what_is_near_is_loaded_though_the_rest_is_too_far(near: int, loaded: list[int]) -> None:
    """A tenth of a second of computing a block: 64 blocks, of which some cost nothing and the others a second each."""

    async def main() -> None:
        model, tiers = Model(blocks=64), Tiers(near)
        model.go.set()
        with ThreadPoolExecutor(1) as thread:
            restore = restorer(model, tiers, thread, compute=0.1)
            await restore(SESSION, range(64), None)
        assert tiers.loaded == loaded
        assert restore.declined == (not loaded)

    run(main())
