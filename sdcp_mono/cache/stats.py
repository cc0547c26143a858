"""What a tier of the cache reports about itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

LEARN: Final = 0.2  # weight of one measurement
FORGET_SECONDS: Final = 60.0  # a store that was slow is tried once a minute: what is never asked is never measured


class TierStats(Struct, frozen=True):
    """One tier now (bytes, ``objects``) and since its start (the counters).

    ``used_bytes`` is the room that stored objects take, ``staging_bytes`` the room promised to objects that are still
    being written; free is ``capacity_bytes - used_bytes - staging_bytes``. ``pinned_bytes`` is a part of the used.
    """

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    pinned_bytes: int = 0
    staging_bytes: int = 0
    objects: int = 0
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0  # dropped for room
    refused: int = 0  # not taken for want of room
    corrupt: int = 0  # found damaged, and not served
    errors: int = 0  # of the machine: no memory, no disk, no network
    healthy: bool = True
    note: str = ""  # why it is not healthy, for a person


class Rate:
    """Bytes a second of a tier, as measured; ``guess`` before anything was, and again when a slow one is long ago."""

    __slots__ = ("_clock", "_guess", "_last", "bytes_per_second")

    def __init__(self, guess: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess, self._clock = guess, clock
        self._last = clock()  # when it was measured
        self.bytes_per_second = guess

    def seconds(self, size: int) -> float:
        """What moving ``size`` bytes is expected to take."""
        old = self._clock() - self._last > FORGET_SECONDS
        return size / (max(self._guess, self.bytes_per_second) if old else self.bytes_per_second)

    def measured(self, size: int, seconds: float) -> None:
        if size and seconds > 0:
            self._last = self._clock()
            self.bytes_per_second += LEARN * (size / seconds - self.bytes_per_second)

    def at_most(self, size: int, seconds: float) -> None:
        """``size`` bytes did not come in ``seconds``: it isn't faster than that, if it was believed to be."""
        if size < self.bytes_per_second * seconds:
            self.measured(size, seconds)
