"""The disk tier under faults: nothing wrong is served, used bytes are what is there, and it comes back (C-39, C-40)."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sdcp_mono.cache.blob import HEADER_BYTES, checksum
from sdcp_mono.cache.disk import DiskTier, TierUnusable, scan
from sdcp_mono.cache.segments import QUARANTINED

from . import disk_writer
from .disk_writer import SLOT, SMALL_CAP, blob, content, flip, get, put, segment_files, whole

PROGRAM = Path(disk_writer.__file__)


# ---- damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
def test_c_40_bits_flipped_anywhere(tmp_path: Path, tiers: Callable[..., DiskTier], restart: bool) -> None:
    """100 times: some bits of the file flip, live or between two starts. Only the slots that were hit are misses."""
    source = random.Random(5)
    tier = tiers(tmp_path)
    for _ in range(100):
        for number in range(8):
            put(tier, whole(number))
        slots = {n: tier._objects[blob(whole(n)).key].slot for n in range(8)}
        if restart:
            tier.close()
        bits = [source.randrange(8 * SMALL_CAP) for _ in range(source.randint(1, 3))]
        flip(segment_files(tmp_path)[0], *bits)
        hit = {n for n, slot in slots.items() if any(slot.offset <= bit // 8 < slot.offset + SLOT for bit in set(bits))}
        if restart:
            tier = tiers(tmp_path)
        assert {n for n in range(8) if not get(tier, whole(n))} <= hit
        tier.check()
        assert tier.stats().used_bytes == tier.stats().objects * SLOT
        assert not [entry for entry in scan(tmp_path, payload=True) if entry.state == "damaged"]
    assert len(list((tmp_path / "quarantine").iterdir())) <= QUARANTINED


def test_every_page_of_a_slot_is_checked(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    tier = tiers(tmp_path)
    for page in range(SLOT // 4096):
        put(tier, 0)
        flip(segment_files(tmp_path)[0], 8 * 4096 * page + 77)
        assert [entry.state for entry in scan(tmp_path, payload=True)].count("damaged") == 1
        assert not get(tier, 0)
        assert tier.stats().corrupt == page + 1
        assert tier.stats().used_bytes == 0


def test_what_was_damaged_is_kept_as_it_was_and_only_the_last_of_it(
    tmp_path: Path, tiers: Callable[..., DiskTier]
) -> None:
    tier = tiers(tmp_path)
    for _ in range(QUARANTINED + 5):
        put(tier, 0)
        flip(segment_files(tmp_path)[0], 8 * HEADER_BYTES)
        damaged = segment_files(tmp_path)[0].read_bytes()[:SLOT]
        assert not get(tier, 0)
    kept = sorted((tmp_path / "quarantine").iterdir())
    assert len(kept) == QUARANTINED
    assert kept[-1].read_bytes() == damaged
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in kept)
    assert (tmp_path / "quarantine").stat().st_mode & 0o777 == 0o700


def test_a_cut_off_slot_is_kept_without_what_the_reader_had_in_memory(
    tmp_path: Path, tiers: Callable[..., DiskTier]
) -> None:
    tier = tiers(tmp_path)
    put(tier, 0)
    os.truncate(segment_files(tmp_path)[0], HEADER_BYTES + 100)
    assert tier.read(blob(0).key, memoryview(bytearray(b"another's secret" * 512))) is None
    (kept,) = (tmp_path / "quarantine").iterdir()
    assert kept.read_bytes()[HEADER_BYTES:] == bytes(content(0)[:100])


@pytest.mark.parametrize("length", [0, 1, 4096, SLOT - 1, SLOT, 5 * SLOT + 100, SMALL_CAP - 1, SMALL_CAP + 4096])
def test_c_40_truncated_files(tmp_path: Path, tiers: Callable[..., DiskTier], length: int) -> None:
    tier = tiers(tmp_path)
    for number in range(8):
        put(tier, whole(number))
    os.truncate(segment_files(tmp_path)[0], length)
    assert sum(get(tier, whole(number)) for number in range(8)) == min(8, length // SLOT)
    tier.supervise()
    assert tier.stats().used_bytes == tier.stats().objects == 0
    assert put(tier, 0)
    assert get(tier, 0)
    tier.close()
    os.truncate(segment_files(tmp_path)[0], length)
    tier = tiers(tmp_path)
    assert tier.keys() == ()  # not as long as it was made: removed
    assert segment_files(tmp_path) == []
    tier.check()


def test_c_40_segment_files_swapped(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    """Of different slot sizes; while in use, and between two starts."""
    for restart in (False, True):
        tier = tiers(tmp_path, 2 * SMALL_CAP, segment_bytes=SMALL_CAP)
        for number in (0, 4, 8, 1, 5):
            put(tier, number)
        one, two = segment_files(tmp_path)
        if restart:
            tier.close()
        one.rename(tmp_path / "spare")
        two.rename(one)
        (tmp_path / "spare").rename(two)
        if restart:
            tier = tiers(tmp_path, 2 * SMALL_CAP, segment_bytes=SMALL_CAP)
        for number in range(12):
            get(tier, number)  # right, or a miss
        tier.supervise()
        assert not any(get(tier, number) for number in range(12))
        assert tier.stats().used_bytes == 0
        assert put(tier, 4)
        assert get(tier, 4)
        tier.check()
        tier.drop(blob(4).key)
        tier.close()


def test_a_copied_segment_is_counted_once(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    tier = tiers(tmp_path, 2 * SMALL_CAP, segment_bytes=SMALL_CAP)
    for number in range(8):
        put(tier, whole(number))
    tier.close()
    (one,) = segment_files(tmp_path)
    shutil.copy(one, one.with_name(f"000001-{SLOT}.seg"))
    shutil.copy(one, one.with_name("000001-4096.seg"))
    shutil.copy(one, one.with_name(f"000007-{SLOT}.seg"))
    tier = tiers(tmp_path, 2 * SMALL_CAP, segment_bytes=SMALL_CAP)
    assert tier.stats().objects == 8
    assert sum(file.stat().st_size for file in segment_files(tmp_path)) <= 2 * SMALL_CAP
    for number in range(8):
        assert tier.drop(blob(whole(number)).key)
    tier.close()
    assert tiers(tmp_path, 2 * SMALL_CAP, segment_bytes=SMALL_CAP).keys() == ()


def test_another_version_is_never_served(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    tier = tiers(tmp_path)
    put(tier, 0)
    tier.close()
    (file,) = segment_files(tmp_path)
    data = bytearray(file.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    data[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack("<I", checksum(data[: HEADER_BYTES - 4]))
    file.write_bytes(data)
    tier = tiers(tmp_path)
    assert tier.keys() == ()
    assert {entry.state for entry in scan(tmp_path)} == {"free"}


# ---- removed, added, taken away ----------------------------------------------------------------------


def test_c_40_removed_files_are_no_longer_counted_and_eviction_goes_on(
    tmp_path: Path, tiers: Callable[..., DiskTier]
) -> None:
    tier = tiers(tmp_path, 4 * SMALL_CAP, segment_bytes=SMALL_CAP)
    for number in range(32):
        assert put(tier, whole(number))
    for file in segment_files(tmp_path)[:3]:
        file.unlink()
    for number in range(32, 40):  # evicts what is in the removed files
        assert put(tier, whole(number))
    tier.supervise()
    assert tier.stats().used_bytes == SMALL_CAP == sum(file.stat().st_size for file in segment_files(tmp_path))
    for number in range(40, 80):
        assert put(tier, whole(number))
        assert get(tier, whole(number))
    assert tier.stats().used_bytes == 4 * SMALL_CAP
    tier.check()


def test_everything_removed_by_hand(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    tier = tiers(tmp_path / "kv")
    put(tier, 0)
    shutil.rmtree(tmp_path / "kv")
    tier.supervise()
    assert not get(tier, 0)
    assert tier.stats().used_bytes == 0
    assert put(tier, 0)
    assert get(tier, 0)
    with pytest.raises(TierUnusable, match=f"used by process {os.getpid()}"):  # the lock is back
        tiers(tmp_path / "kv")


def test_without_its_lock_file_a_tier_writes_nothing_beside_another(
    tmp_path: Path, tiers: Callable[..., DiskTier]
) -> None:
    one = tiers(tmp_path)
    for number in range(8):
        put(one, whole(number))
    (tmp_path / "lock").unlink()
    two = tiers(tmp_path)
    one.supervise()
    assert not one.stats().healthy
    assert not put(one, 400)
    for number in range(8, 14):
        assert put(two, whole(number))  # in the same slots
    for tier in (one, two):
        for number in range(14):
            get(tier, whole(number))  # right, or a miss


def test_unknown_files_stay_and_are_told(
    tmp_path: Path, tiers: Callable[..., DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    tiers(tmp_path).close()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "segments" / "000000.seg.bak").write_text("mine")
    caplog.clear()
    tier = tiers(tmp_path)
    put(tier, 0)
    assert [record.message for record in caplog.records if "2 files" in record.message]
    assert len(caplog.records) == 1
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "segments" / "000000.seg.bak").read_text() == "mine"
    assert tier.stats().used_bytes == SLOT


def test_a_folder_in_a_segments_place_is_told_and_the_lock_is_given_back(
    tmp_path: Path, tiers: Callable[..., DiskTier]
) -> None:
    wrong = tmp_path / "segments" / f"000000-{SLOT}.seg"
    wrong.mkdir(parents=True)
    with pytest.raises(TierUnusable, match="move it away"):
        tiers(tmp_path)
    wrong.rmdir()
    assert put(tiers(tmp_path), 0)


def test_only_the_owner_can_look(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    old = os.umask(0)
    try:
        put(tiers(tmp_path / "kv"), 0)
    finally:
        os.umask(old)
    found = {path.name: path.stat().st_mode & 0o777 for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]}
    assert found == {"kv": 0o700, "segments": 0o700, "lock": 0o600, f"000000-{SLOT}.seg": 0o600}


# ---- full, failing, read-only ------------------------------------------------------------------------


def on_tmpfs(path: Path, command: str, *arguments: str) -> str:
    """The program's output on a file system of 64 MiB that only it sees."""
    mount = 'mount -t tmpfs -o size=64m none "$1" || exit 77; shift; exec "$@"'
    child = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount, "sh", path, sys.executable, PROGRAM, command, path, *arguments],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if child.returncode == 77 or "unshare:" in child.stderr:
        pytest.skip(f"no file system may be mounted here: {child.stderr.strip()}")
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_c_40_full_disk_that_is_noticed_before_writing(tmp_path: Path) -> None:
    """128 MiB under a cap of 1 GiB onto 64 MiB, of which somebody else has 20: 5 segments of 8 MiB fit."""
    told = json.loads(on_tmpfs(tmp_path, "full", "0"))
    assert told["written"] == [True] * 128  # in the place of others
    assert told["right"] == told["full"]["objects"] == 40
    assert told["full"]["used_bytes"] == 40 << 20
    assert told["full"]["evicted"] == 88
    assert told["full"]["errors"] == 1
    assert not told["full"]["healthy"]
    assert told["again"] == [True] * 10
    assert told["after"]["healthy"]
    assert told["after"]["used_bytes"] == 50 << 20
    assert told["on disk"] == 56 << 20


