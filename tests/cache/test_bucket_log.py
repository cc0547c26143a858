"""Commit logs in a bucket: obstore's memory, and an S3 server whose answers get lost (6.8, AMB-148 to 156)."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import obstore
import pytest

from sdcp_mono.cache import bucket_log
from sdcp_mono.cache.bucket import open_store
from sdcp_mono.cache.bucket_dropped import GRACE_SECONDS, SWEEP_EVERY, TRUST_SECONDS
from sdcp_mono.cache.bucket_log import BucketLog
from sdcp_mono.cache.commit_log import CommitLogUnusable
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import CommitLog, LogAppend
from sdcp_mono.core.problems import Refusal, Unavailable, UnknownSession

from .log_records import make_append, run

RECORD_PUT = re.compile(r"/records/.*/\d{20}$")


def puts(fault: str, times: int = 1000) -> Any:
    """``fault`` for the first ``times`` attempts to store a record."""
    left = [times]

    def decide(method: str, path: str) -> str | None:
        if method != "PUT" or not RECORD_PUT.search(path):
            return None
        left[0] -= 1
        return fault if left[0] >= 0 else None

    return decide


def records_of(store: Any, log: str = "a") -> list[str]:
    return sorted(entry["path"] for page in obstore.list(store, f"records/{log}") for entry in page)


@pytest.fixture
def pair(bucket_url: str) -> tuple[BucketLog, BucketLog]:
    """Two processes' adapters, with caches of their own, on one bucket."""
    bucket = open_store(bucket_url)
    return BucketLog(bucket), BucketLog(bucket)


# ---- what can't keep a log -------------------------------------------------------------------------------------------


def test_a_directory_can_not_keep_a_log(tmp_path: Path) -> None:
    with pytest.raises(CommitLogUnusable, match="directory"):
        BucketLog(open_store(tmp_path.as_uri()))


def test_a_store_that_ignores_conditions_can_not_keep_a_log(s3: Any, s3_url: str) -> None:
    s3.fault = lambda method, path: "unconditional"
    with pytest.raises(CommitLogUnusable, match="If-None-Match"):
        BucketLog(open_store(s3_url))


def test_a_store_that_can_not_be_written_is_refused_at_once(s3: Any, s3_url: str) -> None:
    bucket = open_store(s3_url)
    s3.fault = lambda method, path: "refuse"
    with pytest.raises(CommitLogUnusable, match="500"):
        BucketLog(bucket)


# ---- one writer ------------------------------------------------------------------------------------------------------


def test_amb_148_a_record_is_one_object_with_one_item(s3_url: str) -> None:
    bucket = open_store(s3_url)
    log: CommitLog = BucketLog(bucket)
    record = CommitRecord(epoch=1, round=1, emitted=(258,), committed=1, digest=bytes(32))
    run(log.create("a"), log.append([LogAppend("a", 0, record)]), log.fence("a", 2))
    paths = records_of(bucket._store)
    assert [path.rpartition("/")[2] for path in paths] == ["0" * 20, "0" * 19 + "1"]
    bodies = [bytes(obstore.get(bucket._store, path).bytes()).hex() for path in paths]
    # By hand, keys in bytewise order of their encoding (RFC 8949 4.2.1): epoch, round, digest, emitted, committed.
    commit = "a5 6565706f6368 01 65726f756e64 01 66646967657374 5820" + "00" * 32
    commit += "67656d6974746564 81190102 69636f6d6d6974746564 01"
    assert bodies == [commit.replace(" ", ""), "a16565706f636802"]


def test_an_append_is_one_request_however_long_the_log(s3: Any, s3_url: str) -> None:
    log = BucketLog(open_store(s3_url))
    run(log.create("a"))
    before = len(s3.requests)
    appends = [make_append("a", sequence) for sequence in range(200)]
    assert run(*(log.append([append]) for append in appends)) == [["ok"]] * 200
    assert {(method, bool(RECORD_PUT.search(path))) for method, path in s3.requests[before:]} == {("PUT", True)}
    assert len(s3.requests) - before == 200
    assert run(log.read("a", 150)) == [tuple(append.record for append in appends[150:])]


