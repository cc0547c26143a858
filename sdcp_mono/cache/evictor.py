"""The thread that keeps host memory below its watermark: when it fails, that is counted and it goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0  # between two looks when nobody wakes it
MAX_PAUSE_SECONDS: Final = 60.0  # after failures in a row: what keeps failing should not fill the log


class Evictor:
    """Calls ``tidy`` when woken, and now and then. Until it succeeds again after a failure, it is not ``healthy``."""

    def __init__(self, tidy: Callable[[], None], tick_seconds: float = TICK_SECONDS) -> None:
        self._tidy = tidy
        self._tick = tick_seconds
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._in_a_row = 0
        self.failures = 0

    @property
    def healthy(self) -> bool:
        return not self._in_a_row

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="evictor", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, seconds: float) -> bool:
        """End it; False if it is still at work after ``seconds``: then it is left."""
        self._ended.set()
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(self._tick)
            self._wake.clear()
            try:
                self._tidy()
                self._in_a_row = 0
            except Exception:  # it must not stay dead: memory would fill and every copy would make its own room
                self.failures += 1
                self._in_a_row += 1
                log.exception("the evictor failed and goes on")
                self._ended.wait(min(MAX_PAUSE_SECONDS, self._tick * 2.0**self._in_a_row))
