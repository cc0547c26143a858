"""Loading a model can't be interrupted, and may take minutes; a process that is told to stop ends all the same."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


async def load_unless_told(load: Callable[[], T], serving: asyncio.Task[None]) -> T:
    """What ``load`` answers, on a thread of its own. ``serving`` ends when the process is told to stop (C-48).

    Then the process ends here, with exit code 0: nothing was promised yet, and a thread that reads weights would keep
    an orderly end waiting past the grace period. What ``serving`` raises, such as a port that is taken, is raised.
    """
    loading = asyncio.create_task(asyncio.to_thread(load))
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        await serving
        log.info("told to stop while loading")
        logging.shutdown()
        os._exit(0)
    return loading.result()
