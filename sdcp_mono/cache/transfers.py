"""A bounded pool of threads that move bytes between tiers while models compute.

Law of this module: every job that was accepted is either run or given up, exactly once, also at the end; who submits
is never made to wait, and who waits does so with a deadline of its own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

THREADS: Final = 2  # one may wait for a disk while another copies memory; more would take cores from the models
QUEUE: Final = 512  # jobs: the blocks of a long prompt; more means that the tiers can't follow, and a copy is left out


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], None]
    give_up: Callable[[], None]


class Transfers:
    """``threads`` daemon threads and a queue of ``limit`` jobs; usable from any thread."""

    def __init__(self, threads: int = THREADS, limit: int = QUEUE) -> None:
        self.limit = limit
        self._jobs: queue.Queue[_Job | None] = queue.Queue(limit)
        self._gate = threading.Lock()  # orders the end against submissions
        self._ended = False
        self._idle = threading.Condition()
        self._open = 0  # accepted and not yet over
        self.failed = 0
        self.refused = 0
        self._threads = [threading.Thread(target=self._work, name=f"transfer {n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, run: Callable[[], None], give_up: Callable[[], None]) -> bool:
        """Have ``run`` run soon; False if too many wait. ``give_up`` is called instead if the pool ends before."""
        with self._gate:
            if self._ended:
                return False
            with self._idle:
                self._open += 1
            try:
                self._jobs.put_nowait(_Job(run, give_up))
            except queue.Full:
                self._over()
                self.refused += 1
                return False
        return True

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is left to do; False if that takes longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self._open == 0, seconds)

    def stop(self, seconds: float = 5.0) -> None:
        """Finish what runs, give up what waits. May be called again."""
        with self._gate:
            first, self._ended = not self._ended, True
        if first:
            waiting = []
            while not self._jobs.empty():
                waiting.append(self._jobs.get_nowait())
            for job in waiting:
                if job is not None:
                    self._carry_out(job.give_up)
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(seconds)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._carry_out(job.run)

    def _carry_out(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # whatever a job does, the next one runs
            self.failed += 1
            log.exception("a transfer failed")
        finally:
            self._over()

    def _over(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()
