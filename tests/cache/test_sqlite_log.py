"""The SQLite commit log on real files (6.8, SDCP-170 to 174, AMB-071 and 148 to 156)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
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
from sdcp_mono.core.problems import Conflict, Unavailable

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
    bodies = [body for (body,) in sqlite3.connect(path).execute("SELECT body FROM record ORDER BY id")]
    # By hand, keys in bytewise order of their encoding (RFC 8949 4.2.1): epoch, round, digest, emitted, committed.
    commit = "a5 6565706f6368 01 65726f756e64 01 66646967657374 5820" + "00" * 32
    commit += "67656d6974746564 81190102 69636f6d6d6974746564 01"
    assert [body.hex() for body in bodies] == [commit.replace(" ", ""), "a16565706f636802"]


# ---- full disks, transactions ----------------------------------------------------------------------------------------


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
        later.execute("PRAGMA user_version = 9")
    with pytest.raises(CommitLogUnusable, match=r"format 9; this release reads format 2: move"):
        SqliteCommitLog(path)


def test_a_torn_file_is_refused(path: Path) -> None:
    with SqliteCommitLog(path) as log:
        run(log.create("a"), log.append([make_append("a", sequence) for sequence in range(200)]))
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(CommitLogUnusable, match="damaged"):
        SqliteCommitLog(path)


def test_a_torn_tail_leaves_the_records_before_it(tmp_path: Path) -> None:
    """The machine dies in the middle of writing the WAL: cut anywhere, what is left is whole and goes on."""
    (tmp_path / "first").mkdir()
    with SqliteCommitLog(tmp_path / "first" / "commits.db") as log:
        run(log.create("a"), *(log.append([make_append("a", sequence)]) for sequence in range(12)))
        shutil.copytree(tmp_path / "first", tmp_path / "crashed")  # as a crash leaves it
    wal = (tmp_path / "crashed" / "commits.db-wal").read_bytes()
    lengths = set()
    for cut in range(0, len(wal), 1987):  # no multiple of a page or a frame
        torn = tmp_path / f"torn-{cut}"
        shutil.copytree(tmp_path / "crashed", torn)
        os.truncate(torn / "commits.db-wal", cut)
        with SqliteCommitLog(torn / "commits.db") as log:
            (records,) = run(log.read("a"))
            assert records == tuple(make_append("a", sequence).record for sequence in range(len(records)))
            run(log.create("a")) if not records else None
            assert run(log.append([make_append("a", len(records))])) == [["ok"]]
        lengths.add(len(records))
    assert lengths >= {0, 3, 7, 11}


def test_a_damaged_record_is_reported(path: Path) -> None:
    with SqliteCommitLog(path) as log:
        run(log.create("a"), log.append([make_append("a", 0), make_append("a", 1)]))
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE record SET body = substr(body, 1, 20) WHERE id = 2")
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
