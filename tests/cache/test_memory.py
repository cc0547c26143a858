"""The in-memory objects: immutability, TTL, leases, scopes, one byte cap (design, section 5; AMB-092, AMB-093)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sdcp_mono.cache.leases import MAX_HOLDERS, MAX_LEASES, MAX_TTL_MS, OTHERS, Leases
from sdcp_mono.cache.memory import SWEEP, MemoryObjects
from sdcp_mono.core.ports import ServedObjects
from sdcp_mono.core.problems import Conflict, Malformed, OverQuota, TooManyRequests, Unavailable, Unprocessable

SCOPE = bytes(range(16))
OTHER = bytes(16)
FREE = "mlc://local/-/kind/free"  # of no scope


def named(name: str, scope: bytes = SCOPE) -> str:
    return f"mlc://local/{scope.hex()}/kind/{name}"


def run(*steps: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of ``steps``, in order."""

    async def in_order() -> list[Any]:
        return [await step for step in steps]

    return asyncio.run(in_order())


@pytest.fixture
def objects(clock: Any) -> MemoryObjects:
    return MemoryObjects(100, clock=clock)


def test_is_an_object_store(objects: MemoryObjects) -> None:
    port: ServedObjects = objects
    assert run(port.get(FREE, None)) == [None]


def test_an_object_is_written_once(objects: MemoryObjects) -> None:
    (meta,) = run(objects.put(named("a"), b"first"))
    assert (meta.uri, meta.size) == (named("a"), 5)
    with pytest.raises(Conflict):
        run(objects.put(named("a"), b"second"))
    assert run(objects.get(named("a"), SCOPE)) == [b"first"]
    (again,) = run(objects.delete(named("a")), objects.put(named("a"), b"third"))[1:]
    assert again.etag != meta.etag


def test_another_scopes_object_answers_like_a_missing_one(objects: MemoryObjects) -> None:
    run(objects.put(named("a"), b"value"), objects.put(FREE, b"value"))
    foreign, scopeless, missing = (named("a"), OTHER), (named("a"), None), (named("b"), SCOPE)
    assert run(*(objects.get(*wanted) for wanted in (foreign, scopeless, missing))) == [None, None, None]
    assert run(objects.get(FREE, SCOPE), objects.get(FREE, None)) == [None, b"value"]
    assert run(objects.get("not a uri", None)) == [None]


@pytest.mark.parametrize("uri", ["", "a", "mlc://local/kind/a", "https://local/-/kind/a", "mlc://local/-/kind/../a"])
def test_a_put_needs_an_mlc_uri(objects: MemoryObjects, uri: str) -> None:
    with pytest.raises(Malformed, match="MLC URI"):
        run(objects.put(uri, b""))


@pytest.mark.parametrize("ttl_ms", [0, -1, MAX_TTL_MS + 1])
def test_a_ttl_has_limits(objects: MemoryObjects, ttl_ms: int) -> None:
    run(objects.put(FREE, b""))
    put = objects.put(named("a"), b"", ttl_ms=ttl_ms)
    for call in (put, objects.lease(FREE, ttl_ms), objects.renew(FREE, "", ttl_ms)):
        with pytest.raises(Unprocessable, match="ttl_ms"):
            run(call)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_an_object_ends_with_its_ttl(objects: MemoryObjects, clock: Any) -> None:
    run(objects.put(named("a"), b"12345", ttl_ms=1000), objects.put(named("b"), b"12345"))
    clock.pass_ms(999)
    assert run(objects.get(named("a"), SCOPE)) == [b"12345"]
    clock.pass_ms(1)
    assert run(objects.get(named("a"), SCOPE)) == [None]
    clock.pass_ms(MAX_TTL_MS)
    assert run(objects.get(named("b"), SCOPE)) == [b"12345"]  # no TTL: until it is deleted
    assert (objects.used_bytes, objects.stats().expired) == (5, 1)


