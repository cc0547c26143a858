"""One model, one thread, many sessions: whatever is waiting when the thread becomes free goes into one pass.

Several models may share the thread (on a CPU they share the cores anyway, and two busy thread pools on two cores are
slower than one). What a pass takes is decided on that thread when the pass starts, not when it was asked for, so
requests that arrive while another model computes still join.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, Generic, TypeVar

from sdcp_mono.core.ports import Observer, PassCost
from sdcp_mono.core.speculation import CostTable

Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")

WINDOW: Final = 0.15  # of a pass: how long to wait for sessions that are about to ask (section 8: a fraction of it)
MAX_WINDOW_SECONDS: Final = 0.005  # a slow first pass must not teach us to wait long


class Batcher(Generic[Q, A]):
    """Runs ``step`` over everything that waits. A None in its answer keeps that request for the next pass.

    ``expected`` tells how many requests can come at all; a pass starts at once when they are all there.
    ``rows`` counts a request's rows. ``cost`` knows what a pass of so many rows takes; it starts as it was measured
    when the model was loaded, and follows what passes take.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[Sequence[Q]], Sequence[A | None]],
        thread: Executor,
        *,
        expected: Callable[[], int],
        rows: Callable[[Q], int],
        observer: Observer,
        cost: CostTable | None = None,
    ) -> None:
        self._name = name
        self._step = step
        self._thread = thread
        self._expected = expected
        self._rows = rows
        self._observer = observer
        self.cost = cost or CostTable()
        self._waiting: deque[tuple[Q, asyncio.Future[tuple[A, PassCost]]]] = deque()
        self._arrived = asyncio.Event()  # something waits
        self._more = asyncio.Event()  # one more waits than a moment ago
        self._runner: asyncio.Task[None] | None = None
        self.pass_seconds = 0.0  # moving average

    def start(self) -> None:
        self._runner = asyncio.get_running_loop().create_task(self._run(), name=f"batch {self._name}")

    async def stop(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()

    @property
    def queue(self) -> int:
        return len(self._waiting)

    async def submit(self, request: Q) -> tuple[A, PassCost]:
        """The model's answer and the pass that gave it. Bounded by the caller: one per session."""
        future: asyncio.Future[tuple[A, PassCost]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._arrived.set()
        self._more.set()
        return await future

    def call(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Run something else on the model's thread (admission, release): in the order of the calls."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            await self._fill()
            taken, answers, cost = await loop.run_in_executor(self._thread, self._pass)
            kept = []
            for (request, future), answer in zip(taken, answers, strict=True):
                if future.done():  # cancelled: nobody waits any more
                    continue
                if answer is None:
                    kept.append((request, future))
                elif isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result((answer, cost))
            self._waiting.extendleft(reversed(kept))
            if not self._waiting:
                self._arrived.clear()

    async def _fill(self) -> None:
        """Wait a little for the others, never longer than a fraction of a pass."""
        deadline = time.perf_counter() + min(WINDOW * self.pass_seconds, MAX_WINDOW_SECONDS)
        while len(self._waiting) < self._expected() and (left := deadline - time.perf_counter()) > 0:
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), left)
            except TimeoutError:
                return

    def _pass(
        self,
    ) -> tuple[list[tuple[Q, asyncio.Future[tuple[A, PassCost]]]], Sequence[A | BaseException | None], PassCost]:
        """On the model's thread."""
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        live = [entry for entry in taken if not entry[1].done()]
        if not live:
            return [], [], PassCost(0, 0, 0.0)
        started = time.perf_counter()
        answers: Sequence[A | BaseException | None]
        try:
            answers = self._step([request for request, _ in live])
            if len(answers) != len(live):
                raise ValueError(f"{self._name}: {len(answers)} answers to {len(live)} requests")
        except Exception as error:  # a fault of the model must reach the sessions, not kill the loop
            answers = [error] * len(live)
        seconds = time.perf_counter() - started
        self.pass_seconds = seconds if not self.pass_seconds else 0.8 * self.pass_seconds + 0.2 * seconds
        cost = PassCost(sum(self._rows(request) for request, _ in live), len(live), seconds)
        self.cost = self.cost.after(cost.rows, seconds)
        self._observer.passed(self._name, cost)
        return live, answers, cost
