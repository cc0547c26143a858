"""The slab allocator: classes, segments and the recount."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.cache.slabs import Slabs, Slot, slot_bytes

K = 1024


@pytest.mark.parametrize(
    ("size", "pages"),
    [(0, 1), (1, 1), (4096, 1), (4097, 2), (15 * 4096, 15), (16 * 4096, 16), (16 * 4096 + 1, 18), (32 * 4096, 32),
     (32 * 4096 + 1, 36), (90 * 4096, 96), (91 * 4096, 96), (100 * 4096, 104), (128 * 4096, 128)],
)  # fmt: skip
def test_size_classes_are_eighths_of_a_power_of_two(size: int, pages: int) -> None:
    assert slot_bytes(size) == pages * 4096


@given(st.integers(4096, 1 << 40))
def test_a_class_is_its_own_class_and_wastes_an_eighth_at_most(size: int) -> None:
    rounded = slot_bytes(size)
    assert rounded % 4096 == 0
    assert slot_bytes(rounded) == rounded
    whole_pages = -(-size // 4096) * 4096
    assert whole_pages <= rounded <= whole_pages * 9 / 8


class Owner:
    """Records which segments it was asked to make and give up."""

    def __init__(self, capacity: int, segment: int) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.broken = False
        self.slabs = Slabs(capacity, segment, self.opened, lambda number: self.calls.append(("closed", number, 0)))

    def opened(self, segment: int, slot_bytes: int) -> None:
        if self.broken:
            raise OSError("no")
        self.calls.append(("opened", segment, slot_bytes))


def allocated(slabs: Slabs, size: int) -> Slot:
    slot = slabs.allocate(size)
    assert slot is not None
    return slot


def test_segments_are_opened_when_needed_and_cut_into_slots() -> None:
    owner = Owner(64 * K, 16 * K)
    slabs = owner.slabs
    assert (owner.calls, slabs.total_bytes, slabs.free_bytes) == ([], 64 * K, 64 * K)
    slots = [allocated(slabs, 8 * K) for _ in range(3)]
    assert slots == [Slot(0, 0, 0, 8 * K), Slot(0, 1, 8 * K, 8 * K), Slot(1, 0, 0, 8 * K)]
    assert owner.calls == [("opened", 0, 8 * K), ("opened", 1, 8 * K)]
    assert (slabs.used_bytes, slabs.free_bytes, slabs.used_in(0), slabs.used_in(1)) == (24 * K, 40 * K, 2, 1)
    slabs.check()


def test_an_empty_segment_is_given_up_when_another_class_needs_its_room() -> None:
    owner = Owner(32 * K, 16 * K)
    slabs = owner.slabs
    a, b, c = (allocated(slabs, 8 * K) for _ in range(3))
    assert slabs.allocate(16 * K) is None
    slabs.free(c)
    assert slabs.fits(16 * K)
    assert allocated(slabs, 16 * K) == Slot(1, 0, 0, 16 * K)
    assert owner.calls[2:] == [("closed", 1, 0), ("opened", 1, 16 * K)]
    assert not slabs.fits(8 * K)
    slabs.free(a)
    assert allocated(slabs, 8 * K) == a
    slabs.free(b)
    slabs.check()


def test_a_slot_is_freed_once() -> None:
    slabs = Slabs(16 * K, 16 * K)
    slot = allocated(slabs, 4 * K)
    slabs.free(slot)
    for wrong in (slot, Slot(0, 9, 0, 4 * K), Slot(7, 0, 0, 4 * K)):
        with pytest.raises(ValueError, match="not in use"):
            slabs.free(wrong)
    slot = allocated(slabs, 4 * K)
    with pytest.raises(ValueError, match="not in use"):
        slabs.free(Slot(slot.segment, slot.index, 0, 8 * K))  # of another class
    assert slabs.used_bytes == 4 * K
    slabs.check()


def test_what_is_larger_than_a_segment_never_fits() -> None:
    slabs = Slabs(64 * K, 16 * K)
    assert not slabs.fits(16 * K + 1)
    assert slabs.allocate(16 * K + 1) is None
    assert Slabs(0, 4096).allocate(1) is None
    assert Slabs(-1, 4096).total_bytes == 0
    for wrong in (0, 4097, -4096):
        with pytest.raises(ValueError, match="segment_bytes"):
            Slabs(64 * K, wrong)


def test_a_segment_that_cannot_be_made_stays_closed() -> None:
    owner = Owner(16 * K, 16 * K)
    owner.broken = True
    with pytest.raises(OSError, match="no"):
        owner.slabs.allocate(1)
    owner.slabs.check()
    assert owner.slabs.used_bytes == 0
    owner.broken = False
    slot = allocated(owner.slabs, 1)
    owner.slabs.free(slot)
    owner.broken = True
    with pytest.raises(OSError, match="no"):
        owner.slabs.allocate(8 * K)  # the other class's segment is gone by then
    owner.broken = False
    assert owner.slabs.allocate(8 * K) == Slot(0, 0, 0, 8 * K)
    owner.slabs.check()


def test_segments_come_back_after_a_restart_with_the_slots_in_use() -> None:
    owner = Owner(48 * K, 16 * K)
    slabs = owner.slabs
    assert slabs.restore(1, 8 * K, [1]) == [Slot(1, 1, 8 * K, 8 * K)]
    slabs.restore(2, 4 * K, [])
    assert slabs.used_bytes == 8 * K
    assert allocated(slabs, 8 * K) == Slot(1, 0, 0, 8 * K)
    assert owner.calls == []
    assert allocated(slabs, 8 * K).segment == 0
    for taken in (0, 1, 2, 3, -1):
        with pytest.raises(ValueError, match="segment"):
            slabs.restore(taken, 8 * K, [])
    slabs.forget(2)
    for size, used, name in ((5 * K, [], "size"), (32 * K, [], "size"), (8 * K, [2], "used"), (8 * K, [-1], "used")):
        with pytest.raises(ValueError, match=name):
            slabs.restore(2, size, used)
    slabs.check()


def test_a_vanished_segment_takes_its_slots_along() -> None:
    slabs = Slabs(32 * K, 16 * K)
    slots = [allocated(slabs, 4 * K) for _ in range(5)]
    slabs.forget(0)
    assert slabs.used_bytes == 4 * K
    with pytest.raises(ValueError, match="not in use"):
        slabs.free(slots[0])
    slabs.check()
    assert [allocated(slabs, 4 * K).segment for _ in range(4)] == [1, 1, 1, 0]
    slabs.check()


@given(st.integers(0, 2**32))
def test_no_byte_is_handed_out_twice(seed: int) -> None:
    chance = random.Random(seed)
    owner = Owner(4 * 64 * K, 64 * K)
    slabs, held = owner.slabs, list[Slot]()
    for _ in range(200):
        slot = slabs.allocate(chance.choice([1, 5 * K, 17 * K, 64 * K])) if chance.random() < 0.6 else None
        if slot is not None:
            held.append(slot)
        elif held:
            slabs.free(held.pop(chance.randrange(len(held))))
    slabs.check()
    assert slabs.used_bytes == sum(slot.bytes for slot in held) == slabs.total_bytes - slabs.free_bytes
    pages = [(s.segment, page) for s in held for page in range(s.offset // 4096, (s.offset + s.bytes) // 4096)]
    assert len(set(pages)) == len(pages)
    assert all(0 <= s.segment < 4 and s.offset + s.bytes <= 64 * K for s in held)
    opened = [number for what, number, _ in owner.calls if what == "opened"]
    closed = [number for what, number, _ in owner.calls if what == "closed"]
    assert len(opened) - len(closed) <= 4
