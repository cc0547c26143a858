"""Logs of sessions that are over, kept for a while: to go on from (``Last-Event-ID``), to look into, to replay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import AppendOutcome, CommitLog, LogAppend


class ListedLog(CommitLog, Protocol):
    """A commit log that knows its logs."""

    async def names(self) -> Sequence[str]:
        """Every log, in the order of creation."""


class KeptLogs:
    """A ``CommitLog`` over ``logs`` that keeps the newest ``keep`` of those that were dropped.

    A log that was left behind by an earlier process counts as dropped, its session is over, until a record of it is
    appended: then it was only the process in front of the log that was new.
    """

    def __init__(self, logs: ListedLog, keep: int) -> None:
        self._logs = logs
        self._keep = keep
        self._dropped: OrderedDict[str, None] = OrderedDict()  # oldest first; at most ``keep`` after a drop

    async def adopt(self) -> int:
        """Take over what is there, before anything else is asked; how many logs that were."""
        names = await self._logs.names()
        self._dropped.update(dict.fromkeys(names))  # none is forgotten yet: who works on one may still be on the way
        return len(names)

    async def names(self) -> Sequence[str]:
        """Every log, kept ones too, in the order of creation."""
        return await self._logs.names()

    async def create(self, log: str) -> None:
        await self._logs.create(log)

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        for append in appends:
            self._dropped.pop(append.log, None)
        return await self._logs.append(appends)

    async def fence(self, log: str, epoch: int) -> bool:
        done = await self._logs.fence(log, epoch)
        self._dropped.pop(log, None)  # it is taken up again
        return done

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]:
        return await self._logs.read(log, from_)

    async def drop(self, log: str) -> None:
        """Forget a log, but not yet: when ``keep`` others were dropped after it."""
        self._dropped[log] = None
        self._dropped.move_to_end(log)
        while len(self._dropped) > self._keep:
            oldest, _ = self._dropped.popitem(last=False)
            await self._logs.drop(oldest)
