"""One model, one thread: what shares a pass, and what happens when a pass goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sdcp_mono.roles.batching import Batcher


class Silent:
    def __init__(self) -> None:
        self.costs: list[Any] = []

    def passed(self, model: str, cost: Any) -> None:
        self.costs.append(cost)


@asynccontextmanager
async def batching(step: Callable[[Sequence[int]], Sequence[Any]]) -> Any:
    observer: Any = Silent()
    with ThreadPoolExecutor(1) as thread:
        batcher = Batcher[int, Any]("m", step, thread, expected=lambda: 0, rows=lambda r: r, observer=observer)
        batcher.start()
        yield batcher, thread, observer
        await batcher.stop()


def test_whatever_waits_when_the_thread_is_free_goes_into_one_pass(kit: Any, run: Any) -> None:
    passes: list[list[int]] = []

    def step(requests: Sequence[int]) -> list[int]:
        passes.append(list(requests))
        return [10 * r for r in requests]

    async def main() -> None:
        async with batching(step) as (batcher, thread, observer):
            held = threading.Event()
            thread.submit(held.wait, 30)
            answers = [asyncio.create_task(batcher.submit(i)) for i in range(5)]
            await kit.until(lambda: batcher.queue == 5)
            held.set()
            assert [(await answer)[0] for answer in answers] == [0, 10, 20, 30, 40]
            assert passes == [[0, 1, 2, 3, 4]]
            assert [(cost.rows, cost.requests) for cost in observer.costs] == [(10, 5)]

    run(main())


def test_none_keeps_a_request_for_the_next_pass_before_newer_ones(kit: Any, run: Any) -> None:
    passes: list[list[int]] = []

    def step(requests: Sequence[int]) -> list[int | None]:
        passes.append(list(requests))
        return [None if r == 7 and len(passes) < 3 else r for r in requests]

    async def main() -> None:
        async with batching(step) as (batcher, _, _observer):
            assert (await batcher.submit(7))[0] == 7
            assert passes == [[7], [7], [7]]

    run(main())


@pytest.mark.parametrize("answers", [[], [1, 2, 3]])
def test_a_pass_with_too_few_or_too_many_answers_fails_alone(kit: Any, run: Any, answers: list[int]) -> None:
    wrong = [True]

    def step(requests: Sequence[int]) -> list[int]:
        return answers if wrong.pop() else [5]

    async def main() -> None:
        async with batching(step) as (batcher, _, _observer):
            with pytest.raises(ValueError):
                await batcher.submit(1)
            wrong.append(False)
            assert (await batcher.submit(1))[0] == 5

    run(main())


def test_a_pass_that_raises_fails_its_requests_only(kit: Any, run: Any) -> None:
    def step(requests: Sequence[int]) -> list[int]:
        return [1 // r for r in requests]

    async def main() -> None:
        async with batching(step) as (batcher, _, _observer):
            with pytest.raises(ZeroDivisionError):
                await batcher.submit(0)
            assert (await batcher.submit(1))[0] == 1

    run(main())


def test_a_caller_that_leaves_during_the_pass_disturbs_nobody(kit: Any, run: Any) -> None:
    async def main() -> None:
        entered, go = threading.Event(), threading.Event()

        def step(requests: Sequence[int]) -> list[int]:
            entered.set()
            go.wait(30)
            return list(requests)

        async with batching(step) as (batcher, _, _observer):
            leaving = asyncio.create_task(batcher.submit(1))
            await kit.until(lambda: entered.is_set())
            leaving.cancel()
            await asyncio.wait((leaving,))
            staying = asyncio.create_task(batcher.submit(2))
            go.set()
            assert (await staying)[0] == 2
            assert batcher.queue == 0

    run(main())


def test_a_caller_that_leaves_before_the_pass_takes_no_part_in_it(kit: Any, run: Any) -> None:
    passes: list[list[int]] = []

    def step(requests: Sequence[int]) -> list[int]:
        passes.append(list(requests))
        return list(requests)

    async def main() -> None:
        async with batching(step) as (batcher, thread, _observer):
            held = threading.Event()
            thread.submit(held.wait, 30)
            leaving, staying = (asyncio.create_task(batcher.submit(i)) for i in (1, 2))
            await kit.until(lambda: batcher.queue == 2)
            leaving.cancel()
            await asyncio.sleep(0)
            held.set()
            await staying
            assert passes == [[2]]

    run(main())


def test_calls_keep_their_order_whoever_waits_for_them(kit: Any, run: Any) -> None:
    done: list[str] = []

    async def main() -> None:
        async with batching(lambda requests: list(requests)) as (batcher, _, _observer):
            batcher.call(lambda: done.append("release"))  # nobody waits for it
            await batcher.call(lambda: done.append("admit"))
            assert done == ["release", "admit"]

    run(main())