def test_amb_092_no_object_is_collected_while_a_lease_is_live(objects: MemoryObjects, clock: Any) -> None:
    run(objects.put(named("a"), b"value", ttl_ms=1000))
    (lease,) = run(objects.lease(named("a"), 5000))
    assert lease.expires_ms == 1_005_000
    clock.pass_ms(4999)
    objects.sweep()
    assert run(objects.get(named("a"), SCOPE)) == [b"value"]
    clock.pass_ms(1)
    objects.sweep()
    assert run(objects.get(named("a"), SCOPE)) == [None]
    stats = objects.stats()
    assert (stats.objects, stats.used_bytes, stats.leases, stats.forced) == (0, 0, 0, 1)


def test_amb_093_a_renewed_lease_holds_on(objects: MemoryObjects, clock: Any) -> None:
    run(objects.put(named("a"), b"value", ttl_ms=100))
    (lease,) = run(objects.lease(named("a"), 300))
    for _ in range(10):
        clock.pass_ms(100)  # ttl / 3
        (renewed,) = run(objects.renew(named("a"), lease.lease_id, 300))
        assert renewed.lease_id == lease.lease_id
    clock.pass_ms(300)
    assert run(objects.renew(named("a"), lease.lease_id, 300)) == [None]
    assert objects.stats().forced == 1


def test_a_lease_that_is_given_up_frees_at_once(objects: MemoryObjects, clock: Any) -> None:
    run(objects.put(named("a"), b"value", ttl_ms=1000))
    first, second = run(objects.lease(named("a"), 5000), objects.lease(named("a"), 5000))
    clock.pass_ms(2000)
    run(objects.unlease(named("a"), first.lease_id), objects.unlease(named("a"), first.lease_id))
    assert objects.used_bytes == 5
    run(objects.unlease(named("a"), second.lease_id))
    assert objects.used_bytes == 0
    assert objects.stats().forced == 0


def test_delete_waits_for_leases(objects: MemoryObjects) -> None:
    run(objects.put(named("a"), b"value"))
    (lease,) = run(objects.lease(named("a"), 5000))
    run(objects.delete(named("a")))
    assert run(objects.get(named("a"), SCOPE)) == [b"value"]
    with pytest.raises(Conflict):
        run(objects.put(named("a"), b"other"))
    run(objects.unlease(named("a"), lease.lease_id))
    assert (objects.used_bytes, objects.stats().expired) == (0, 0)
    run(objects.delete(named("a")))  # nothing there: no error


def test_leases_on_what_is_not_there(objects: MemoryObjects) -> None:
    run(objects.put(named("a"), b"value"))
    assert run(objects.lease(named("b"), 10), objects.renew(named("b"), "x", 10)) == [None, None]
    assert run(objects.renew(named("a"), "x", 10)) == [None]
    run(objects.unlease(named("b"), "x"), objects.unlease(named("a"), "x"))


def test_leases_per_object_are_limited(objects: MemoryObjects, clock: Any) -> None:
    run(objects.put(FREE, b""), *(objects.lease(FREE, 1000) for _ in range(MAX_LEASES)))
    with pytest.raises(TooManyRequests):
        run(objects.lease(FREE, 1000))
    clock.pass_ms(1000)
    assert run(objects.lease(FREE, 1000)) != [None]


# ---- room ------------------------------------------------------------------------------------------------------------


def test_the_cap_is_hard_and_exact(objects: MemoryObjects) -> None:
    run(objects.put(named("a"), bytes(60)), objects.put(named("b"), bytes(40)))
    assert (objects.used_bytes, objects.free_bytes) == (100, 0)
    with pytest.raises(Unavailable) as refused:
        run(objects.put(named("c"), bytes(1)))
    assert refused.value.retry_after_ms is not None
    run(objects.put(named("d"), b""), objects.delete(named("a")), objects.put(named("c"), bytes(60)))
    assert (objects.used_bytes, objects.stats().refused) == (100, 1)