def test_another_process_takes_up_a_long_log_with_few_requests(s3: Any, s3_url: str) -> None:
    bucket = open_store(s3_url)
    first, second = BucketLog(bucket), BucketLog(bucket)
    run(first.create("a"), *(first.append([make_append("a", sequence)]) for sequence in range(100)))
    before = len(s3.requests)
    assert run(second.fence("a", 2), second.append([make_append("a", 101, epoch=2)])) == [True, ["ok"]]
    assert len(s3.requests) - before == 4  # the log's marker, a listing, the fence, the record


def test_appends_of_one_call_run_together_within_a_bound(s3: Any, s3_url: str) -> None:
    log = BucketLog(open_store(s3_url))
    names = [f"log {number}" for number in range(48)]
    run(*(log.create(name) for name in names))
    s3.most_at_once = 0
    wanted = [make_append(name, sequence) for sequence in range(2) for name in names]
    assert run(log.append([*wanted, make_append("missing", 0)])) == [["ok"] * 96 + ["fenced"]]
    assert 1 < s3.most_at_once <= 16


def test_names_may_hold_anything_and_come_in_the_order_of_creation(bucket_url: str) -> None:
    log = BucketLog(open_store(bucket_url))
    names = ["mlc://local/-/commit_log/a.b", "..", "ü/%2e!2E", "a" * 230]
    run(*(log.create(name) for name in names), *(log.append([make_append(name, 0)]) for name in names))
    assert sorted(run(log.names())[0]) == sorted(names)  # the server's clock counts whole seconds
    if bucket_url == "memory://":
        assert run(log.names()) == [names]
    assert run(log.read("..")) == [(make_append("..", 0).record,)]
    with pytest.raises(Refusal, match="1 to 700"):
        run(log.create("ü" * 200))


def test_what_is_remembered_is_bounded(pair: tuple[BucketLog, BucketLog], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_log, "MAX_HEADS", 2)
    log, _ = pair
    names = [f"log{number}" for number in range(5)]
    run(*(log.create(name) for name in names))
    for sequence in range(3):
        assert run(log.append([make_append(name, sequence) for name in names])) == [["ok"] * 5]
    assert len(log._heads) == 2


# ---- zombies and fences ----------------------------------------------------------------------------------------------


def test_sdcp_172_a_zombie_that_saw_no_fence_is_refused_by_its_place(pair: tuple[BucketLog, BucketLog]) -> None:
    zombie, router = pair
    run(zombie.create("a"), zombie.append([make_append("a", 0)]))
    assert run(router.fence("a", 2), router.append([make_append("a", 2, epoch=2)])) == [True, ["ok"]]
    for sequence in range(5):
        assert run(zombie.append([make_append("a", sequence, token=8)])) == [["fenced"]]
    assert run(zombie.read("a")) == [
        (make_append("a", 0).record, FenceRecord(epoch=2), make_append("a", 2, epoch=2).record)
    ]


def test_sdcp_173_a_zombie_that_picks_the_right_place_is_refused_by_the_fence(
    pair: tuple[BucketLog, BucketLog],
) -> None:
    zombie, router = pair
    run(zombie.create("a"), router.fence("a", 2), zombie.read("a"))
    assert run(zombie.append([make_append("a", 1)]), router.read("a")) == [["fenced"], (FenceRecord(epoch=2),)]


def test_an_append_that_arrives_after_the_fence_is_refused(s3: Any, s3_url: str) -> None:
    bucket = open_store(s3_url)
    verifier, router = BucketLog(bucket), BucketLog(bucket)

    async def race() -> list[Any]:
        await verifier.create("a")
        s3.fault = puts("hold", 1)
        late = asyncio.create_task(verifier.append([make_append("a", 0)]))
        await asyncio.to_thread(s3.held.wait, 20)
        fenced = await router.fence("a", 2)
        s3.go.set()
        return [fenced, await late, await router.read("a")]

    assert asyncio.run(race()) == [True, ["fenced"], (FenceRecord(epoch=2),)]


def test_a_fence_that_arrives_after_an_append_takes_the_next_place(s3: Any, s3_url: str) -> None:
    bucket = open_store(s3_url)
    verifier, router = BucketLog(bucket), BucketLog(bucket)

    async def race() -> list[Any]:
        await verifier.create("a")
        s3.fault = puts("hold", 1)
        late = asyncio.create_task(router.fence("a", 2))
        await asyncio.to_thread(s3.held.wait, 20)
        appended = await verifier.append([make_append("a", 0)])
        s3.go.set()
        return [appended, await late, await verifier.append([make_append("a", 1)]), await router.read("a")]

    records = (make_append("a", 0).record, FenceRecord(epoch=2))
    assert asyncio.run(race()) == [["ok"], True, ["fenced"], records]


