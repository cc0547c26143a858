"""The host tier: reserve, commit, abort, pin, drop and evict, alone and from many threads (C-39)."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sdcp_mono.cache.blob import Blob, checksum
from sdcp_mono.cache.host import HostTier, Pin, Room, anonymous

BLOCK = 4096
THREADS = 8


def blob(number: int, size: int = BLOCK) -> Blob:
    return Blob(f"mlc://test/-/target_kv/{number}", size, "float32", (size // 4,))


def pattern(number: int, size: int = BLOCK) -> bytes:
    """The bytes of object ``number``: no two objects share a page of them."""
    return (number.to_bytes(2, "big") * size)[:size]


def tier(blocks: int = 16, **options: int) -> HostTier:
    return HostTier(blocks * BLOCK, **{"staging_bytes": 4 * BLOCK, **options})  # type: ignore[arg-type]


def reserved(host: HostTier, number: int, size: int = BLOCK, *, staging: bool = False) -> Room:
    room = host.reserve(blob(number, size), staging=staging)
    assert room is not None
    return room


def write(room: Room, number: int) -> bool:
    room.data[:] = pattern(number, room.blob.size)
    return room.commit(checksum(room.data))


def store(host: HostTier, *numbers: int, size: int = BLOCK) -> None:
    for number in numbers:
        assert write(reserved(host, number, size), number)


def pinned(host: HostTier, number: int) -> Pin:
    pin = host.pin(blob(number).key)
    assert pin is not None
    return pin


def numbers(host: HostTier, highest: int = 100) -> list[int]:
    return [number for number in range(highest) if blob(number).key in host]


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_an_object_is_found_only_after_its_commit() -> None:
    host = tier()
    room = reserved(host, 1, 5000)
    room.data[:] = pattern(1, 5000)
    key = room.blob.key
    assert (host.pin(key), key in host, host.touches(key)) == (None, False, 0)
    assert room.commit(checksum(pattern(1, 5000)))
    assert (key in host, host.keys(), host.touches(key)) == (True, (key,), 1)
    with pinned(host, 1) as pin:
        assert (bytes(pin.data), pin.data.readonly) == (pattern(1, 5000), True)
        assert (pin.blob, pin.crc) == (blob(1, 5000), checksum(pattern(1, 5000)))
        assert host.touches(key) == 2
    host.check()


def test_payloads_begin_at_page_boundaries() -> None:
    host = tier(64)
    rooms = [reserved(host, number, 5000) for number in range(5)]
    assert all(address(room.data) % 4096 == 0 for room in rooms)
    assert [len(room.data) for room in rooms] == [5000] * 5


def test_memory_is_taken_when_it_is_needed_and_given_back_for_another_class() -> None:
    taken: list[memoryview] = []

    def memory(size: int) -> memoryview:
        taken.append(anonymous(size))
        return taken[-1]

    host = HostTier(4 * BLOCK, staging_bytes=0, segment_bytes=2 * BLOCK, memory=memory)
    assert taken == []
    store(host, 1)
    assert [len(view) for view in taken] == [2 * BLOCK]
    store(host, 2, 3)
    assert len(taken) == 2
    host.drop(blob(3).key)
    store(host, 4, size=2 * BLOCK)
    assert len(taken) == 3
    assert numbers(host) == [1, 2, 4]
    host.check()


def test_no_memory_refuses_the_room_and_is_reported_until_there_is_some() -> None:
    broken = True

    def memory(size: int) -> memoryview:
        if broken:
            raise MemoryError("no more")
        return anonymous(size)

    host = HostTier(4 * BLOCK, staging_bytes=0, memory=memory)
    assert host.reserve(blob(1)) is None
    stats = host.stats()
    assert (stats.refused, stats.errors, stats.healthy, stats.note) == (1, 1, False, "no memory for a segment: no more")
    broken = False
    store(host, 1)
    assert (host.stats().healthy, host.stats().note) == (True, "")
    host.check()


def test_a_reservation_is_a_promise_and_staging_has_a_limit_of_its_own() -> None:
    host = tier(4, staging_bytes=2 * BLOCK)
    staged = [reserved(host, number, staging=True) for number in (1, 2)]
    assert host.reserve(blob(3), staging=True) is None
    plain = [reserved(host, number) for number in (3, 4)]
    assert host.reserve(blob(5)) is None
    assert (host.stats().staging_bytes, host.stats().used_bytes, host.stats().refused) == (4 * BLOCK, 0, 2)
    assert [write(room, room.blob.size) for room in staged + plain] == [True] * 4
    assert (host.stats().staging_bytes, host.stats().used_bytes) == (0, 4 * BLOCK)
    assert host.evict(BLOCK) == BLOCK
    reserved(host, 6, staging=True).abort()
    host.check()


def test_the_second_of_two_writers_gives_its_room_back() -> None:
    host = tier()
    first, second = reserved(host, 1), reserved(host, 1)
    assert write(second, 1)
    assert not write(first, 1)
    assert (host.stats().used_bytes, host.stats().staging_bytes, host.stats().stored) == (BLOCK, 0, 1)
    host.check()


@pytest.mark.parametrize("again", ["commit", "abort"])
@pytest.mark.parametrize("first", ["commit", "abort"])
def test_c39_a_room_ends_once(first: str, again: str) -> None:
    ends: dict[str, Callable[[Room], object]] = {"commit": lambda room: room.commit(0), "abort": Room.abort}
    host = tier()
    room = reserved(host, 1, staging=True)
    ends[first](room)
    before = host.stats()
    with pytest.raises(ValueError, match="committed or aborted before"):
        ends[again](room)
    assert host.stats() == before
    host.check()


def test_c39_a_pin_is_released_once() -> None:
    host = tier()
    store(host, 1)
    one, other = pinned(host, 1), pinned(host, 1)
    one.release()
    with pytest.raises(ValueError, match="released before"):
        one.release()
    assert host.stats().pinned_bytes == BLOCK
    assert bytes(other.data) == pattern(1)
    assert host.evict(16 * BLOCK) == 0
    other.release()
    assert host.stats().pinned_bytes == 0
    host.check()


def test_views_end_with_their_room_or_pin() -> None:
    """Else a late writer would change what others read, and a late reader would see another object."""
    host = tier()
    room = reserved(host, 1)
    data = room.data
    room.commit(0)
    pin = pinned(host, 1)
    read = pin.data
    pin.release()
    for view in (data, read):
        with pytest.raises(ValueError, match="released"):
            view[0]
    with pinned(host, 1) as pin:
        array = np.frombuffer(pin.data, np.uint8)  # an array over it does not stand in the way
    assert len(array) == BLOCK


def test_c39_with_everything_pinned_nothing_is_evicted_and_room_is_refused() -> None:
    host = tier()
    store(host, *range(16))
    pins = [pinned(host, number) for number in range(16)]
    assert host.evict(16 * BLOCK) == 0
    assert host.reserve(blob(99)) is None
    assert numbers(host) == list(range(16))
    assert [bytes(pin.data) for pin in pins] == [pattern(number) for number in range(16)]
    pins.pop(3).release()
    assert host.evict(16 * BLOCK) == BLOCK
    store(host, 99)
    assert host.stats().evicted == 1
    host.check()


def test_a_dropped_object_is_gone_at_once_and_its_room_after_the_last_pin() -> None:
    host = tier(2)
    store(host, 1)
    one, other = pinned(host, 1), pinned(host, 1)
    key = blob(1).key
    assert host.drop(key)
    assert not host.drop(key)
    assert (host.pin(key), key in host, host.keys(), host.touches(key)) == (None, False, (), 0)
    store(host, 1)  # the same name anew, in other room
    assert (host.stats().objects, host.stats().used_bytes, host.reserve(blob(2))) == (1, 2 * BLOCK, None)
    one.release()
    assert bytes(other.data) == pattern(1)
    assert host.stats().used_bytes == 2 * BLOCK
    other.release()
    assert (host.stats().used_bytes, host.stats().pinned_bytes, numbers(host)) == (BLOCK, 0, [1])
    host.check()


def test_eviction_takes_the_least_useful_until_enough_is_free() -> None:
    host = tier(8)
    store(host, *range(8))
    pinned(host, 0).release()
    held = pinned(host, 2)
    assert host.evict(3 * BLOCK, lambda key: key == blob(1).key) == 3 * BLOCK
    assert numbers(host) == [0, 1, 2, 6, 7]
    assert host.evict(3 * BLOCK) == 0
    assert host.evict(100 * BLOCK) == 4 * BLOCK
    assert numbers(host) == [2]
    held.release()
    host.check()


def test_keep_may_ask_the_tier() -> None:
    """It is asked without the lock."""
    host = tier(4)
    store(host, *range(4))
    assert host.evict(2 * BLOCK, lambda key: host.touches(key) == 1 and key == blob(0).key) == 2 * BLOCK
    assert numbers(host) == [0, 3]


def test_eviction_makes_room_for_a_class_that_has_none() -> None:
    """Free slots of one class are of no use to another: the least useful segment goes whole."""
    host = tier(16, segment_bytes=4 * BLOCK)
    store(host, *range(16))
    for number in (8, 0, 4, 5, 6, 7):
        pinned(host, number).release()  # the others were of use once only
    held = pinned(host, 12)
    for number in (1, 9, 10, 13):
        assert host.drop(blob(number).key)
    assert host.reserve(blob(50, 2 * BLOCK)) is None
    assert host.evict(4 * BLOCK) == 2 * BLOCK  # 8 and 11, all of their segment; in others 0 is newer, 12 is pinned
    assert numbers(host) == [0, 2, 3, 4, 5, 6, 7, 12, 14, 15]
    store(host, 50, size=2 * BLOCK)
    assert host.evict(2 * BLOCK) == 0  # the wish has come true
    held.release()
    host.check()


def test_what_can_never_fit_is_refused_and_costs_the_others_nothing() -> None:
    host = tier()
    store(host, 1)
    assert host.reserve(blob(2, 17 * BLOCK)) is None
    assert host.evict(BLOCK) == 0
    assert numbers(host) == [1]
    nothing = HostTier(0, staging_bytes=0)
    assert (nothing.reserve(blob(1)), nothing.evict(1), nothing.stats().capacity_bytes) == (None, 0, 0)


def test_an_empty_object_is_one_too() -> None:
    host = tier()
    store(host, 1, size=0)
    with pinned(host, 1) as pin:
        assert bytes(pin.data) == b""
    host.check()


def test_the_numbers_are_exact() -> None:
    host = tier(8)
    store(host, 1, 2, 3)
    held = pinned(host, 1)
    assert host.pin(blob(77).key) is None
    reserved(host, 5).abort()
    open_room = reserved(host, 6, staging=True)
    host.drop(blob(2).key)
    assert host.evict(6 * BLOCK) == BLOCK
    stats = host.stats()
    assert (stats.name, stats.capacity_bytes, stats.used_bytes, stats.pinned_bytes) == ("host", 8 * BLOCK, BLOCK, BLOCK)
    assert (stats.staging_bytes, stats.objects, stats.hits, stats.misses) == (BLOCK, 1, 1, 1)
    assert (stats.stored, stats.evicted, stats.refused, stats.corrupt, stats.errors) == (3, 1, 0, 0, 0)
    open_room.abort()
    held.release()


# -- from many threads


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns every few bytecodes instead of every 5 ms, so that races happen here."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(work: Callable[[int], bool]) -> list[bool]:
    """What ``work(thread)`` answers in each of the threads, started at one moment."""
    barrier = threading.Barrier(THREADS, timeout=60)

    def run(thread: int) -> bool:
        barrier.wait()
        return work(thread)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True


@pytest.mark.usefixtures("eager_switching")
def test_c39_of_many_threads_that_end_one_thing_exactly_one_does() -> None:
    host = tier()
    for number in range(16):
        room = reserved(host, number)
        ends = [lambda: room.commit(0), room.abort]  # noqa: B023  # called before the next turn
        assert together(lambda thread: succeeds(ends[thread % 2])).count(True) == 1  # noqa: B023
        if blob(number).key not in host:
            store(host, number)
        pin, other = pinned(host, number), pinned(host, number)
        assert together(lambda _: succeeds(pin.release)).count(True) == 1  # noqa: B023
        assert host.stats().pinned_bytes == BLOCK
        other.release()
        host.check()
    host = tier()
    writers = [reserved(host, 1) for _ in range(THREADS)]
    assert together(lambda thread: write(writers[thread], 1)).count(True) == 1


class Churn:
    """One thread's random operations on the shared tier; all that it holds, it knows."""

    def __init__(self, host: HostTier, seed: int) -> None:
        self.host = host
        self.chance = random.Random(seed)
        self.rooms: list[tuple[int, Room]] = []
        self.pins: list[tuple[int, Pin]] = []
        self.ended: list[Callable[[], object]] = []  # ends of rooms and pins that have ended
        self.operations = 0
        self.refusals = 0  # of second ends

    def step(self) -> None:
        self.operations += 1
        number = self.chance.randrange(40)
        key = blob(number).key
        match self.chance.choice(
            ["reserve", "reserve", "end", "pin", "pin", "unpin", "again", "drop", "evict", "look"]
        ):
            case "reserve":
                room = self.host.reserve(blob(number), staging=self.chance.random() < 0.4)
                if room is not None:
                    room.data[:] = pattern(number)
                    self.rooms.append((number, room))
            case "end" if self.rooms:
                number, room = self.rooms.pop(self.chance.randrange(len(self.rooms)))
                assert bytes(room.data) == pattern(number), "somebody wrote into my room"
                if self.chance.random() < 0.8:
                    room.commit(number)
                else:
                    room.abort()
                self.ended += [room.abort, lambda: room.commit(0)]
            case "pin":
                pin = self.host.pin(key)
                if pin is not None:
                    self.pins.append((number, pin))
                    self.verify()
            case "unpin" if self.pins:
                self.verify()
                _, pin = self.pins.pop(self.chance.randrange(len(self.pins)))
                pin.release()
                self.ended.append(pin.release)
            case "again" if self.ended:
                with pytest.raises(ValueError, match="before"):
                    self.chance.choice(self.ended)()
                self.refusals += 1
            case "drop":
                self.host.drop(key)
                self.host.drop(key)
            case "evict":
                kept = blob(self.chance.randrange(40)).key
                assert self.host.evict(self.chance.randrange(6) * BLOCK, lambda key: key == kept) >= 0
            case _:
                self.host.check()
                stats = self.host.stats()
                assert 0 <= stats.pinned_bytes <= stats.used_bytes
                assert 0 <= stats.used_bytes + stats.staging_bytes <= stats.capacity_bytes == 16 * BLOCK
        if len(self.rooms) > 2:  # two a thread and no more, so that nobody starves the others
            self.rooms.pop()[1].abort()
        if len(self.pins) > 3:
            self.pins.pop(0)[1].release()

    def verify(self) -> None:
        for number, pin in self.pins:
            assert (pin.crc, bytes(pin.data)) == (number, pattern(number)), "a pinned object's bytes changed"

    def close(self) -> None:
        for _, room in self.rooms:
            room.abort()
        for _, pin in self.pins:
            pin.release()


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("seed", [0, 1])
def test_c39_any_interleaving_of_operations_keeps_the_books_and_the_bytes(seed: int) -> None:
    """8 threads, 16 blocks, 12,800 operations; every 200 all stop, and the books are compared with what is held."""
    host = tier(16, staging_bytes=6 * BLOCK)
    churns = [Churn(host, seed * THREADS + thread) for thread in range(THREADS)]

    def audit() -> None:
        host.check()
        stats = host.stats()
        rooms = [room for churn in churns for _, room in churn.rooms]
        pins = {address(pin.data) for churn in churns for _, pin in churn.pins}
        keys, stored = host.keys(), set[int]()
        for key in keys:
            with host.pin(key) as pin:  # type: ignore[union-attr]  # nobody else is at work
                stored.add(address(pin.data))
        assert stats.used_bytes == BLOCK * len(stored | pins)  # some are pinned, but dropped
        assert stats.staging_bytes == BLOCK * len(rooms)
        assert stats.pinned_bytes == BLOCK * len(pins)

    barrier = threading.Barrier(THREADS, action=audit, timeout=60)

    def work(thread: int) -> bool:
        try:
            for _ in range(8):
                for _ in range(200):
                    churns[thread].step()
                churns[thread].verify()
                barrier.wait()
        except BaseException:
            barrier.abort()  # the others need not wait for one that has failed
            raise
        return True

    assert all(together(work))
    assert sum(churn.operations for churn in churns) >= 10_000
    assert sum(churn.refusals for churn in churns) >= 500
    stats = host.stats()
    assert min(stats.stored, stats.hits, stats.misses, stats.evicted, stats.refused) > 100, "the churn did not churn"
    for churn in churns:
        churn.close()
    keys = host.keys()
    assert all(host.drop(key) for key in keys)
    assert (host.stats().used_bytes, host.stats().staging_bytes, host.stats().pinned_bytes) == (0, 0, 0)
    store(host, *range(16))  # not a block was lost
    host.check()