def test_c_40_full_disk_that_the_kernel_tells(tmp_path: Path) -> None:
    """ENOSPC, as when others take the room after one has looked (a floor below zero looks at nothing)."""
    told = json.loads(on_tmpfs(tmp_path, "full", str(-1 << 40)))
    assert told["written"][:40] == [True] * 40
    assert told["written"].count(True) == 41  # one more in the place of the least used, then it is off
    assert told["right"] == told["full"]["objects"] == 40
    assert told["full"]["used_bytes"] == 40 << 20
    assert told["full"]["refused"] == 87
    assert told["full"]["errors"] == 1
    assert "No space left" in told["full"]["note"]
    assert told["too early"] is False
    assert told["again"] == [True] * 10
    assert told["right again"] == 10
    assert told["after"]["healthy"]
    assert told["after"]["used_bytes"] == 50 << 20
    assert told["on disk"] == 56 << 20


def test_c_40_read_only_disk(tmp_path: Path) -> None:
    assert "Read-only file system" in on_tmpfs(tmp_path, "readonly")


def test_c_40_a_write_that_the_kernel_cuts_off(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, PROGRAM, "limited", tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    told = json.loads(child.stdout)
    assert [told[step] for step in ("before", "cut off", "off", "read", "too early", "again")] == [
        True, False, False, True, False, True,
    ]  # fmt: skip
    assert told["then"]["errors"] >= 1
    assert not told["then"]["healthy"]
    assert told["then"]["used_bytes"] == SLOT
    assert told["now"]["healthy"]
    assert told["now"]["staging_bytes"] == 0
    assert child.stderr.count("takes nothing") == 1  # one line, however many failures


def test_below_the_floor_room_is_given_back_a_segment_a_call(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    tier = tiers(tmp_path, 3 * SMALL_CAP, segment_bytes=SMALL_CAP)
    for number in range(24):
        put(tier, whole(number))
    tier.close()
    tier = tiers(tmp_path, 3 * SMALL_CAP, segment_bytes=SMALL_CAP, floor_bytes=1 << 62)
    for left in (2, 1, 0, 0):
        tier.supervise()
        assert len(segment_files(tmp_path)) == left
        assert tier.stats().used_bytes == left * SMALL_CAP
        assert sum(get(tier, whole(number)) for number in range(24)) == 8 * left
        tier.check()
    assert not tier.stats().healthy
    assert not put(tier, 0)


def test_without_room_to_grow_another_size_evicts_nothing(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    tier = tiers(tmp_path, 4 * SMALL_CAP, segment_bytes=SMALL_CAP)
    for number in range(8):
        put(tier, whole(number))
    tier.close()
    tier = tiers(tmp_path, 4 * SMALL_CAP, segment_bytes=SMALL_CAP, floor_bytes=1 << 62)
    assert not put(tier, 1)
    assert put(tier, whole(8))  # its own size finds room
    assert tier.stats().objects == 8
    assert tier.stats().refused == tier.stats().evicted == 1


def test_what_is_larger_than_a_segment_evicts_nothing(tmp_path: Path, tiers: Callable[..., DiskTier]) -> None:
    tier = tiers(tmp_path, 2 * SMALL_CAP, segment_bytes=SMALL_CAP)
    for number in range(16):
        put(tier, whole(number))
    assert not put(tier, 100, SMALL_CAP + 1)
    assert all(get(tier, whole(number)) for number in range(16))
    assert tier.stats().evicted == 0
    assert tier.stats().refused == 1