def test_what_never_fits_is_not_to_be_retried(objects: MemoryObjects) -> None:
    with pytest.raises(Unavailable) as refused:
        run(objects.put(named("a"), bytes(101)))
    assert refused.value.retry_after_ms is None


def test_the_number_of_objects_is_capped(clock: Any) -> None:
    objects = MemoryObjects(100, clock=clock, max_objects=2)
    run(objects.put(named("a"), b""), objects.put(named("b"), b"", ttl_ms=10))
    with pytest.raises(Unavailable):
        run(objects.put(named("c"), b""))
    clock.pass_ms(10)
    run(objects.put(named("c"), b""))


def test_the_dead_make_room_wherever_they_stand(clock: Any) -> None:
    """Far more live objects than one call inspects stand before the one dead object that makes room."""
    objects = MemoryObjects(1000, clock=clock)
    run(*(objects.put(named(f"live-{number}"), b"x") for number in range(10 * SWEEP)))
    run(objects.put(named("dead"), bytes(1000 - 10 * SWEEP), ttl_ms=10))
    clock.pass_ms(10)
    run(objects.put(named("new"), bytes(900)))
    assert objects.used_bytes == 10 * SWEEP + 900


def test_a_call_does_a_bounded_amount_of_work(clock: Any) -> None:
    objects = MemoryObjects(1000, clock=clock)
    run(*(objects.put(named(f"dead-{number}"), b"x", ttl_ms=10) for number in range(5 * SWEEP)))
    clock.pass_ms(10)
    left = []
    for _ in range(5):
        run(objects.get(FREE, None))
        left.append(objects.used_bytes)
    assert left == [4 * SWEEP, 3 * SWEEP, 2 * SWEEP, SWEEP, 0]


# ---- shares ----------------------------------------------------------------------------------------------------------


def test_a_scope_has_its_share_and_no_more(clock: Any) -> None:
    """Section 5: quotas of bytes and objects; who is refused affects nobody else."""
    objects = MemoryObjects(100, clock=clock, max_objects=8, scope_percent=50)
    run(objects.put(named("a"), bytes(30)), objects.put(named("b"), bytes(20), ttl_ms=10))
    with pytest.raises(OverQuota, match="scope_bytes") as refused:
        run(objects.put(named("c"), b"x"))
    assert (refused.value.field, refused.value.retry_after_ms) == ("scope_bytes", 1000)
    assert SCOPE.hex() not in refused.value.detail
    run(objects.put(named("c", OTHER), bytes(50)))
    assert (objects.used_bytes, objects.stats().over_quota, objects.stats().refused) == (100, 1, 0)
    clock.pass_ms(10)
    run(objects.put(named("c"), bytes(20)))  # what is dead counts no longer
    assert objects.stats().scopes == 2
    with pytest.raises(OverQuota) as never:
        run(objects.put(named("d"), bytes(51)))
    assert never.value.retry_after_ms is None


def test_the_objects_of_a_scope_are_counted(clock: Any) -> None:
    objects = MemoryObjects(100, clock=clock, max_objects=8, scope_percent=50)
    run(*(objects.put(named(name), b"") for name in "abcd"))
    with pytest.raises(OverQuota, match="scope_objects") as refused:
        run(objects.put(named("e"), b""))
    assert refused.value.field == "scope_objects"
    run(objects.put(FREE, b""), objects.delete(named("a")), objects.put(named("e"), b""))


# ---- readers ---------------------------------------------------------------------------------------------------------