def test_amb_154_of_two_routers_with_one_epoch_one_has_fenced(pair: tuple[BucketLog, BucketLog]) -> None:
    async def race() -> None:
        await pair[0].create("a")
        for epoch in range(2, 12):
            done = await asyncio.gather(*(router.fence("a", epoch) for router in pair))
            assert sorted(done) == [False, True]
        assert await pair[0].read("a") == tuple(FenceRecord(epoch=epoch) for epoch in range(2, 12))

    asyncio.run(race())


def test_amb_154_a_fence_whose_answer_is_lost_is_not_reported_as_done(s3: Any, s3_url: str) -> None:
    router = BucketLog(open_store(s3_url))
    run(router.create("a"))
    s3.fault = puts("500 after", 1)
    assert run(router.fence("a", 2)) == [False]  # it is there, but so it would be if another router had been faster
    assert run(router.fence("a", 3), router.read("a")) == [True, (FenceRecord(epoch=2), FenceRecord(epoch=3))]
    s3.fault = puts("500 after")
    with pytest.raises(Unavailable):
        run(router.fence("a", 4))
    s3.fault = puts("refuse", 0)
    assert run(router.fence("a", 4), router.fence("a", 5)) == [False, True]


def test_a_missing_log_can_not_be_fenced(pair: tuple[BucketLog, BucketLog]) -> None:
    with pytest.raises(UnknownSession, match="commit_log"):
        run(pair[0].fence("a", 2))


def test_writers_that_race_leave_one_linear_history(bucket_url: str) -> None:
    """Four processes append and fence as fast as they can, each by what it has read. What they were told is true."""
    bucket = open_store(bucket_url)
    steps = 40 if bucket_url == "memory://" else 6
    told: list[tuple[LogAppend, str]] = []
    fences: list[tuple[int, bool]] = []

    async def live(number: int) -> None:
        log = BucketLog(bucket)
        epoch, length = 1, 0
        for step in range(steps):
            if (step + number) % 5 == 4:
                epoch += 1
                fences.append((epoch, await log.fence("a", epoch)))
            records = await log.read("a")
            epoch = max([epoch, *(record.epoch for record in records)]) if step % 2 else epoch
            length = len(records)
            append = make_append("a", length, epoch=epoch, token=100 * number + step)
            (outcome,) = await log.append([append])
            told.append((append, outcome))

    async def race() -> Any:
        await BucketLog(bucket).create("a")
        await asyncio.gather(*map(live, range(4)))
        return await BucketLog(bucket).read("a")

    records = asyncio.run(race())
    stored = {sequence: record for sequence, record in enumerate(records) if isinstance(record, CommitRecord)}
    assert {append.sequence: append.record for append, outcome in told if outcome == "ok"} == stored
    assert all(outcome in ("ok", "fenced") for _, outcome in told)
    highest = 0
    for record in records:
        if isinstance(record, FenceRecord):
            assert record.epoch > highest  # none was placed behind its equal
            highest = record.epoch
        assert record.epoch >= highest
    done = [epoch for epoch, won in fences if won]
    assert sorted(done) == [record.epoch for record in records if isinstance(record, FenceRecord)]


# ---- lost answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500 after", "cut after"])
@pytest.mark.parametrize("times", [1, 1000])
def test_amb_150_stored_but_the_answer_is_lost(s3: Any, s3_url: str, fault: str, times: int) -> None:
    log = BucketLog(open_store(s3_url))
    run(log.create("a"))
    s3.fault = puts(fault, times)
    assert run(log.append([make_append("a", 0)])) == [["ok"]]
    s3.fault = puts(fault, 0)
    assert run(log.append([make_append("a", 0)]), log.append([make_append("a", 1)])) == [["ok"], ["ok"]]
    assert run(log.read("a")) == [(make_append("a", 0).record, make_append("a", 1).record)]


