"""A bounded pool of threads that move bytes between tiers while models compute.

Law of this module: every job that was accepted is either run or given up, exactly once, also at the end; who submits
is never made to wait, and who waits does so with a deadline of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

THREADS: Final = 2  # one may wait for a disk while another copies memory; more would take cores from the models
QUEUE: Final = 512  # jobs: the blocks of a long prompt; more means that the tiers can't follow, and a copy is left out
STOP_SECONDS: Final = 5.0  # for jobs under way at the end: a disk that needs longer hangs


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], None]
    give_up: Callable[[], None]


class Transfers:
    """``threads`` daemon threads and a queue of ``limit`` jobs; usable from any thread."""

    def __init__(self, threads: int = THREADS, limit: int = QUEUE) -> None:
        self.limit = limit
        self.failed = 0
        self.refused = 0
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)  # a job waits, or it is the end
        self._idle = threading.Condition(self._lock)
        self._jobs: deque[_Job] = deque()
        self._open = 0  # accepted and not yet over
        self._ended = False
        self._threads = [threading.Thread(target=self._work, name=f"transfer {n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, run: Callable[[], None], give_up: Callable[[], None]) -> bool:
        """Have ``run`` run soon; False if too many wait. ``give_up`` is called instead if the pool ends before."""
        with self._lock:
            if self._ended:
                return False
            if len(self._jobs) >= self.limit:
                self.refused += 1
                return False
            self._jobs.append(_Job(run, give_up))
            self._open += 1
            self._wanted.notify()
        return True

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is left to do; False if that takes longer."""
        with self._lock:
            return self._idle.wait_for(lambda: self._open == 0, seconds)

    def stop(self, seconds: float = STOP_SECONDS) -> bool:
        """Give up what waits, finish what runs; False if that takes longer: then it is left. May be called again."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._ended = True
            waiting, self._jobs = self._jobs, deque()
            self._wanted.notify_all()
        for job in waiting:
            self._carry_out(job.give_up)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._carry_out(job.run)

    def _next(self) -> _Job | None:
        with self._lock:
            self._wanted.wait_for(lambda: self._jobs or self._ended)
            return self._jobs.popleft() if self._jobs else None

    def _carry_out(self, call: Callable[[], None]) -> None:
        failed = 0
        try:
            call()
        except Exception:  # whatever a job does, the next one runs
            failed = 1
            log.exception("a transfer failed")
        finally:
            with self._lock:
                self.failed += failed
                self._open -= 1
                self._idle.notify_all()