def test_what_is_read_keeps_its_room_until_the_last_reader_leaves(objects: MemoryObjects, clock: Any) -> None:
    """Section 5, point 3: the count of readers blocks what deletion and expiry would do."""

    async def read() -> None:
        await objects.put(named("a"), bytes(60), ttl_ms=10)
        async with objects.reading(named("a"), SCOPE) as first, objects.reading(named("a"), SCOPE) as second:
            clock.pass_ms(10)
            assert first == second == bytes(60)
            assert await objects.get(named("a"), SCOPE) is None  # nobody new finds it
            with pytest.raises(Unavailable):
                await objects.put(named("a"), bytes(60))
            assert (objects.used_bytes, objects.stats().objects) == (60, 0)
        assert (objects.used_bytes, objects.stats().scopes) == (0, 0)
        await objects.put(named("a"), bytes(60))
        async with objects.reading(named("a"), OTHER) as foreign:
            assert foreign is None

    run(read())


def test_a_reader_that_is_cancelled_leaves(objects: MemoryObjects) -> None:
    async def read() -> None:
        await objects.put(named("a"), bytes(60))
        began = asyncio.Event()

        async def for_ever() -> None:
            async with objects.reading(named("a"), SCOPE):
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(for_ever())
        await began.wait()
        await objects.delete(named("a"))
        assert objects.used_bytes == 60
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert objects.used_bytes == 0

    run(read())


@pytest.mark.parametrize("ends", [True, False])
def test_a_lease_is_looked_at_again_after_a_copy(objects: MemoryObjects, clock: Any, ends: bool) -> None:
    """Section 5, point 3: bytes whose life ended while they were copied are not served."""

    class Slow:
        nbytes = 5

        def to_bytes(self) -> bytes:
            clock.pass_ms(1000 if ends else 999)
            return b"value"

    async def read() -> None:
        await objects.put(named("a"), Slow(), ttl_ms=1)
        await objects.lease(named("a"), 1000, "https://reader/")
        async with objects.reading(named("a"), SCOPE) as value:
            assert value == (None if ends else b"value")
        assert objects.leases.forced == ({"https://reader/": 1} if ends else {})

    run(read())


def test_a_forced_end_is_counted_with_its_holder(clock: Any) -> None:
    leases = Leases(clock)
    ended: list[str] = []
    for holder in ("https://a/ round 5", "https://a/", "", "https://b/"):
        leases.grant(FREE, 10, holder, lambda: ended.append(""))
    kept = leases.grant(FREE, 20, "https://c/")
    clock.pass_ms(10)
    assert leases.live(FREE)
    assert leases.forced == {"https://a/": 2, "local": 1, "https://b/": 1}
    assert len(ended) == 4
    assert leases.give_up(FREE, kept.lease_id)
    assert not leases.give_up(FREE, kept.lease_id)
    for number in range(2 * MAX_HOLDERS):
        leases.grant(f"{FREE}-{number}", 10, f"https://{number}/")
    clock.pass_ms(10)
    leases.sweep(2 * MAX_HOLDERS)
    assert (len(leases), len(leases.forced)) == (0, MAX_HOLDERS + 1)
    assert leases.forced[OTHERS] == MAX_HOLDERS + 3


# ---- values that stay what they are ----------------------------------------------------------------------------------


@dataclass
class Tensor:
    data: bytes

    def to_bytes(self) -> bytes:
        return self.data


class Counted(Tensor):
    nbytes = 30

    def to_bytes(self) -> bytes:
        raise AssertionError("nothing left the process")


@pytest.mark.parametrize(("value", "size"), [(Tensor(bytes(20)), 20), (Counted(b""), 30)])
def test_a_byte_source_is_kept_uncopied_and_counted(objects: MemoryObjects, value: Tensor, size: int) -> None:
    (meta,) = run(objects.put(named("a"), value))
    (found,) = run(objects.get(named("a"), SCOPE))
    assert found is value
    assert (meta.size, objects.used_bytes) == (size, size)


# ---- against a reference model ---------------------------------------------------------------------------------------


@dataclass
class Entry:
    value: bytes
    expires: float
    leases: dict[str, float]


