"""Where objects lie: segments that are cut into equal slots (a slab allocator; bookkeeping only, no bytes).

Law of this module:
- A segment belongs to one size class while it is open; its slots are free or used, never both, and never move.
- A segment is opened when a class has no free slot and the cap allows one more; if it does not, an empty segment of
  another class is given up for it. So nothing is taken before it is needed, and never more than the cap.
- ``used_bytes + free_bytes == total_bytes``, always. A slot that is used counts whole.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

PAGE: Final = 4096  # bytes: what O_DIRECT and memory maps ask of offsets and sizes


@dataclass(frozen=True, slots=True)
class Slot:
    """``bytes`` bytes at ``offset`` of a segment, both whole pages; ``index`` counts the segment's slots from 0."""

    segment: int
    index: int
    offset: int
    bytes: int


@dataclass(slots=True)
class _Segment:
    slot_bytes: int
    free: list[int]  # a heap: the lowest slot first
    used: set[int]


def slot_bytes(size: int) -> int:
    """The size class of ``size`` bytes: whole pages, then 1/8 of its power of two (at most 12.5 % stay unused)."""
    pages = max(1, -(-size // PAGE))
    step = max(1, (1 << (pages.bit_length() - 1)) // 8)
    return -(-pages // step) * step * PAGE


class Slabs:
    """As many segments of ``segment_bytes`` (whole pages), numbered from 0, as ``capacity_bytes`` holds.

    ``opened(segment, slot_bytes)`` and ``closed(segment)`` ask the owner to make and give up a segment's memory or
    file; if ``opened`` raises, the segment stays closed and ``allocate`` passes the error on. Not thread-safe.
    """

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int,
        opened: Callable[[int, int], None] = lambda segment, slot_bytes: None,
        closed: Callable[[int], None] = lambda segment: None,
    ) -> None:
        if segment_bytes < PAGE or segment_bytes % PAGE:
            raise ValueError(f"segment_bytes: {segment_bytes} is not a positive multiple of {PAGE}")
        self.segment_bytes = segment_bytes
        self.segments = max(0, capacity_bytes) // segment_bytes
        self.used_bytes = 0
        self._opened, self._closed = opened, closed
        self._open: dict[int, _Segment] = {}
        self._vacant: dict[int, OrderedDict[int, None]] = {}  # class -> its segments with a free slot, taken in turn
        self._empty: OrderedDict[int, None] = OrderedDict()  # open segments without a used slot

    @property
    def total_bytes(self) -> int:
        return self.segments * self.segment_bytes

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def fits(self, size: int) -> bool:
        """Would ``allocate`` find a slot now?"""
        need = slot_bytes(size)
        room = self._vacant.get(need) or self._empty or len(self._open) < self.segments
        return bool(room) and need <= self.segment_bytes

    def used_in(self, segment: int) -> int:
        """How many slots of an open segment are in use."""
        return len(self._open[segment].used)

    def allocate(self, size: int) -> Slot | None:
        """A slot for ``size`` bytes; None if there is none now. More than a segment never fits."""
        if not self.fits(size):
            return None
        need = slot_bytes(size)
        if not self._vacant.get(need):
            self._open_one(need)
        number = next(iter(self._vacant[need]))
        segment = self._open[number]
        index = heapq.heappop(segment.free)
        segment.used.add(index)
        self.used_bytes += need
        self._empty.pop(number, None)
        if not segment.free:
            del self._vacant[need][number]
        return Slot(number, index, index * need, need)

    def free(self, slot: Slot) -> None:
        """Give a slot back; raises ``ValueError``, and changes nothing, if it is not in use."""
        segment = self._open.get(slot.segment)
        if segment is None or slot.index not in segment.used or slot.bytes != segment.slot_bytes:
            raise ValueError(f"slot: {slot} is not in use")
        segment.used.remove(slot.index)
        heapq.heappush(segment.free, slot.index)
        self.used_bytes -= slot.bytes
        self._vacant[slot.bytes][slot.segment] = None
        if not segment.used:
            self._empty[slot.segment] = None

    def restore(self, segment: int, size: int, used: Iterable[int]) -> list[Slot]:
        """Open a segment that is there already (``opened`` is not called) with the slots ``used``: after a restart.

        Raises ``ValueError`` for a number that is open or past the cap, a size that is no class, and a bad index.
        """
        indexes = sorted(set(used))
        if not 0 <= segment < self.segments or segment in self._open:
            raise ValueError(f"segment: {segment} is open already or past the last one")
        if size != slot_bytes(size) or size > self.segment_bytes:
            raise ValueError(f"size: {size} is not a size class")
        if indexes and not 0 <= indexes[0] <= indexes[-1] < self.segment_bytes // size:
            raise ValueError(f"used: segment {segment} has no such slot")
        self._register(segment, size, indexes)
        return [Slot(segment, index, index * size, size) for index in indexes]

    def forget(self, segment: int) -> None:
        """Close a segment that is gone (``closed`` is not called); its slots are gone with it and not to be freed."""
        gone = self._open.pop(segment)
        self.used_bytes -= len(gone.used) * gone.slot_bytes
        self._vacant[gone.slot_bytes].pop(segment, None)
        self._empty.pop(segment, None)

    def check(self) -> None:
        """Recount everything; ``AssertionError`` if the law does not hold."""
        for number, segment in self._open.items():
            slots = range(self.segment_bytes // segment.slot_bytes)
            assert sorted([*segment.free, *segment.used]) == [*slots], f"segment {number}: a slot is lost or twice"
            assert (number in self._vacant[segment.slot_bytes]) == bool(segment.free)
            assert (number in self._empty) == (not segment.used)
        assert self.used_bytes == sum(len(s.used) * s.slot_bytes for s in self._open.values()) <= self.total_bytes
        assert all(0 <= number < self.segments for number in self._open)

    def _open_one(self, need: int) -> None:
        if len(self._open) == self.segments:
            idle = next(iter(self._empty))
            self.forget(idle)
            self._closed(idle)
        number = next(n for n in range(self.segments) if n not in self._open)
        self._opened(number, need)
        self._register(number, need, [])

    def _register(self, number: int, size: int, used: list[int]) -> None:
        free = sorted(set(range(self.segment_bytes // size)) - set(used))
        self._open[number] = _Segment(size, free, set(used))
        self.used_bytes += len(used) * size
        vacant = self._vacant.setdefault(size, OrderedDict())
        if free:
            vacant[number] = None
        if not used:
            self._empty[number] = None
