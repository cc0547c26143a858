"""Segmented LRU: which objects go first (design, section 5, point 7).

Law of this module: a key is either on *probation*, where it enters, or *protected*, where its second use brings it.
The protected ones hold at most 80 % of the capacity; over that, the oldest of them return to probation. So one scan
over many objects that are used once passes through probation and leaves what is used often alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

PROTECTED_PERCENT: Final = 80  # the share the SLRU paper (Karedla 1994) and the caches after it found best


class Slru:
    """Order of ``keys`` with their sizes in bytes; not thread-safe. Everything but the walk is O(1), amortised."""

    __slots__ = ("_limit", "_probation", "_protected", "_protected_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self._limit = capacity_bytes * PROTECTED_PERCENT // 100
        self._probation: OrderedDict[bytes, int] = OrderedDict()  # key -> size, oldest first
        self._protected: OrderedDict[bytes, int] = OrderedDict()
        self._protected_bytes = 0

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: bytes) -> bool:
        return key in self._probation or key in self._protected

    @property
    def protected_bytes(self) -> int:
        return self._protected_bytes

    def add(self, key: bytes, size: int) -> None:
        """Enter on probation, as its newest; raises ``ValueError`` for a key that is here."""
        if key in self:
            raise ValueError("key: already in the list")
        self._probation[key] = size

    def touch(self, key: bytes) -> None:
        """Make ``key`` the newest of the protected; ``KeyError`` for an unknown one."""
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        self._protected[key] = size = self._probation.pop(key)
        self._protected_bytes += size
        while self._protected_bytes > self._limit:  # an object larger than the limit goes straight back
            oldest, size = self._protected.popitem(last=False)
            self._protected_bytes -= size
            self._probation[oldest] = size

    def remove(self, key: bytes) -> None:
        """Forget ``key``; ``KeyError`` for an unknown one."""
        if key in self._probation:
            del self._probation[key]
        else:
            self._protected_bytes -= self._protected.pop(key)

    def victims(self) -> Iterator[bytes]:
        """All keys, the one to go first first; nothing may be added, touched or removed during the walk."""
        yield from self._probation
        yield from self._protected
