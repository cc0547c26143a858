"""Appends that tests make up, and a loop to run them on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from typing import Any

from sdcp_mono.core.messages import CommitRecord
from sdcp_mono.core.ports import LogAppend


def make_append(log: str, sequence: int, *, epoch: int = 1, token: int = 7) -> LogAppend:
    digest = hashlib.sha256(f"{log}/{sequence}/{token}".encode()).digest()
    committed = sequence + 1
    record = CommitRecord(epoch=epoch, round=committed, emitted=(token,), committed=committed, digest=digest)
    return LogAppend(log, sequence, record)


def run(*steps: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of ``steps``, in order, on one event loop."""

    async def in_order() -> list[Any]:
        return [await step for step in steps]

    return asyncio.run(in_order())
