"""The pool: every accepted job is run or given up, exactly once, and nobody is made to wait."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sdcp_mono.cache.transfers import Transfers


@contextmanager
def pool(threads: int, limit: int = 100) -> Iterator[Transfers]:
    made = Transfers(threads, limit)
    try:
        yield made
    finally:
        made.stop()
        assert not [thread for thread in made._threads if thread.is_alive()]


class Busy:
    """Keeps threads of a pool at work until ``go_on`` is set."""

    def __init__(self, transfers: Transfers, threads: int) -> None:
        self.go_on = threading.Event()
        self._begun = threading.Semaphore(0)
        for _ in range(threads):
            assert transfers.submit(self._work, _nothing)
        for _ in range(threads):
            assert self._begun.acquire(timeout=30)

    def _work(self) -> None:
        self._begun.release()
        assert self.go_on.wait(30)


def _nothing() -> None:
    pass


def _failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_every_job_runs_once_on_some_thread_of_the_pool() -> None:
    ran: list[int] = []
    names: set[str] = set()

    def job(number: int) -> None:
        ran.append(number)
        names.add(threading.current_thread().name)

    with pool(2) as transfers:
        for number in range(50):
            assert transfers.submit(lambda number=number: job(number), _nothing)
        assert transfers.settle(30)
    assert sorted(ran) == list(range(50))
    assert names <= {"transfer 0", "transfer 1"}


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), OSError(5, "x"), MemoryError(), asyncio.CancelledError(), SystemExit(1)]
)
def test_a_job_that_fails_is_counted_and_harms_no_other(error: BaseException) -> None:
    ran = threading.Event()
    with pool(1) as transfers:
        transfers.submit(_failing(error), _nothing)
        transfers.submit(ran.set, _nothing)
        assert transfers.settle(30)
        assert (ran.is_set(), transfers.failed) == (True, 1)


def test_a_full_queue_refuses_at_once_and_tells_nobody() -> None:
    ran: list[str] = []
    with pool(1, limit=2) as transfers:
        busy = Busy(transfers, 1)
        taken = [transfers.submit(lambda: ran.append("run"), lambda: ran.append("given up")) for _ in range(5)]
        assert taken == [True, True, False, False, False]
        assert transfers.refused == 3
        busy.go_on.set()
        assert transfers.settle(30)
        assert transfers.submit(lambda: ran.append("run"), _nothing)  # there is room again
        assert transfers.settle(30)
    assert ran == ["run"] * 3


def test_settling_has_a_deadline() -> None:
    with pool(1) as transfers:
        busy = Busy(transfers, 1)
        assert not transfers.settle(0.0)
        busy.go_on.set()
        assert transfers.settle(30)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_end_finishes_what_runs_and_gives_up_what_waits(threads: int) -> None:
    told: list[str] = []
    with pool(threads) as transfers:
        busy = Busy(transfers, threads)
        for number in range(10):
            give_up = _failing(RuntimeError("x")) if number == 3 else lambda: told.append("given up")
            transfers.submit(lambda: told.append("run"), give_up)
        stopping = threading.Thread(target=transfers.stop)
        stopping.start()
        # The waiting ones are given up before anybody waits for the threads.
        while len(told) < 9:
            assert stopping.is_alive()
        busy.go_on.set()
        stopping.join(30)
        assert not stopping.is_alive()
        transfers.stop()  # again
        assert told == ["given up"] * 9
        assert transfers.failed == 1  # the one whose owner raised
        assert transfers.settle(0.0)
        assert not transfers.submit(_nothing, _nothing)


def test_the_end_has_a_deadline_while_a_job_hangs() -> None:
    with pool(1) as transfers:
        busy = Busy(transfers, 1)
        transfers.stop(0.0)
        assert not transfers.settle(0.0)
        busy.go_on.set()


@pytest.mark.parametrize("seed", range(20))
def test_every_accepted_job_is_run_or_given_up_exactly_once_whenever_the_end_comes(seed: int) -> None:
    told: Counter[tuple[int, int]] = Counter()
    accepted: list[tuple[int, int]] = []
    lock = threading.Lock()
    begin = threading.Barrier(6)

    def tell(job: tuple[int, int]) -> None:
        with lock:
            told[job] += 1

    def submit(thread: int) -> None:
        begin.wait(30)
        for number in range(100):
            job = (thread, number)
            if transfers.submit(lambda job=job: tell(job), lambda job=job: tell(job)):
                with lock:
                    accepted.append(job)

    def stop() -> None:
        begin.wait(30)
        while sum(told.values()) < 7 * seed:  # at another moment each time
            pass
        transfers.stop()

    with pool(2, limit=1000) as transfers:
        threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
        threads += [threading.Thread(target=stop) for _ in range(2)]  # and two who end it
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert transfers.settle(30)
    assert told == Counter(accepted)
