"""The disk tier: what is read is what was written, or a miss (C-39, C-40)."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sdcp_mono.cache.blob import HEADER_BYTES, Blob, checksum
from sdcp_mono.cache.disk import DiskTier, TierUnusable, scan
from sdcp_mono.cache.slabs import slot_bytes

SIZE = 8192
SLOT = slot_bytes(HEADER_BYTES + SIZE)
CAP = 8 * SLOT


def blob(number: int, size: int = SIZE) -> Blob:
    return Blob(f"mlc://local/-/target_kv/{number:064x}", size, "bfloat16", (size,))


def content(number: int, size: int = SIZE) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def page_aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def put(tier: DiskTier, number: int, size: int = SIZE) -> bool:
    data = content(number, size)
    return tier.write(blob(number, size), data, checksum(data))


def get(tier: DiskTier, number: int, size: int = SIZE) -> bool:
    """Whether it is there; what is read must be right."""
    out = page_aligned(size)
    if tier.read(blob(number, size).key, out) is None:
        return False
    assert out == content(number, size)
    return True


def opened(path: Path, cap: int = CAP, **options: int) -> DiskTier:
    return DiskTier(path, cap, **{"floor_bytes": 0} | options)


def segment_files(path: Path) -> list[Path]:
    return sorted((path / "segments").iterdir())


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, SIZE, 100_001, (1 << 20) + 4097])
def test_what_is_read_is_what_was_written(tmp_path: Path, size: int) -> None:
    tier = opened(tmp_path, 4 << 20)
    assert put(tier, 1, size)
    assert get(tier, 1, size)
    assert not get(tier, 2, size)
    tier.check()
    tier.close()


def test_c_40_room_comes_back_when_things_are_dropped(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for round_ in range(2):
        assert all(put(tier, 8 * round_ + i) for i in range(8))
        assert tier.stats().used_bytes == CAP == sum(file.stat().st_size for file in segment_files(tmp_path))
        assert all(tier.drop(blob(8 * round_ + i).key) for i in range(8))
        assert tier.stats().used_bytes == 0
        tier.check()
    tier.close()


def test_the_cap_holds_and_the_least_used_goes(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for number in range(8):
        put(tier, number)
    assert get(tier, 0)
    for number in range(8, 14):
        assert put(tier, number)
        assert tier.stats().used_bytes <= CAP
    assert get(tier, 0)
    assert not get(tier, 1)
    assert tier.stats().evicted == 6
    tier.check()
    tier.close()


def test_another_size_takes_over_a_whole_segment(tmp_path: Path) -> None:
    tier = opened(tmp_path, 2 * 8 * SLOT, segment_bytes=8 * SLOT)
    for number in range(16):
        put(tier, number)
    assert put(tier, 100, 3 * SIZE)
    assert get(tier, 100, 3 * SIZE)
    assert sum(get(tier, number) for number in range(16)) == 8
    tier.check()
    tier.close()


def test_c_40_a_restart_finds_what_is_there_and_the_cap_still_holds(tmp_path: Path) -> None:
    tier = opened(tmp_path, 4 * CAP, segment_bytes=CAP)
    for number in range(32):
        put(tier, number)
    tier.drop(blob(5).key)
    tier.close()
    tier = opened(tmp_path, 4 * CAP, segment_bytes=CAP)
    assert [number for number in range(32) if not get(tier, number)] == [5]  # what was dropped stays away
    tier.check()
    tier.close()
    tier = opened(tmp_path, CAP, segment_bytes=CAP)
    assert tier.stats().objects <= 8
    assert sum(file.stat().st_size for file in segment_files(tmp_path)) <= CAP
    tier.check()
    tier.close()


def test_c_40_one_process_a_directory(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    with pytest.raises(TierUnusable, match=f"used by process {os.getpid()}"):
        opened(tmp_path)
    tier.close()
    opened(tmp_path).close()


@pytest.mark.parametrize("where", [0, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_bit_is_a_miss_and_is_kept_to_look_at(tmp_path: Path, where: int) -> None:
    tier = opened(tmp_path)
    for number in range(3):
        put(tier, number)
    (file,) = segment_files(tmp_path)
    with file.open("r+b") as handle:
        handle.seek(SLOT + where)
        (byte,) = handle.read(1)
        handle.seek(SLOT + where)
        handle.write(bytes([byte ^ 4]))
    assert [get(tier, number) for number in range(3)] == [True, False, True]
    assert tier.stats().corrupt == 1
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert put(tier, 1)
    assert get(tier, 1)
    tier.check()
    tier.close()


def test_swapped_files_serve_nothing_wrong(tmp_path: Path) -> None:
    tier = opened(tmp_path, 2 * CAP, segment_bytes=CAP)
    for number in range(16):
        put(tier, number)
    tier.close()
    one, two = segment_files(tmp_path)
    spare = tmp_path / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    tier = opened(tmp_path, 2 * CAP, segment_bytes=CAP)
    assert all(get(tier, number) for number in range(16))  # each slot says what it holds
    tier.check()
    tier.close()


def test_files_cut_off_or_removed_by_hand_are_misses(tmp_path: Path) -> None:
    tier = opened(tmp_path, 2 * CAP, segment_bytes=CAP)
    for number in range(16):
        put(tier, number)
    one, two = segment_files(tmp_path)
    os.truncate(one, 3 * SLOT)
    found = [get(tier, number) for number in range(16)]
    assert sum(found) == 8 + 3
    two.unlink()
    tier.supervise()
    assert tier.stats().used_bytes == 0
    assert not any(get(tier, number) for number in range(16))
    assert put(tier, 50)
    assert get(tier, 50)
    tier.check()
    tier.close()


def test_c_40_a_full_disk_refuses_and_reads_go_on(tmp_path: Path) -> None:
    tier = opened(tmp_path, 2 * CAP, segment_bytes=CAP)
    for number in range(8):
        put(tier, number)
    tier.close()
    tier = opened(tmp_path, 2 * CAP, segment_bytes=CAP, floor_bytes=1 << 62)  # nothing is free above this floor
    assert put(tier, 8)  # in the place of another
    assert sum(get(tier, number) for number in range(9)) == 8
    assert not tier.stats().healthy
    assert tier.stats().errors > 0
    tier.check()
    tier.close()


def test_a_folder_that_is_a_file_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(TierUnusable, match="choose another data folder"):
        opened(tmp_path / "kv")


def test_a_live_directory_can_be_scanned(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for number in range(5):
        put(tier, number)
    tier.drop(blob(2).key)
    states = [entry.state for entry in scan(tmp_path, payload=True)]
    assert states.count("ok") == 4
    assert states.count("free") == 4
    assert {entry.blob.uri for entry in scan(tmp_path) if entry.blob} == {blob(i).uri for i in (0, 1, 3, 4)}
    (file,) = segment_files(tmp_path)
    with file.open("r+b") as handle:
        handle.seek(HEADER_BYTES + 7)
        handle.write(b"\x00\xff\x00")
    damaged = [entry for entry in scan(tmp_path, payload=True) if entry.state == "damaged"]
    assert [entry.detail for entry in damaged] == ["payload: its CRC32C is wrong"]
    tier.close()


def test_c_39_many_threads(tmp_path: Path) -> None:
    tier = opened(tmp_path, 16 * SLOT, segment_bytes=8 * SLOT)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        try:
            for _ in range(400):
                number = source.randrange(40)
                match source.randrange(4):
                    case 0:
                        put(tier, number)
                    case 1:
                        tier.drop(blob(number).key)
                    case _:
                        get(tier, number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tier.check()
    assert tier.stats().pinned_bytes == tier.stats().staging_bytes == 0
    assert tier.stats().corrupt == 0
    tier.close()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from sdcp_mono.cache.blob import Blob, checksum
from sdcp_mono.cache.disk import DiskTier
import random
tier = DiskTier(Path(sys.argv[1]), int(sys.argv[3]), floor_bytes=0)
print("ready", flush=True)
number = int(sys.argv[4])
while True:
    data = memoryview(random.Random(number).randbytes(8192))
    tier.write(Blob(f"mlc://local/-/target_kv/{number:064x}", 8192, "bfloat16", (8192,)), data, checksum(data))
    print(number, flush=True)
    number += 1
"""


def test_c_40_kill_9_while_writing(tmp_path: Path) -> None:
    """Whatever was cut off in the middle is a miss; the rest is right, and the cap holds."""
    root = str(Path(__file__).parent.parent.parent)
    source, start = random.Random(3), 0
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), root, str(CAP), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(source.randrange(3, 40)):
            line = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        start = int(line) + 100
        tier = opened(tmp_path)
        keys = tier.keys()
        assert 0 < len(keys) <= 8
        for key in keys:
            found = tier.find(key)
            assert found is not None
            get(tier, int(found.uri.rpartition("/")[2], 16))
        tier.check()
        tier.close()