def test_amb_150_the_answer_is_late(s3: Any, s3_url: str) -> None:
    log = BucketLog(open_store(s3_url, call_seconds=0.5))
    run(log.create("a"))
    s3.fault = puts("hold after")
    assert run(log.append([make_append("a", 0)])) == [["ok"]]


def test_amb_150_unknown_until_the_store_can_be_read_again(s3: Any, s3_url: str) -> None:
    log = BucketLog(open_store(s3_url))
    run(log.create("a"), log.create("b"))
    s3.fault = lambda method, path: None if "/b/" in path else "500 after"
    # The second depends on the first; the other log does not.
    wanted = [make_append("a", 0), make_append("a", 1), make_append("b", 0)]
    assert run(log.append(wanted)) == [["unknown", "unknown", "ok"]]
    s3.fault = lambda method, path: None
    assert run(log.read("a")) == [(make_append("a", 0).record,)]
    assert run(log.append([make_append("a", 0, token=8)]), log.append(wanted[:2])) == [["fenced"], ["ok", "ok"]]


@pytest.mark.parametrize("fault", ["refuse", "cut"])
def test_not_stored_is_unknown_and_can_be_tried_again(s3: Any, s3_url: str, fault: str) -> None:
    log = BucketLog(open_store(s3_url))
    run(log.create("a"))
    s3.fault = puts(fault)
    assert run(log.append([make_append("a", 0)]), log.read("a")) == [["unknown"], ()]
    s3.fault = puts(fault, 1)  # within one call it is tried again
    assert run(log.append([make_append("a", 0)])) == [["ok"]]


def test_amb_150_my_record_stands_even_if_a_fence_follows(s3: Any, s3_url: str) -> None:
    bucket = open_store(s3_url)
    verifier, router = BucketLog(bucket), BucketLog(bucket)
    run(verifier.create("a"))
    s3.fault = lambda method, path: "500 after"
    assert run(verifier.append([make_append("a", 0)])) == [["unknown"]]
    s3.fault = lambda method, path: None
    assert run(router.fence("a", 2)) == [True]
    assert run(verifier.append([make_append("a", 0)]), verifier.append([make_append("a", 1)])) == [["ok"], ["fenced"]]


def test_without_a_store_nothing_is_answered(s3: Any, s3_url: str) -> None:
    log = BucketLog(open_store(s3_url))
    run(log.create("a"))
    s3.fault = lambda method, path: "cut"
    for step in (log.create("b"), log.fence("a", 2), log.read("a"), log.drop("a"), log.names()):
        with pytest.raises(Unavailable) as refusal:
            run(step)
        assert "secret" not in refusal.value.detail
        assert refusal.value.__cause__ is None


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_wrong_bytes_are_no_record(s3: Any, s3_url: str) -> None:
    log = BucketLog(open_store(s3_url))
    run(log.create("a"), log.append([make_append("a", 0)]))
    s3.fault = lambda method, path: "garble" if method == "GET" and RECORD_PUT.search(path) else None
    with pytest.raises(Unavailable, match="record 0"):
        run(log.read("a"))
    assert run(log.append([make_append("a", 0)])) == [["unknown"]]  # they prove nothing about whose it is


@pytest.mark.parametrize("marker", [b"", b"\xff" * 24, b"0123456789abcdef00000000"])
def test_a_marker_with_wrong_bytes_makes_no_empty_log(bucket_url: str, marker: bytes) -> None:
    bucket = open_store(bucket_url)
    run(BucketLog(bucket).create("a"))
    obstore.put(bucket._store, "logs/a", marker)
    log = BucketLog(bucket)
    for step in (log.create("a"), log.fence("a", 2), log.read("a"), log.drop("a")):
        with pytest.raises(Unavailable, match="marker"):
            run(step)
    assert run(log.append([make_append("a", 0)])) == [["unknown"]]
    assert records_of(bucket._store) == []


@pytest.mark.parametrize("damage", ["gone", "torn", "empty"])
def test_a_log_with_a_hole_is_not_read_in_part(bucket_url: str, damage: str) -> None:
    bucket = open_store(bucket_url)
    log = BucketLog(bucket)
    run(log.create("a"), log.append([make_append("a", sequence) for sequence in range(3)]))
    middle = records_of(bucket._store)[1]
    if damage == "gone":
        obstore.delete(bucket._store, middle)
    else:
        obstore.put(bucket._store, middle, b"" if damage == "empty" else b"\xa5\x65epoch\x01\x65round\x02\x66digest")
    for reader in (log, BucketLog(bucket)):
        with pytest.raises(Unavailable, match="damaged"):
            run(reader.read("a"))


