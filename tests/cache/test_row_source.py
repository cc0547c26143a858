"""Draft rows within one process (6.3 step 5, SDCP section 8; AMB-133)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.row_source import MAX_HELD, LocalRows
from sdcp_mono.core.names import SHORT_TTL_MS
from sdcp_mono.core.ports import RowSource, RowsProblem
from sdcp_mono.core.problems import Unavailable

SCOPE = bytes(range(16))
OTHER = bytes(16)
V = 5


class Rows:
    """Rows that are drawn for exactly one sequence of tokens."""

    nbytes = 40

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    def to_bytes(self) -> bytes:
        raise AssertionError("nothing left the process")

    def check(self, tokens: tuple[int, ...], v: int) -> None:
        if v != V or tokens != self.tokens:
            raise RowsProblem("q_rows: zero probability for a proposed token", unavailable=False)


@pytest.fixture
def objects(clock: Any) -> MemoryObjects:
    return MemoryObjects(100, clock=clock)


@pytest.fixture
def rows(objects: MemoryObjects) -> LocalRows:
    return LocalRows(objects, "local", V)


def problem(rows: LocalRows, uri: str, tokens: tuple[int, ...] = (1, 2), scope: bytes | None = SCOPE) -> bool:
    with pytest.raises(RowsProblem) as raised:
        asyncio.run(rows.fetch(uri, tokens, scope))
    return raised.value.unavailable


@pytest.mark.parametrize(("scope", "segment"), [(SCOPE, SCOPE.hex()), (None, "-")])
def test_sdcp_193_published_rows_are_fetched_uncopied(rows: LocalRows, scope: bytes | None, segment: str) -> None:
    port: RowSource = rows
    value = Rows((1, 2))
    uri = asyncio.run(port.publish(value, scope))
    assert uri.startswith(f"mlc://local/{segment}/q_rows/")
    assert asyncio.run(port.fetch(uri, (1, 2), scope)) is value
    assert asyncio.run(port.publish(value, scope)) != uri


def test_amb_133_rows_are_checked_against_the_tokens(rows: LocalRows) -> None:
    uri = asyncio.run(rows.publish(Rows((1, 2)), SCOPE))
    assert problem(rows, uri, (1, 3)) is False


def test_rows_are_checked_against_the_targets_vocabulary(rows: LocalRows, objects: MemoryObjects) -> None:
    uri = asyncio.run(rows.publish(Rows((1, 2)), SCOPE))
    assert problem(LocalRows(objects, "local", V + 1), uri) is False


def test_amb_137_rows_of_another_scope_or_place_are_unavailable(rows: LocalRows, objects: MemoryObjects) -> None:
    uri = asyncio.run(rows.publish(Rows((1, 2)), SCOPE))
    assert problem(rows, uri, scope=OTHER)
    assert problem(rows, uri, scope=None)
    assert problem(rows, uri + "0")
    assert problem(LocalRows(objects, "elsewhere", V), uri)
    assert problem(rows, "https://drafter.example/rows/1")
    assert problem(rows, "")
    asyncio.run(objects.put(f"mlc://local/{SCOPE.hex()}/kv/secret", b"key values"))
    assert problem(rows, f"mlc://local/{SCOPE.hex()}/kv/secret")


def test_bytes_that_nobody_checked_are_not_rows(rows: LocalRows, objects: MemoryObjects) -> None:
    uri = f"mlc://local/{SCOPE.hex()}/q_rows/bytes"
    asyncio.run(objects.put(uri, b"\x00\x00\x80\x3f"))
    assert problem(rows, uri) is False


def test_release_drops_lease_and_rows(rows: LocalRows, objects: MemoryObjects) -> None:
    uri = asyncio.run(rows.publish(Rows((1, 2)), SCOPE))
    assert (objects.used_bytes, objects.stats().leases) == (40, 1)
    asyncio.run(rows.release(uri))
    asyncio.run(rows.release(uri))
    assert (objects.used_bytes, objects.stats().leases, objects.stats().forced) == (0, 0, 0)
    assert problem(rows, uri)


def test_release_touches_nothing_else(rows: LocalRows, objects: MemoryObjects) -> None:
    uri = f"mlc://local/{SCOPE.hex()}/kv/kept"
    asyncio.run(objects.put(uri, b"value"))
    asyncio.run(rows.release(uri))
    assert asyncio.run(objects.get(uri, SCOPE)) == b"value"


def test_rows_that_nobody_releases_end_by_themselves(rows: LocalRows, objects: MemoryObjects, clock: Any) -> None:
    uri = asyncio.run(rows.publish(Rows((1, 2)), SCOPE))
    clock.pass_ms(SHORT_TTL_MS)
    assert problem(rows, uri)
    assert (objects.used_bytes, objects.stats().forced) == (0, 1)


def test_without_room_rows_are_not_published(rows: LocalRows) -> None:
    for _ in range(2):
        asyncio.run(rows.publish(Rows((1, 2)), SCOPE))
    with pytest.raises(Unavailable):
        asyncio.run(rows.publish(Rows((1, 2)), SCOPE))


def test_amb_094_no_orphans_after_many_rounds(rows: LocalRows, objects: MemoryObjects) -> None:
    async def rounds() -> None:
        for _ in range(MAX_HELD + 10):
            await rows.release(await rows.publish(Rows((1, 2)), SCOPE))

    asyncio.run(rounds())
    assert objects.stats() == objects.stats().__class__(
        objects=0, used_bytes=0, free_bytes=100, scopes=0, leases=0, expired=0, forced=0, refused=0, over_quota=0
    )
