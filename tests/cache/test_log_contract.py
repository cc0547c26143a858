"""What every commit log owes (6.8, SDCP-170 to 174, AMB-071 and 147 to 156), on each store that can keep one.

SQLite, a PostgreSQL server, obstore's memory and an S3 server; the last three take any number of writers.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sdcp_mono.cache.kept_logs import ListedLog
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import LogAppend
from sdcp_mono.core.problems import Conflict, Unavailable, UnknownSession

from .log_records import make_append, run
from .stores import Store

APPENDER = Path(__file__).with_name("appender.py")
ROOT = Path(__file__).parents[2]
KILLS = {"sqlite": 50, "postgres": 8, "s3": 4}  # cycles: each starts a process. Memory ends with its own
lasting = pytest.mark.parametrize("store", KILLS, indirect=True)


@pytest.fixture(params=["sqlite", "postgres", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    urls = {"sqlite": "", "memory": "memory://"}
    url = urls[request.param] if request.param in urls else request.getfixturevalue(f"{request.param}_url")
    store = Store(url, tmp_path)
    yield store
    store.close()


@pytest.fixture
def log(store: Store) -> ListedLog:
    return store.open()


# ---- one writer ------------------------------------------------------------------------------------------------------


def test_sdcp_174_records_come_back_as_they_were(store: Store, log: ListedLog) -> None:
    ended = CommitRecord(epoch=2**64 - 1, round=2**32 - 1, emitted=(), committed=2**32 - 1, digest=bytes(32), final=5)
    appends = [make_append("a", 0, token=2**32 - 1), LogAppend("a", 1, ended)]
    assert run(log.create("a"), log.append(appends)) == [None, ["ok", "ok"]]
    for adapter in (log, store.open()):
        assert run(adapter.read("a"), adapter.read("a", 1), adapter.read("a", 2)) == [
            (appends[0].record, ended),
            (ended,),
            (),
        ]


def test_sdcp_170_an_append_needs_its_place(log: ListedLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0)]))
    other = make_append("a", 0, token=8)
    assert run(log.append([other, make_append("a", 2), make_append("a", 1)])) == [["fenced", "fenced", "ok"]]
    assert run(log.read("a")) == [(make_append("a", 0).record, make_append("a", 1).record)]


def test_appends_of_one_call_stand_alone(log: ListedLog) -> None:
    run(log.create("a"), log.create("b"))
    appends = [make_append("a", 0), make_append("missing", 0), make_append("b", 1), make_append("b", 0)]
    assert run(log.append(appends)) == [["ok", "fenced", "fenced", "ok"]]


def test_amb_071_create(log: ListedLog) -> None:
    run(log.create("a"), log.create("a"))  # absent, then empty
    run(log.append([make_append("a", 0)]))
    with pytest.raises(Conflict, match="commit_log"):
        run(log.create("a"))


def test_amb_153_a_fence_makes_a_log_not_empty(log: ListedLog) -> None:
    run(log.create("a"), log.fence("a", 1))
    with pytest.raises(Conflict):
        run(log.create("a"))


def test_a_dropped_log_takes_no_record(log: ListedLog) -> None:
    run(log.create("a"), log.create("b"), log.append([make_append("a", 0), make_append("b", 0)]), log.drop("a"))
    assert run(log.append([make_append("a", 1), make_append("a", 0)]), log.read("a"), log.names()) == [
        ["fenced", "fenced"],
        (),
        ["b"],
    ]
    run(log.create("a"))
    assert run(log.append([make_append("a", 0)]), log.read("b")) == [["ok"], (make_append("b", 0).record,)]


# ---- fences ----------------------------------------------------------------------------------------------------------


def test_sdcp_172_after_a_fence_lower_epochs_fail(log: ListedLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0)]))
    assert run(log.fence("a", 2)) == [True]
    assert run(log.append([make_append("a", 1)]), log.append([make_append("a", 2)])) == [["fenced"], ["fenced"]]
    assert run(log.read("a")) == [(make_append("a", 0).record, FenceRecord(epoch=2))]


def test_amb_152_amb_156_the_resumed_writer_follows_its_own_fence(log: ListedLog) -> None:
    run(log.create("a"), log.fence("a", 2))
    resumed = make_append("a", 1, epoch=2)
    assert run(log.append([make_append("a", 0, epoch=2), resumed])) == [["fenced", "ok"]]


@pytest.mark.parametrize(("there", "epoch", "done"), [(2, 2, False), (3, 2, False), (2, 3, True), (1, 2**64 - 1, True)])
def test_amb_154_a_fence_must_be_higher(log: ListedLog, there: int, epoch: int, done: bool) -> None:
    run(log.create("a"), log.fence("a", there))
    assert run(log.fence("a", epoch)) == [done]
    assert len(run(log.read("a"))[0]) == 1 + done


def test_a_missing_log_can_not_be_fenced(log: ListedLog) -> None:
    with pytest.raises(UnknownSession, match="commit_log"):
        run(log.fence("a", 2))


def test_fence_race_between_a_router_and_a_writer(store: Store, log: ListedLog) -> None:
    """Two event loops on two threads: whatever the interleaving, no record of epoch 1 follows the fence."""
    names = [f"log-{number}" for number in range(8)]
    run(*(log.create(name) for name in names))
    start = threading.Barrier(2)
    acknowledged = dict.fromkeys(names, 0)
    router = store.open()

    async def write() -> None:
        for name in names:
            start.wait()
            while acknowledged[name] < 50 and await log.append([make_append(name, acknowledged[name])]) == ["ok"]:
                acknowledged[name] += 1

    async def fence() -> None:
        for name in names:
            start.wait()
            while True:
                with contextlib.suppress(Unavailable):  # a bucket's writer was faster each time
                    assert await router.fence(name, 2)
                    break

    threads = [threading.Thread(target=asyncio.run, args=(side(),)) for side in (write, fence)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, count in acknowledged.items():
        expected = [make_append(name, sequence).record for sequence in range(count)]
        found = run(log.read(name))[0]
        assert [record for record in found if isinstance(record, CommitRecord)] == expected
        assert run(log.append([make_append(name, len(found))])) == [["fenced"]]
        assert found.count(FenceRecord(epoch=2)) == 1


def test_amb_154_two_routers_fence_at_once(log: ListedLog) -> None:
    async def race() -> list[bool]:
        await log.create("a")
        return await asyncio.gather(*(log.fence("a", 2) for _ in range(8)))

    assert sorted(asyncio.run(race())) == [False] * 7 + [True]


# ---- lost answers ----------------------------------------------------------------------------------------------------


def test_amb_150_a_repeated_append_finds_its_own_record(log: ListedLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0), make_append("a", 1)]))
    assert run(log.append([make_append("a", 0), make_append("a", 1)])) == [["ok", "ok"]]
    assert len(run(log.read("a"))[0]) == 2


def test_amb_150_a_record_that_precedes_the_fence_stands(log: ListedLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0)]), log.fence("a", 2))
    assert run(log.append([make_append("a", 0)])) == [["ok"]]


def test_amb_151_a_foreign_record_of_the_same_epoch_fences(log: ListedLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0, token=8)]))
    assert run(log.append([make_append("a", 0, token=7)])) == [["fenced"]]


def test_amb_147_a_cancelled_append_is_whole_or_absent(log: ListedLog) -> None:
    async def cancel() -> None:
        await log.create("a")
        task = asyncio.create_task(log.append([make_append("a", 0), make_append("a", 1)]))
        await asyncio.sleep(0)  # the call is in the inbox
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert len(await log.read("a")) in (0, 2)
        assert await log.append([make_append("a", 0), make_append("a", 1)]) == ["ok", "ok"]

    asyncio.run(cancel())


# ---- crashes and damage ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def appending(store: Store, *mode: str) -> Iterator[subprocess.Popen[str]]:
    """A process that appends until the block is left: it ends by kill -9."""
    command = [sys.executable, str(APPENDER), store.url, str(store.data_dir), *mode]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def told(child: subprocess.Popen[str], lines: int) -> list[str]:
    assert child.stdout is not None
    return [child.stdout.readline() for _ in range(lines)]


@lasting
def test_every_acknowledged_record_survives_kill_9(store: Store, request: pytest.FixtureRequest) -> None:
    """Each is there once, in order; at most one more per log, whose acknowledgement died with the writer."""
    kind = request.node.callspec.params["store"]
    acknowledged: dict[str, list[str]] = {}
    for cycle in range(KILLS[kind]):
        with appending(store) as child:
            lines = told(child, 1 + cycle * 7 % 60)
            child.kill()
            assert child.stdout is not None
            lines += child.stdout.readlines()  # what was acknowledged before the kill arrived
        for name, sequence, digest in map(str.split, lines):
            assert int(sequence) == len(acknowledged.setdefault(name, []))
            acknowledged[name].append(digest)
        log = store.open()
        for name in run(log.names())[0]:
            (records,) = run(log.read(name))
            found = [record.digest.hex() for record in records]
            known = acknowledged.setdefault(name, [])
            assert found[: len(known)] == known
            assert len(found) <= len(known) + 1
            assert [record.round for record in records] == list(range(1, len(found) + 1))
            acknowledged[name] = found
        store.close()
    assert sum(map(len, acknowledged.values())) >= KILLS[kind]


@lasting
def test_a_crash_at_each_record_boundary(store: Store) -> None:
    """The next writer finds what was acknowledged, and its record is the next one."""
    for records in range(4):
        with appending(store, "step") as child:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            (line,) = told(child, 1)
            assert line.split()[:2] == ["log-0", str(records)]
        log = store.open()
        (found,) = run(log.read("log-0"))
        assert [record.round for record in found] == list(range(1, records + 2))
        assert found[-1].digest.hex() == line.split()[2]
        assert run(log.append([make_append("log-0", records)])) == [["fenced"]]  # it is taken, by another record
        store.close()


@pytest.mark.parametrize(
    "change", [lambda body: body[:-1], lambda body: body + b"\x00", lambda body: b"", lambda body: b"\xff" + body[1:]]
)
def test_a_record_that_is_not_whole_is_never_read(
    store: Store, log: ListedLog, change: Callable[[bytes], bytes]
) -> None:
    """Nor is a part of the log: tokens that were acknowledged would be generated a second time."""
    run(log.create("a"), log.append([make_append("a", sequence) for sequence in range(3)]))
    store.rewrite("a", 2, change)
    log = store.open()
    with pytest.raises(Unavailable, match=r"record 2|damaged"):
        run(log.read("a"))
    outcome = run(log.append([make_append("a", 2)]))[0]
    assert outcome in (["fenced"], ["unknown"])  # what isn't whole proves nothing


def test_two_writers_race_and_one_history_remains(store: Store, log: ListedLog) -> None:
    """Both append at the same places with the same epoch: of each place one is acknowledged, once (AMB-151)."""
    run(log.create("a"))
    won: dict[int, list[int]] = {7: [], 8: []}

    async def write(adapter: ListedLog, token: int) -> None:
        for sequence in range(30):
            if await adapter.append([make_append("a", sequence, token=token)]) == ["ok"]:
                won[token].append(sequence)

    threads = [threading.Thread(target=asyncio.run, args=(write(store.open(), token),)) for token in won]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (records,) = run(log.read("a"))
    assert sorted(won[7] + won[8]) == list(range(len(records)))
    for token, places in won.items():
        assert all(records[place].emitted == (token,) for place in places)
