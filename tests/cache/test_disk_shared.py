"""The disk tier used by several threads and processes, some of them killed (C-39, C-40)."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sdcp_mono.cache import segments
from sdcp_mono.cache.blob import HEADER_BYTES, checksum, decode_header
from sdcp_mono.cache.disk import DiskTier, TierUnusable, scan
from sdcp_mono.cache.segments import SegmentFile

from . import disk_writer
from .disk_writer import SLOT, blob, content, flip, get, put, segment_files, whole

PROGRAM = Path(disk_writer.__file__)


# ---- processes ---------------------------------------------------------------------------------------


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def killed(child: subprocess.Popen[str]) -> list[str]:
    """What it had said by then."""
    child.send_signal(signal.SIGKILL)
    said, _ = child.communicate()
    return said.splitlines()


def test_c_40_two_processes_and_the_death_of_one(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    child = started("hold", tmp_path)
    try:
        with pytest.raises(TierUnusable, match=f"used by process {child.pid}; "):
            tiers(tmp_path)
    finally:
        killed(child)
    assert put(tiers(tmp_path), 0)


def test_c_40_kill_9_while_writing_and_dropping(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    """8 lives. While each writes, a scan sees nothing damaged; after each, all is right and the cap holds."""
    source = random.Random(9)
    for life in range(8):
        child = started("write", tmp_path, str(life))
        try:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(source.randrange(20, 60))]
            for _ in range(3):
                assert [entry for entry in scan(tmp_path, payload=True) if entry.state == "damaged"] == []
        finally:
            lines += killed(child)
        tier = tiers(tmp_path, disk_writer.CAP, segment_bytes=disk_writer.SEGMENT)
        found = {int(b.uri[-64:], 16) for b in map(tier.find, tier.keys()) if b is not None}
        assert all(get(tier, number) for number in found)  # the header comes last: it stands over whole payloads
        assert tier.stats().corrupt == 0
        dropped = {int(line.split()[1]) for line in lines if line.startswith("dropped")}
        assert not found & dropped  # a number is written once a life
        assert found
        assert sum(file.stat().st_size for file in segment_files(tmp_path)) <= disk_writer.CAP
        tier.check()
        for number in found:
            tier.drop(blob(number).key)
        assert tier.stats().used_bytes == 0
        tier.close()


# ---- threads -----------------------------------------------------------------------------------------


class Gate:
    """Holds every read of a segment file back after the bytes are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Event()
        real = SegmentFile.read

        def read(file: SegmentFile, offset: int, out: memoryview) -> tuple[bytes, int]:
            self.entered.release()
            assert self.open.wait(20)
            return real(file, offset, out)

        monkeypatch.setattr(SegmentFile, "read", read)


