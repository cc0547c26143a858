"""Tasks of a role: kept alive while they run, their faults logged, none left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sdcp_mono.core.problems import Refusal

log = logging.getLogger(__name__)


class Tasks:
    """What one role has started. The event loop holds tasks weakly, so somebody has to."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def stop(self) -> None:
        """Cancel everything and wait until it has ended."""
        while self._running:
            tasks = list(self._running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.difference_update(tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refusal):
            log.error("a task failed", exc_info=error)


async def repeat(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do ``work`` now and every ``seconds`` again. A fault is logged; it must not silence a role for good."""
    while True:
        try:
            await work()
        except Refusal as refusal:
            log.warning("%s: %s", work.__name__, refusal.detail)
        except Exception:
            log.exception("%s failed", work.__name__)
        await asyncio.sleep(seconds)
