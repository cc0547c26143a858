"""The thread pool, driven by Python tasks: each call of a task takes the GIL, each barrier releases it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sdcp_mono.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the kernels aren't compiled here")

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[ctypes.CDLL]:
    path = tmp_path / "kernels.so"
    shutil.copy(native.LIBRARY, path)
    lib = ctypes.CDLL(str(path))
    assert lib.sdcp_pool_threads() == 1
    yield lib
    lib.sdcp_pool_stop()


def run(lib: ctypes.CDLL, task: Callable[[int, int], None]) -> None:
    lib.sdcp_parallel(TASK(lambda _arg, thread, threads: task(thread, threads)), None)


def seen_by(lib: ctypes.CDLL) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    run(lib, lambda thread, count: seen.append((thread, count)))
    return sorted(seen)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_runs_once_and_all_have_ended(lib: ctypes.CDLL, threads: int) -> None:
    assert lib.sdcp_pool_start(threads) == threads
    for _ in range(20):
        assert seen_by(lib) == [(thread, threads) for thread in range(threads)]


def test_barrier_separates_phases(lib: ctypes.CDLL) -> None:
    lib.sdcp_pool_start(4)
    phases: list[int] = []

    def task(_thread: int, threads: int) -> None:
        for phase in range(50):
            phases.append(phase)
            lib.sdcp_barrier(threads)

    run(lib, task)
    assert phases == [phase for phase in range(50) for _ in range(4)]


def test_restart_changes_the_number_of_threads(lib: ctypes.CDLL) -> None:
    for threads in (3, 1, 2, 2, 6):
        lib.sdcp_pool_start(threads)
        assert seen_by(lib) == [(thread, threads) for thread in range(threads)]


def test_a_call_from_inside_a_task_runs_on_that_thread_alone(lib: ctypes.CDLL) -> None:
    lib.sdcp_pool_start(2)
    seen: list[tuple[int, int, int, bool]] = []

    def task(outer: int, _threads: int) -> None:
        here = threading.get_ident()
        run(lib, lambda thread, count: seen.append((outer, thread, count, threading.get_ident() == here)))

    run(lib, task)
    assert sorted(seen) == [(0, 0, 1, True), (1, 0, 1, True)]


def test_concurrent_callers_take_turns(lib: ctypes.CDLL) -> None:
    lib.sdcp_pool_start(3)
    inside, most = [0], [0]
    lock = threading.Lock()

    def task(thread: int, threads: int) -> None:
        if thread == 0:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
        lib.sdcp_barrier(threads)
        lib.sdcp_barrier(threads)
        if thread == 0:
            with lock:
                inside[0] -= 1

    def call() -> None:
        for _ in range(20):
            run(lib, task)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert most == [1]


def test_a_forked_child_computes_alone(lib: ctypes.CDLL, tmp_path: Path) -> None:
    script = f"""
import ctypes, os
lib = ctypes.CDLL({str(tmp_path / "kernels.so")!r})
lib.sdcp_pool_start(3)
task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
seen = []
call = task(lambda arg, thread, threads: seen.append(threads))
lib.sdcp_parallel(call, None)
if os.fork() == 0:
    lib.sdcp_parallel(call, None)
    lib.sdcp_pool_start(2)
    lib.sdcp_parallel(call, None)
    os._exit(0 if seen == [3, 3, 3, 1, 2, 2] else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
