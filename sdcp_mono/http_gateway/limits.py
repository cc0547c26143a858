"""Limits of one gateway: body sizes, times, polls and rates (AMB-010, 166, 189; section 9)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from msgspec import Struct

from sdcp_mono.core.problems import TooManyRequests

BUCKETS: Final = 8192  # rates remembered: sessions of one verifier, many times over


class GatewayLimits(Struct, frozen=True):
    """Each with its reason. Sizes in octets, times in seconds, rates per second."""

    prompt_body: int = 16 * 2**20  # session-open and assignment carry prompts (AMB-010)
    body: int = 64 * 2**10  # any other message (AMB-010)
    object_body: int = 64 * 2**20  # 64 rows of a 256k vocabulary are 64 MiB
    bodies: int = 256 * 2**20  # octets of bodies being read at once, over all callers
    body_seconds: float = 10.0  # to send a message; a slow sender holds memory and a stream
    object_seconds: float = 60.0  # to send an object
    poll_seconds: float = 20.0  # the longest wait of a poll, below the idle timeouts of proxies (AMB-166)
    polls: int = 256  # open polls of one identity: a front end with 32 sessions needs 32
    requests: int = 512  # requests of one identity under way, polls included; below the stream limit of two connections
    connections: int = 1024  # of all callers
    caller_connections: int = 32  # of one identity; a client needs one or two
    session_rate: float = 200.0  # proposals of one session: a round takes a forward pass, several milliseconds
    drafter_rate: float = 2000.0  # proposals of one drafter, over all its sessions


class Rates:
    """Token buckets by key: ``rate`` per second on average, one second's worth at once."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._buckets: OrderedDict[bytes | str, tuple[float, float]] = OrderedDict()  # key -> tokens, when

    def take(self, key: bytes | str) -> None:
        """Count one; raises ``TooManyRequests`` with the time until the next is allowed."""
        now = self._clock()
        tokens, then = self._buckets.pop(key, (self._rate, now))
        tokens = min(self._rate, tokens + (now - then) * self._rate)
        refused = tokens < 1.0
        self._buckets[key] = (tokens if refused else tokens - 1.0, now)
        if len(self._buckets) > BUCKETS:
            self._buckets.popitem(last=False)
        if refused:
            raise TooManyRequests("too many proposals", retry_after_ms=1 + int(1000 * (1.0 - tokens) / self._rate))


class Slots:
    """How many things each identity has under way; more than ``limit`` are refused."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._taken: Counter[str] = Counter()
        self._none = asyncio.Event()
        self._none.set()

    async def none(self) -> None:
        """Wait until nothing is under way."""
        await self._none.wait()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Raises ``TooManyRequests`` at the limit."""
        if self._taken[key] >= self._limit:
            raise TooManyRequests(f"too many {self._what} at once", retry_after_ms=1000)
        self._taken[key] += 1
        self._none.clear()
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]
            if not self._taken:
                self._none.set()
