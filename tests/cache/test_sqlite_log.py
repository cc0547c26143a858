"""The SQLite commit log on real files (6.8, SDCP-170 to 174, AMB-071 and 148 to 156)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sdcp_mono.cache import sqlite_log
from sdcp_mono.cache.sqlite_log import CommitLogUnusable, SqliteCommitLog
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import CommitLog, LogAppend
from sdcp_mono.core.problems import Conflict, Unavailable, UnknownSession

from .log_records import make_append, run

APPENDER = Path(__file__).with_name("appender.py")
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A tmpfs on ``folder``."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    if os.name != "posix" or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_is_a_commit_log(log: SqliteCommitLog) -> None:
    port: CommitLog = log
    assert run(port.read("a")) == [()]


# ---- one writer ------------------------------------------------------------------------------------------------------


def test_sdcp_174_records_come_back_as_they_were(log: SqliteCommitLog, path: Path) -> None:
    ended = CommitRecord(epoch=2**64 - 1, round=2**32 - 1, emitted=(), committed=2**32 - 1, digest=bytes(32), final=5)
    appends = [make_append("a", 0, token=2**32 - 1), LogAppend("a", 1, ended)]
    _, outcomes, records, tail = run(log.create("a"), log.append(appends), log.read("a"), log.read("a", 1))
    assert outcomes == ["ok", "ok"]
    assert records == (appends[0].record, ended)
    assert tail == (ended,)


def test_amb_148_a_log_is_a_cbor_sequence(log: SqliteCommitLog, path: Path) -> None:
    record = CommitRecord(epoch=1, round=1, emitted=(258,), committed=1, digest=bytes(32))
    run(log.create("a"), log.append([LogAppend("a", 0, record)]), log.fence("a", 2))
    log.close()
    bodies = [body for (body,) in sqlite3.connect(path).execute("SELECT body FROM record ORDER BY sequence")]
    # By hand, keys in bytewise order of their encoding (RFC 8949 4.2.1): epoch, round, digest, emitted, committed.
    commit = "a5 6565706f6368 01 65726f756e64 01 66646967657374 5820" + "00" * 32
    commit += "67656d6974746564 81190102 69636f6d6d6974746564 01"
    assert [body.hex() for body in bodies] == [commit.replace(" ", ""), "a16565706f636802"]


def test_sdcp_170_an_append_needs_its_place(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0)]))
    other = make_append("a", 0, token=8)
    assert run(log.append([other, make_append("a", 2), make_append("a", 1)])) == [["fenced", "fenced", "ok"]]
    assert run(log.read("a")) == [(make_append("a", 0).record, make_append("a", 1).record)]


def test_appends_of_one_call_stand_alone(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.create("b"))
    appends = [make_append("a", 0), make_append("missing", 0), make_append("b", 1), make_append("b", 0)]
    assert run(log.append(appends)) == [["ok", "fenced", "fenced", "ok"]]


def test_amb_071_create(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.create("a"))  # absent, then empty
    run(log.append([make_append("a", 0)]))
    with pytest.raises(Conflict, match="commit_log"):
        run(log.create("a"))


def test_amb_153_a_fence_makes_a_log_not_empty(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.fence("a", 1))
    with pytest.raises(Conflict):
        run(log.create("a"))


def test_a_dropped_log_takes_no_record(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.create("b"), log.append([make_append("a", 0), make_append("b", 0)]), log.drop("a"))
    assert run(log.append([make_append("a", 1), make_append("a", 0)]), log.read("a"), log.names()) == [
        ["fenced", "fenced"],
        (),
        ["b"],
    ]
    run(log.create("a"))
    assert run(log.append([make_append("a", 0)]), log.read("b")) == [["ok"], (make_append("b", 0).record,)]


# ---- fences ----------------------------------------------------------------------------------------------------------


def test_sdcp_172_after_a_fence_lower_epochs_fail(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0)]))
    assert run(log.fence("a", 2)) == [True]
    assert run(log.append([make_append("a", 1)]), log.append([make_append("a", 2)])) == [["fenced"], ["fenced"]]
    assert run(log.read("a")) == [(make_append("a", 0).record, FenceRecord(epoch=2))]


def test_amb_152_amb_156_the_resumed_writer_follows_its_own_fence(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.fence("a", 2))
    resumed = make_append("a", 1, epoch=2)
    assert run(log.append([make_append("a", 0, epoch=2), resumed])) == [["fenced", "ok"]]


@pytest.mark.parametrize(("there", "epoch", "done"), [(2, 2, False), (3, 2, False), (2, 3, True), (1, 2**64 - 1, True)])
def test_amb_154_a_fence_must_be_higher(log: SqliteCommitLog, there: int, epoch: int, done: bool) -> None:
    run(log.create("a"), log.fence("a", there))
    assert run(log.fence("a", epoch)) == [done]
    assert len(run(log.read("a"))[0]) == 1 + done


def test_a_missing_log_can_not_be_fenced(log: SqliteCommitLog) -> None:
    with pytest.raises(UnknownSession, match="commit_log"):
        run(log.fence("a", 2))


def test_fence_race_between_a_router_and_a_writer(log: SqliteCommitLog) -> None:
    """Two event loops on two threads: whatever the interleaving, no record of epoch 1 follows the fence."""
    run(*(log.create(f"log-{number}") for number in range(20)))
    start = threading.Barrier(2)
    acknowledged: dict[str, int] = {}

    async def write() -> None:
        for number in range(20):
            name = f"log-{number}"
            start.wait()
            acknowledged[name] = 0
            while await log.append([make_append(name, acknowledged[name])]) == ["ok"]:
                acknowledged[name] += 1

    async def fence() -> None:
        for number in range(20):
            start.wait()
            assert await log.fence(f"log-{number}", 2)

    threads = [threading.Thread(target=asyncio.run, args=(side(),)) for side in (write, fence)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, count in acknowledged.items():
        expected = [make_append(name, sequence).record for sequence in range(count)]
        assert run(log.read(name)) == [(*expected, FenceRecord(epoch=2))]


def test_amb_154_two_routers_fence_at_once(log: SqliteCommitLog) -> None:
    async def race() -> list[bool]:
        await log.create("a")
        return await asyncio.gather(*(log.fence("a", 2) for _ in range(8)))

    assert sorted(asyncio.run(race())) == [False] * 7 + [True]


# ---- lost answers, full disks ----------------------------------------------------------------------------------------


def test_amb_150_a_repeated_append_finds_its_own_record(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0), make_append("a", 1)]))
    assert run(log.append([make_append("a", 0), make_append("a", 1)])) == [["ok", "ok"]]
    assert len(run(log.read("a"))[0]) == 2


def test_amb_150_a_record_that_precedes_the_fence_stands(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0)]), log.fence("a", 2))
    assert run(log.append([make_append("a", 0)])) == [["ok"]]


def test_amb_151_a_foreign_record_of_the_same_epoch_fences(log: SqliteCommitLog) -> None:
    run(log.create("a"), log.append([make_append("a", 0, token=8)]))
    assert run(log.append([make_append("a", 0, token=7)])) == [["fenced"]]


def test_amb_147_a_cancelled_append_is_whole_or_absent(log: SqliteCommitLog) -> None:
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


def test_a_full_disk_answers_unknown_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "-o", "size=256k"), SqliteCommitLog(disk / "commits.db") as log:
        run(log.create("a"))
        acknowledged = 0
        while (outcomes := run(log.append([make_append("a", acknowledged)]))[0]) == ["ok"]:
            acknowledged += 1
        assert outcomes == ["unknown"]
        assert acknowledged > 0
        with pytest.raises(Unavailable, match="full"):
            run(log.fence("a", 2))
        assert len(run(log.read("a"))[0]) == acknowledged
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert run(log.append([make_append("a", acknowledged)]), log.fence("a", 2)) == [["ok"], True]
        assert len(run(log.read("a"))[0]) == acknowledged + 2


def test_a_failed_call_leaves_its_neighbours_alone(log: SqliteCommitLog) -> None:
    """One call of a shared transaction fails (a name that SQLite can't store): the others are done all the same."""

    async def together() -> list[Any]:
        await asyncio.gather(log.create("a"), log.create("b"))
        calls = [log.append([make_append("a", 0)]), log.create("\ud800"), log.append([make_append("b", 0)])]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, failed, last = asyncio.run(together())
    assert (first, last) == (["ok"], ["ok"])
    assert isinstance(failed, UnicodeEncodeError)
    assert len(run(log.read("a"))[0]) == len(run(log.read("b"))[0]) == 1


def test_calls_that_arrive_together_share_a_transaction(log: SqliteCommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    transact = sqlite_log._transact
    busy, gate = threading.Event(), threading.Event()

    def counting(connection: sqlite3.Connection, calls: Any) -> None:
        sizes.append(len(calls))
        busy.set()
        gate.wait()
        transact(connection, calls)

    monkeypatch.setattr(sqlite_log, "_transact", counting)

    async def together() -> None:
        first = asyncio.create_task(log.create("log-0"))
        await asyncio.to_thread(busy.wait)
        others = [asyncio.create_task(log.create(f"log-{number}")) for number in range(1, 9)]
        await asyncio.sleep(0)  # all eight are in the inbox while the first transaction runs
        gate.set()
        await asyncio.gather(first, *others)

    asyncio.run(together())
    assert sizes == [1, 8]


# ---- opening and closing ---------------------------------------------------------------------------------------------


def test_a_reopened_log_goes_on(path: Path) -> None:
    with SqliteCommitLog(path) as log:
        run(log.create("a"), log.append([make_append("a", 0)]), log.fence("a", 2))
    with SqliteCommitLog(path) as log:
        assert run(log.names(), log.append([make_append("a", 2, epoch=1)])) == [["a"], ["fenced"]]
        assert run(log.append([make_append("a", 2, epoch=2)])) == [["ok"]]
        assert len(run(log.read("a"))[0]) == 3


def test_after_close_calls_are_refused(log: SqliteCommitLog) -> None:
    run(log.create("a"))
    log.close()
    log.close()
    assert run(log.append([make_append("a", 0)])) == [["unknown"]]
    with pytest.raises(Unavailable, match="closed"):
        run(log.read("a"))


def test_a_second_opener_is_refused(log: SqliteCommitLog, path: Path) -> None:
    with pytest.raises(CommitLogUnusable, match=r"commits\.db is in use"):
        SqliteCommitLog(path)
    program = (
        "import sys, pathlib\n"
        "from sdcp_mono.cache.sqlite_log import CommitLogUnusable, SqliteCommitLog\n"
        "try: SqliteCommitLog(pathlib.Path(sys.argv[1]))\n"
        "except CommitLogUnusable as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.endswith("commits.db is in use by another process\n")
    assert run(log.create("a")) == [None]  # the owner is undisturbed


def test_another_programs_database_is_refused_and_not_touched(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as foreign:
        foreign.execute("CREATE TABLE person (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(CommitLogUnusable, match="another program"):
        SqliteCommitLog(path)
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == [path]


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(CommitLogUnusable, match="not an SQLite file"):
        SqliteCommitLog(path)


def test_a_later_format_is_refused(log: SqliteCommitLog, path: Path) -> None:
    log.close()
    with contextlib.closing(sqlite3.connect(path)) as later:
        later.execute("PRAGMA user_version = 2")
    with pytest.raises(CommitLogUnusable, match=r"format 2; this release reads format 1"):
        SqliteCommitLog(path)


def test_a_torn_file_is_refused(path: Path) -> None:
    with SqliteCommitLog(path) as log:
        run(log.create("a"), log.append([make_append("a", sequence) for sequence in range(200)]))
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(CommitLogUnusable, match="damaged"):
        SqliteCommitLog(path)


def test_a_damaged_record_is_reported(path: Path) -> None:
    with SqliteCommitLog(path) as log:
        run(log.create("a"), log.append([make_append("a", 0), make_append("a", 1)]))
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE record SET body = substr(body, 1, 20) WHERE sequence = 1")
        other.commit()
    with SqliteCommitLog(path) as log, pytest.raises(Unavailable, match="record 1"):
        run(log.read("a"))


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommitLogUnusable, match="missing or read-only"):
        SqliteCommitLog(tmp_path / "missing" / "commits.db")


@pytest.mark.parametrize("exists", [False, True])
def test_a_read_only_directory_is_refused(tmp_path: Path, exists: bool) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "-o", "size=1m"):
        if exists:
            SqliteCommitLog(disk / "commits.db").close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CommitLogUnusable, match="missing or read-only"):
            SqliteCommitLog(disk / "commits.db")


def test_a_killed_writer_loses_nothing_it_acknowledged(path: Path) -> None:
    """kill -9 at five places; each acknowledged record is there once, in order, and at most one more per log."""
    acknowledged: dict[str, list[str]] = {}
    for lines in (1, 7, 40, 133, 300):
        with subprocess.Popen(
            [sys.executable, APPENDER, path],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            read = [child.stdout.readline() for _ in range(lines)]
            child.kill()
            read += child.stdout.readlines()  # what was acknowledged before the kill arrived
        for name, sequence, digest in map(str.split, read):
            assert int(sequence) == len(acknowledged.setdefault(name, []))
            acknowledged[name].append(digest)
        with SqliteCommitLog(path) as log:
            for name in run(log.names())[0]:
                (records,) = run(log.read(name))
                found = [record.digest.hex() for record in records]
                known = acknowledged.setdefault(name, [])
                assert found[: len(known)] == known
                assert len(found) <= len(known) + 1
                assert [record.round for record in records] == list(range(1, len(found) + 1))
                acknowledged[name] = found  # the record whose acknowledgement died with the writer stands
    assert sum(map(len, acknowledged.values())) >= 481


# ---- against a reference model ---------------------------------------------------------------------------------------


class Reference:
    """What a commit log is, in twenty lines."""

    def __init__(self) -> None:
        self.logs: dict[str, list[CommitRecord | FenceRecord]] = {}

    def append(self, append: LogAppend) -> str:
        records = self.logs.get(append.log)
        if records is None:
            return "fenced"
        if append.sequence == len(records) and append.record.epoch >= self.fence_of(append.log):
            records.append(append.record)
        return "ok" if append.record in records[append.sequence : append.sequence + 1] else "fenced"

    def fence(self, log: str, epoch: int) -> bool:
        if done := epoch > self.fence_of(log):
            self.logs[log].append(FenceRecord(epoch=epoch))
        return done

    def fence_of(self, log: str) -> int:
        return max((record.epoch for record in self.logs[log] if isinstance(record, FenceRecord)), default=0)


NAMES = st.sampled_from(["a", "b"])
EPOCHS = st.integers(1, 4)


class LogMachine(RuleBasedStateMachine):
    """The log and the reference, side by side, across reopenings."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.path = self.folder / f"{os.urandom(8).hex()}.db"
        self.log = SqliteCommitLog(self.path)
        self.reference = Reference()
        self.runner = asyncio.Runner()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    @rule(name=NAMES)
    def create(self, name: str) -> None:
        if self.reference.logs.get(name):
            with pytest.raises(Conflict):
                self.run(self.log.create(name))
        else:
            self.run(self.log.create(name))
            self.reference.logs[name] = []

    @rule(appends=st.lists(st.tuples(NAMES, st.integers(-2, 1), EPOCHS, st.integers(0, 1)), max_size=4))
    def append(self, appends: list[tuple[str, int, int, int]]) -> None:
        wanted = [
            make_append(name, max(0, len(self.reference.logs.get(name, ())) + offset), epoch=epoch, token=token)
            for name, offset, epoch, token in appends
        ]
        assert self.run(self.log.append(wanted)) == [self.reference.append(append) for append in wanted]

    @precondition(lambda self: self.reference.logs)
    @rule(data=st.data(), epoch=EPOCHS)
    def fence(self, data: st.DataObject, epoch: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.reference.logs)))
        assert self.run(self.log.fence(name, epoch)) == self.reference.fence(name, epoch)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.run(self.log.drop(name))
        self.reference.logs.pop(name, None)

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = SqliteCommitLog(self.path)

    @invariant()
    def equal(self) -> None:
        assert set(self.run(self.log.names())) == set(self.reference.logs)
        for name, records in self.reference.logs.items():
            assert self.run(self.log.read(name)) == tuple(records)

    def teardown(self) -> None:
        self.log.close()
        self.runner.close()


def test_the_log_equals_the_reference(tmp_path: Path) -> None:
    machine = type("Machine", (LogMachine,), {"folder": tmp_path})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))