# ---- dropped logs ----------------------------------------------------------------------------------------------------


def test_a_dropped_log_takes_no_record_from_a_writer_that_did_not_notice(pair: tuple[BucketLog, BucketLog]) -> None:
    writer, router = pair
    run(writer.create("a"), writer.append([make_append("a", 0)]))
    run(router.drop("a"), router.drop("a"))
    assert run(writer.append([make_append("a", 1)]), writer.append([make_append("a", 0)])) == [["fenced"], ["fenced"]]
    assert run(writer.read("a"), writer.names()) == [(), []]
    with pytest.raises(UnknownSession):
        run(writer.fence("a", 2))


def test_a_new_log_of_an_old_name_holds_nothing_of_the_old_one(bucket_url: str, clock: Any) -> None:
    bucket = open_store(bucket_url)
    zombie, router = BucketLog(bucket, clock=clock), BucketLog(bucket, grace_seconds=0)
    run(zombie.create("a"), zombie.append([make_append("a", 0)]))
    run(router.drop("a"), router.dropped.sweep(), router.create("a"))
    clock.pass_ms(int(TRUST_SECONDS * 1000) + 1)
    # Its place is free again, but after so long it looks whether its log is still there.
    assert run(zombie.append([make_append("a", 1)])) == [["fenced"]]
    assert records_of(bucket._store) == []
    assert run(router.append([make_append("a", 0, token=8)]), router.read("a")) == [
        ["ok"],
        (make_append("a", 0, token=8).record,),
    ]


def test_a_new_log_of_an_old_name_takes_a_writer_that_knew_the_old_one(pair: tuple[BucketLog, BucketLog]) -> None:
    writer, router = pair
    run(writer.create("a"), router.drop("a"), router.create("a"))
    assert run(writer.append([make_append("a", 0)]), router.read("a")) == [["ok"], (make_append("a", 0).record,)]


def test_a_writer_that_looks_again_goes_on(s3: Any, s3_url: str, clock: Any) -> None:
    log = BucketLog(open_store(s3_url), clock=clock)
    run(log.create("a"), log.append([make_append("a", 0)]))
    clock.pass_ms(int(TRUST_SECONDS * 1000) + 1)
    assert run(log.append([make_append("a", 1)])) == [["ok"]]
    before = len(s3.requests)
    assert run(log.append([make_append("a", 2)])) == [["ok"]]
    assert len(s3.requests) - before == 1


def test_records_of_a_dropped_log_are_deleted_when_nobody_trusts_it(bucket_url: str) -> None:
    assert GRACE_SECONDS >= 10 * TRUST_SECONDS
    bucket = open_store(bucket_url)
    log = BucketLog(bucket)
    run(log.create("a"), log.append([make_append("a", 0)]), log.drop("a"), log.dropped.sweep())
    assert len(records_of(bucket._store)) == 2  # the record and the seal
    run(BucketLog(bucket, grace_seconds=0).dropped.sweep())
    left = [entry["path"] for page in obstore.list(bucket._store) for entry in page]
    assert left == ["logs.probe"]


def test_a_drop_that_was_cut_short_is_finished_later(bucket_url: str) -> None:
    bucket = open_store(bucket_url)
    log = BucketLog(bucket, grace_seconds=0)
    run(log.create("a"), log.append([make_append("a", 0)]))
    incarnation = records_of(bucket._store)[0].split("/")[2]
    obstore.put(bucket._store, f"dropped/a/{incarnation}", b"")  # and then the router died
    run(log.dropped.sweep())
    assert run(log.names()) == [[]]
    assert len(records_of(bucket._store)) == 1  # the grace starts now
    run(log.dropped.sweep())
    assert records_of(bucket._store) == []


def test_what_was_dropped_is_swept_now_and_then(bucket_url: str) -> None:
    bucket = open_store(bucket_url)
    log = BucketLog(bucket, grace_seconds=0)
    for number in range(SWEEP_EVERY):
        run(log.create(f"log{number}"), log.drop(f"log{number}"))
    assert [entry["path"] for page in obstore.list(bucket._store) for entry in page] == ["logs.probe"]
