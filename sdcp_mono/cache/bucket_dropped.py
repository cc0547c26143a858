"""Dropped logs in a bucket: ``dropped/<name>/<incarnation>``, one empty object each, until their records are deleted.

A deleted record would be a free place for a writer that does not know yet that its log is gone. So the records stay
for ``GRACE_SECONDS``, and a writer looks for its log when it has not seen it for ``TRUST_SECONDS``. The times of the
entries are the store's, which is the clock that all processes share; whoever drops logs deletes for all.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Final

from sdcp_mono.cache.bucket import MAX_SEGMENT, Bucket, together
from sdcp_mono.core.problems import Unavailable

TRUST_SECONDS: Final = 60.0  # a look a minute costs nothing
GRACE_SECONDS: Final = 600.0  # well above TRUST_SECONDS and the longest call
SWEEP_EVERY: Final = 16  # drops per listing of what was dropped
SWEEP: Final = 64  # logs that one sweep deletes: more than are dropped between two
MAX_LISTED: Final = 4096  # entries and, at a time, records of a log: four pages


class DroppedLogs:
    """What becomes of logs that nobody needs any more."""

    def __init__(self, bucket: Bucket, grace_seconds: float = GRACE_SECONDS) -> None:
        self._bucket = bucket
        self._grace = timedelta(seconds=grace_seconds)
        self._drops = 0

    async def add(self, name: str, incarnation: str) -> None:
        """End the log ``logs/<name>``, and now and then delete what is left of others."""
        await self._bucket.overwrite(f"dropped/{name}/{incarnation}", b"")
        await self._bucket.delete([f"logs/{name}"])
        self._drops += 1
        if self._drops % SWEEP_EVERY == 0:
            with suppress(Unavailable):  # what is left over is for a later one
                await self.sweep()

    async def sweep(self) -> None:
        """Delete the records of logs that were dropped long enough ago, at most 64 logs."""
        entries = sorted(await self._bucket.list("dropped", MAX_LISTED), key=lambda entry: entry.modified)
        due = [entry.key for entry in entries if entry.modified <= entries[-1].modified - self._grace]
        await together(self._delete, due[:SWEEP])

    async def _delete(self, key: str) -> None:
        _, name, incarnation = key.split("/")
        marker = await self._bucket.get(f"logs/{name}", MAX_SEGMENT)
        if marker is not None and marker.data == incarnation.encode():  # the drop was cut short: let it count from now
            await self.add(name, incarnation)
            return
        records = await self._bucket.list(f"records/{name}/{incarnation}", MAX_LISTED)
        await self._bucket.delete([record.key for record in records])
        if len(records) < MAX_LISTED:
            await self._bucket.delete([key])
