"""Segmented LRU: the order in which objects go (design, section 5, point 7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.cache.slru import Slru


def filled(capacity: int, names: str, size: int = 1) -> Slru:
    order = Slru(capacity)
    for name in names:
        order.add(name.encode(), size)
    return order


def victims(order: Slru) -> str:
    return b"".join(order.victims()).decode()


def test_what_was_used_twice_outlives_what_was_used_once() -> None:
    order = filled(10, "abcd")
    order.touch(b"a")
    assert victims(order) == "bcda"
    order.touch(b"c")
    order.touch(b"a")
    assert victims(order) == "bdca"


def test_a_scan_goes_before_what_is_in_use() -> None:
    order = filled(10, "ab")
    order.touch(b"a")
    for name in "uvwxyz":
        order.add(name.encode(), 1)
    assert victims(order) == "buvwxyza"


def test_at_most_80_percent_are_protected_and_the_oldest_of_them_return() -> None:
    order = filled(10, "abcdefghij")
    for name in "abcdefgh":
        order.touch(name.encode())
    assert (victims(order), order.protected_bytes) == ("ijabcdefgh", 8)
    order.touch(b"i")
    assert (victims(order), order.protected_bytes) == ("jabcdefghi", 8)
    order.touch(b"a")  # which the line before sent back to probation
    assert victims(order) == "jbcdefghia"


def test_an_object_over_the_limit_is_never_protected() -> None:
    order = filled(10, "a", 9)
    order.touch(b"a")
    assert (victims(order), order.protected_bytes) == ("a", 0)


def test_removing_gives_the_protected_bytes_back() -> None:
    order = filled(10, "ab", 3)
    order.touch(b"a")
    order.remove(b"a")
    order.remove(b"b")
    assert (len(order), order.protected_bytes, b"a" in order) == (0, 0, False)


def test_keys_are_added_once_and_known_when_used() -> None:
    order = filled(10, "a")
    with pytest.raises(ValueError, match="key"):
        order.add(b"a", 1)
    for call in (order.touch, order.remove):
        with pytest.raises(KeyError):
            call(b"x")
    assert victims(order) == "a"


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(0, 9), st.integers(0, 40))))
def test_any_history_keeps_each_key_once_and_the_limit(history: list[tuple[str, int, int]]) -> None:
    order, sizes = Slru(100), dict[bytes, int]()
    for what, number, size in history:
        key = bytes([number])
        if what == "add" and key not in sizes:
            order.add(key, size)
            sizes[key] = size
        elif what != "add" and key in sizes:
            getattr(order, what)(key)
            if what == "remove":
                del sizes[key]
        walk = list(order.victims())
        assert sorted(walk) == sorted(sizes)
        assert len(order) == len(sizes)
        assert 0 <= order.protected_bytes <= 80
