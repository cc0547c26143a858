"""The evictor's thread: it looks when woken, looks less often while it fails, and nothing ends it but ``stop``."""

from __future__ import annotations

import threading

import pytest

from sdcp_mono.cache import evictor
from sdcp_mono.cache.evictor import Evictor


def test_c_39_failures_for_days_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.0 ** 1024 is more than a float holds: after so many failures in a row the thread must still be there."""
    monkeypatch.setattr(evictor, "MAX_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(evictor.log, "exception", lambda *_: None)
    calls, recovered = [0], threading.Event()

    def tidy() -> None:
        calls[0] += 1
        if calls[0] <= 1100:
            raise OSError(5, "input/output error")
        recovered.set()

    made = Evictor(tidy, tick_seconds=0.0)
    made.start()
    try:
        assert recovered.wait(30)
    finally:
        assert made.stop(30)
    assert made.failures == 1100
    assert made.healthy


def test_it_sleeps_between_two_looks_when_nobody_wakes_it() -> None:
    looked = threading.Semaphore(0)
    made = Evictor(looked.release, tick_seconds=3600.0)
    made.start()
    try:
        assert not looked.acquire(blocking=False)
        made.wake()
        assert looked.acquire(timeout=30)
    finally:
        assert made.stop(30)


def test_the_end_does_not_wait_for_one_that_hangs() -> None:
    begun, go = threading.Event(), threading.Event()

    def tidy() -> None:
        begun.set()
        go.wait(30)

    made = Evictor(tidy)
    made.start()
    made.wake()
    assert begun.wait(30)
    assert not made.stop(0.0)
    go.set()
    assert made.stop(30)
