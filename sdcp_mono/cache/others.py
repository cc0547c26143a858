"""The tier of others: blobs that other machines can find, in any object store they share. All of it is best effort."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from sdcp_mono.cache.blob import BadBlob, Blob, pack, unpack
from sdcp_mono.cache.host import Pin
from sdcp_mono.cache.stats import Rate, TierStats
from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.ports import Got, ObjectStore
from sdcp_mono.core.problems import Conflict

log = logging.getLogger(__name__)

STORE_SECONDS: Final = 10.0  # of storing one blob
AT_ONCE: Final = 8  # blobs on their way to others, each a copy in memory; and asked for together
WAITING: Final = 512  # blobs to be stored, of which only the names wait: the blocks of a long prompt
GUESS: Final = 5e7  # bytes a second before anything was measured: careful, not hopeless


class Others:
    """On one event loop. ``pin`` holds a blob in host memory while it is copied."""

    def __init__(self, store: ObjectStore, pin: Callable[[bytes], Pin | None]) -> None:
        self._store = store
        self._pin = pin
        self.rate = Rate(GUESS)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._sending: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._ended = False

    def send_soon(self, blob: Blob) -> None:
        """Let others find it; left out if too many wait, or it is the end."""
        if self._ended:
            return
        if len(self._sending) >= WAITING:
            self._counts["refused"] += 1
            return
        task = asyncio.ensure_future(self._send(blob))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def sent(self) -> None:
        """Wait until nothing is on its way."""
        while self._sending:
            await asyncio.wait(self._sending)

    async def stop(self) -> None:
        self._ended = True
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def fetch(self, blobs: Sequence[Blob], take: Callable[[Blob, memoryview], Awaitable[bool]]) -> None:
        """Give ``take`` what others hold of ``blobs``; ends after the first that nobody has. Whatever fails is a miss.

        What they hold is measured, and how long they leave whoever asks without it, also when nobody waits any more.
        """
        for start in range(0, len(blobs), AT_ONCE):
            some = blobs[start : start + AT_ONCE]
            started, came = time.perf_counter(), 0
            try:
                for blob, got in zip(some, await self._get(some), strict=True):
                    if not (size := await self._keep(blob, got, take)):
                        return
                    came += size
            except Exception as error:  # of the store or of the tiers: nobody who asks for KV is to hear of it
                self._counts["errors"] += 1
                log.error("what others answered could not be kept: %r", error)
                return
            finally:
                seconds = time.perf_counter() - started
                if came:
                    self.rate.measured(came, seconds)
                else:
                    self.rate.at_most(sum(blob.size for blob in some), seconds)

    def stats(self) -> TierStats:
        counts = self._counts
        return TierStats(
            name="remote", hits=counts["hits"], misses=counts["misses"], stored=counts["stored"],
            refused=counts["refused"], corrupt=counts["corrupt"], errors=counts["errors"],
        )  # fmt: skip

    async def _send(self, blob: Blob) -> None:
        async with self._slots:
            pin = self._pin(blob.key)
            if pin is None:  # evicted meanwhile
                return
            with pin:
                file = pack(blob, pin.data)
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    await self._store.put(blob.uri, file)
                self._counts["stored"] += 1
            except Conflict:
                pass  # somebody else was faster: it is the same
            except Exception as error:
                self._counts["errors"] += 1
                log.debug("a blob could not be stored with others: %s", error)

    async def _get(self, blobs: Sequence[Blob]) -> Sequence[Got]:
        """All of one scope: they are the blocks of one prefix."""
        try:
            answers = await self._store.get_many([blob.uri for blob in blobs], MlcUri.parse(blobs[0].uri).scope)
            if len(answers) != len(blobs):
                raise ValueError(f"{len(answers)} answers to {len(blobs)} questions")
            return answers
        except Exception as error:  # down, slow, or confused: the KV is computed instead
            log.debug("blobs could not be fetched: %s", error)
            return [Got("failed")] * len(blobs)

    async def _keep(self, blob: Blob, got: Got, take: Callable[[Blob, memoryview], Awaitable[bool]]) -> int:
        """The bytes that came; 0 where nobody has it, it is damaged, or there is no room."""
        if got.value is None:
            self._counts["errors" if got.status == "failed" else "misses"] += 1
            return 0
        try:
            found, payload = unpack(got.value if isinstance(got.value, bytes) else got.value.to_bytes(), blob.uri)
            if found != blob:
                raise BadBlob(f"{found.size} bytes of {found.dtype} instead of {blob.size} of {blob.dtype}")
        except BadBlob as bad:
            self._counts["corrupt"] += 1
            log.error("what others hold of %s can't be used: %s", blob.uri, bad)
            return 0
        if not await take(blob, payload):
            return 0
        self._counts["hits"] += 1
        return blob.size