class Reference:
    """What an object store is, without amortisation: everything dead goes at every tick."""

    def __init__(self) -> None:
        self.now = 0
        self.entries: dict[str, Entry] = {}

    def collect(self) -> None:
        for uri, entry in list(self.entries.items()):
            entry.leases = {lease: expires for lease, expires in entry.leases.items() if expires > self.now}
            if not entry.leases and entry.expires <= self.now:
                del self.entries[uri]

    def used(self) -> int:
        return sum(len(entry.value) for entry in self.entries.values())


NAMES = st.sampled_from("abcdef").map(named)
TTLS = st.integers(1, 5).map(lambda seconds: seconds * 1000)  # whole seconds: exact in binary
CAP = 12


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.reference = Reference()
        self.objects = MemoryObjects(CAP, clock=lambda: float(self.reference.now), max_objects=4)
        self.leases: list[tuple[str, str]] = []
        self.runner = asyncio.Runner()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    @rule(uri=NAMES, size=st.integers(0, 7), ttl_ms=st.none() | TTLS)
    def put(self, uri: str, size: int, ttl_ms: int | None) -> None:
        entries = self.reference.entries
        if uri in entries:
            with pytest.raises(Conflict):
                self.run(self.objects.put(uri, bytes(size), ttl_ms=ttl_ms))
        elif self.reference.used() + size > CAP or len(entries) == 4:
            with pytest.raises(Unavailable):
                self.run(self.objects.put(uri, bytes(size), ttl_ms=ttl_ms))
        else:
            assert self.run(self.objects.put(uri, bytes(size), ttl_ms=ttl_ms)).size == size
            expires = float("inf") if ttl_ms is None else self.reference.now + ttl_ms / 1000
            entries[uri] = Entry(bytes(size), expires, {})

    @rule(uri=NAMES, ttl_ms=TTLS)
    def lease(self, uri: str, ttl_ms: int) -> None:
        lease = self.run(self.objects.lease(uri, ttl_ms))
        assert (lease is not None) == (uri in self.reference.entries)
        if lease is not None:
            self.leases.append((uri, lease.lease_id))
            self.reference.entries[uri].leases[lease.lease_id] = self.reference.now + ttl_ms / 1000

    @rule(data=st.data(), ttl_ms=TTLS, keep=st.booleans())
    def renew_or_unlease(self, data: st.DataObject, ttl_ms: int, keep: bool) -> None:
        if not self.leases:
            return
        uri, lease_id = data.draw(st.sampled_from(self.leases))
        entry = self.reference.entries.get(uri)
        live = entry is not None and lease_id in entry.leases
        if keep:
            assert (self.run(self.objects.renew(uri, lease_id, ttl_ms)) is not None) == live
        else:
            self.run(self.objects.unlease(uri, lease_id))
        if live and entry is not None:
            entry.leases.pop(lease_id)
            if keep:
                entry.leases[lease_id] = self.reference.now + ttl_ms / 1000
            self.reference.collect()

    @rule(uri=NAMES)
    def delete(self, uri: str) -> None:
        self.run(self.objects.delete(uri))
        if uri in self.reference.entries:
            self.reference.entries[uri].expires = float("-inf")
            self.reference.collect()

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.reference.now += seconds
        self.reference.collect()

    @rule(uri=NAMES)
    def get(self, uri: str) -> None:
        entry = self.reference.entries.get(uri)
        assert self.run(self.objects.get(uri, SCOPE)) == (None if entry is None else entry.value)
        assert self.run(self.objects.get(uri, OTHER)) is None

    @invariant()
    def accounts(self) -> None:
        assert self.objects.used_bytes + self.objects.free_bytes == CAP
        assert self.reference.used() <= self.objects.used_bytes <= CAP  # the dead count until they are inspected

    def teardown(self) -> None:
        self.objects.sweep()
        assert self.objects.used_bytes == self.reference.used()
        assert self.objects.stats().objects == len(self.reference.entries)
        assert self.objects.stats().leases == sum(len(entry.leases) for entry in self.reference.entries.values())
        self.runner.close()


def test_the_store_equals_the_reference() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