def test_c_39_what_is_read_is_neither_evicted_nor_written_over(
    tmp_path: Path, tiers: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tiers(tmp_path, 2 * SLOT)
    put(tier, 0)
    put(tier, 4)
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor() as pool:
        reads = [pool.submit(get, tier, number) for number in (0, 4)]
        for _ in reads:
            assert gate.entered.acquire(timeout=20)
        assert tier.stats().pinned_bytes == 2 * SLOT
        assert not put(tier, 8)  # all pinned: refused, and at once
        assert tier.drop(blob(0).key)
        assert tier.find(blob(0).key) is None
        assert not put(tier, 8)  # its slot is still being read
        tier.check()
        gate.open.set()
        assert [read.result() for read in reads] == [True, True]
    assert put(tier, 8)
    assert get(tier, 8)
    tier.check()
    tier.close()
    tier = tiers(tmp_path, 2 * SLOT)
    assert [tier.find(blob(number).key) for number in (0, 4, 8)] == [None, blob(4), blob(8)]


def test_two_readers_of_one_damaged_object_count_it_once(
    tmp_path: Path, tiers: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tiers(tmp_path)
    put(tier, 0)
    flip(segment_files(tmp_path)[0], 8 * HEADER_BYTES + 3)
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor() as pool:
        reads = [pool.submit(get, tier, 0) for _ in range(3)]
        for _ in reads:
            assert gate.entered.acquire(timeout=20)
        gate.open.set()
        assert [read.result() for read in reads] == [False] * 3
    assert tier.stats().corrupt == 1
    assert tier.stats().misses == 3
    assert tier.stats().used_bytes == tier.stats().staging_bytes == 0
    tier.check()


def test_two_writers_of_one_object_leave_one(
    tmp_path: Path, tiers: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tiers(tmp_path)
    together, real = threading.Barrier(2), SegmentFile.write

    def write(file: SegmentFile, offset: int, header: bytes, data: memoryview) -> None:
        together.wait(20)
        real(file, offset, header, data)

    monkeypatch.setattr(SegmentFile, "write", write)
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda _: put(tier, 0), range(2))] == [True, True]
    assert tier.stats().used_bytes == SLOT
    assert [entry.state for entry in scan(tmp_path)].count("ok") == 1  # the other's header doesn't wait for a restart


def test_a_tier_closed_during_a_write_keeps_its_files_until_the_write_is_over(
    tmp_path: Path, tiers: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the descriptor's number would be another file's by then."""
    tier = tiers(tmp_path / "kv")
    put(tier, 0)
    real = SegmentFile.write

    def write(file: SegmentFile, offset: int, header: bytes, data: memoryview) -> None:
        tier.close()
        with pytest.raises(TierUnusable):
            tiers(tmp_path / "kv")
        with (tmp_path / "log").open("wb"), (tmp_path / "log 2").open("wb"):
            real(file, offset, header, data)

    monkeypatch.setattr(SegmentFile, "write", write)
    assert put(tier, 4)
    assert (tmp_path / "log").stat().st_size == (tmp_path / "log 2").stat().st_size == 0
    monkeypatch.undo()
    assert not put(tier, 8)
    assert not get(tier, 0)
    tier = tiers(tmp_path / "kv")
    assert get(tier, 0)
    assert get(tier, 4)


def test_a_slot_that_changes_under_a_scan_is_changing_not_damaged(
    tmp_path: Path, tiers: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tiers(tmp_path, SLOT)
    put(tier, 0)
    count = 0

    def changed_meanwhile(data: bytes) -> int:
        nonlocal count
        count += 1
        put(tier, whole(count))  # evicts the one that was there
        return checksum(data) ^ 1  # as if half of it had been read

    monkeypatch.setattr(segments, "checksum", changed_meanwhile)
    assert [entry.state for entry in scan(tmp_path, payload=True)] == ["changing"]
    assert count == segments.TRIES
    monkeypatch.undo()
    assert [entry.state for entry in scan(tmp_path, payload=True)] == ["ok"]


def test_c_39_eight_threads_and_a_scan(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    """10,400 calls over objects of three sizes, while files are looked after and scanned."""
    tier = tiers(tmp_path, disk_writer.CAP, segment_bytes=disk_writer.SEGMENT)
    done = threading.Event()

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(1300):
            number = source.randrange(60)
            match source.randrange(8):
                case 0 | 1 | 2:
                    put(tier, number)
                case 3:
                    tier.drop(blob(number).key)
                case 4:
                    tier.supervise()
                    tier.check()
                case _:
                    get(tier, number)

    def look() -> list[str]:
        found = []
        while not done.is_set():
            found += [entry.detail for entry in scan(tmp_path, payload=True) if entry.state == "damaged"]
        return found

    with ThreadPoolExecutor(9) as pool:
        looking = pool.submit(look)
        try:
            for working in [pool.submit(work, seed) for seed in range(8)]:
                working.result()
        finally:
            done.set()
        assert looking.result() == []
    tier.check()
    stats = tier.stats()
    assert stats.corrupt == stats.errors == stats.pinned_bytes == stats.staging_bytes == 0
    assert stats.healthy
    keys = set(tier.keys())
    tier.close()
    assert set(tiers(tmp_path, disk_writer.CAP, segment_bytes=disk_writer.SEGMENT).keys()) == keys


def test_the_log_tells_about_damage_once_a_second(
    tmp_path: Path, tiers: Callable[..., DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tier = tiers(tmp_path, clock=lambda: now[0])
    for number in range(8):
        put(tier, whole(number))
    flip(segment_files(tmp_path)[0], *(8 * (SLOT * n + HEADER_BYTES) for n in range(8)))
    with caplog.at_level(logging.ERROR):
        assert not any(get(tier, whole(number)) for number in range(6))
        assert len(caplog.records) == 1
        now[0] += 1
        assert not get(tier, whole(6))
        assert len(caplog.records) == 2
    assert tier.stats().corrupt == 7


def test_bad_data_names_the_field(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    with pytest.raises(ValueError, match="data: 100 bytes instead of 8192"):
        tiers(tmp_path).write(blob(0), content(0)[:100], 0)


def test_the_header_on_disk_is_the_blobs(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    put(tiers(tmp_path), 0)
    data = segment_files(tmp_path)[0].read_bytes()
    assert decode_header(data) == (blob(0), checksum(content(0)))
    assert data[HEADER_BYTES : HEADER_BYTES + 8192] == content(0)
