"""What a tier of the cache reports about itself."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

LEARN: Final = 0.2  # weight of one measurement


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
    """Bytes a second of a tier, as measured; ``guess`` before anything was."""

    __slots__ = ("bytes_per_second",)

    def __init__(self, guess: float) -> None:
        self.bytes_per_second = guess

    def seconds(self, size: int) -> float:
        return size / self.bytes_per_second

    def measured(self, size: int, seconds: float) -> None:
        if size and seconds > 0:
            self.bytes_per_second += LEARN * (size / seconds - self.bytes_per_second)
