"""A process with a disk tier of its own, for tests that kill it, fill its disk or take its rights away.

disk_writer.py write DIRECTORY SEED   write and drop for ever; a line per call that is over
disk_writer.py hold DIRECTORY         open it and wait
disk_writer.py full DIRECTORY FLOOR   DIRECTORY is a file system of 64 MiB that becomes full, told as JSON
disk_writer.py readonly DIRECTORY     likewise; what is there is made read-only
disk_writer.py limited DIRECTORY      the kernel cuts writes off in the middle (RLIMIT_FSIZE), told as JSON
"""

from __future__ import annotations

import json
import mmap
import random
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from sdcp_mono.cache.blob import HEADER_BYTES, Blob, checksum
from sdcp_mono.cache.disk import DiskTier, TierUnusable
from sdcp_mono.cache.slabs import slot_bytes

SIZES = (8192, 20_000, 1, 8192)  # by number: whole pages, odd, tiny
CAP = 24 * slot_bytes(HEADER_BYTES + 20_000)
SEGMENT = CAP // 3
MIB = 1 << 20
SLOT = slot_bytes(HEADER_BYTES + 8192)
SMALL_CAP = 8 * SLOT


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def whole(number: int) -> int:
    """The numbers whose blobs have 8192 bytes: one size class."""
    return 4 * number


def blob(number: int, size: int = -1) -> Blob:
    return Blob(f"mlc://local/-/target_kv/{number:064x}", size_of(number) if size < 0 else size)


def content(number: int, size: int = -1) -> memoryview:
    return memoryview(random.Random(number).randbytes(size_of(number) if size < 0 else size))


def put(tier: DiskTier, number: int, size: int = -1) -> bool:
    data = content(number, size)
    return tier.write(blob(number, size), data, checksum(data))


def get(tier: DiskTier, number: int, size: int = -1) -> bool:
    """Whether it is there; what is read must be right, down to the CRC."""
    out = memoryview(mmap.mmap(-1, max(1, blob(number, size).size)))[: blob(number, size).size]
    crc = tier.read(blob(number, size).key, out)
    if crc is None:
        return False
    assert out == content(number, size)
    assert crc == checksum(content(number, size))
    return True


def segment_files(path: Path) -> list[Path]:
    return sorted((path / "segments").iterdir())


def flip(path: Path, *bits: int) -> None:
    with path.open("r+b") as file:
        for bit in bits:
            file.seek(bit // 8)
            (byte,) = file.read(1)
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))


def write(directory: Path, seed: str) -> None:
    tier = DiskTier(directory, CAP, floor_bytes=0, segment_bytes=SEGMENT)
    source = random.Random(seed)
    print("ready", flush=True)
    for number in range(1 << 30):
        assert put(tier, number)
        if source.randrange(3) == 0:
            victim = max(0, number - source.randrange(10))
            tier.drop(blob(victim).key)
            print("dropped", victim, flush=True)
        print("wrote", number, flush=True)


def hold(directory: Path) -> None:
    tier = DiskTier(directory, CAP, floor_bytes=0)
    print("ready", flush=True)
    sys.stdin.read()
    tier.close()


def full(directory: Path, floor: str) -> None:
    now = [0.0]
    ballast = directory / "ballast"  # somebody else's
    ballast.write_bytes(bytes(20 * MIB))
    tier = DiskTier(directory / "kv", 1 << 30, floor_bytes=int(floor), segment_bytes=8 * MIB, clock=lambda: now[0])
    told: dict[str, object] = {"written": [put(tier, n, MIB - HEADER_BYTES) for n in range(128)]}
    tier.check()
    told["right"] = sum(get(tier, n, MIB - HEADER_BYTES) for n in range(128))
    told["full"] = stats(tier)
    ballast.unlink()
    tier.supervise()
    told["too early"] = put(tier, 200, MIB - HEADER_BYTES)
    now[0] += 31
    tier.supervise()
    told["again"] = [put(tier, n, MIB - HEADER_BYTES) for n in range(200, 210)]
    told["right again"] = sum(get(tier, n, MIB - HEADER_BYTES) for n in range(200, 210))
    told["after"] = stats(tier)
    tier.check()
    told["on disk"] = sum(file.stat().st_blocks * 512 for file in (directory / "kv" / "segments").iterdir())
    print(json.dumps(told))


def readonly(directory: Path) -> None:
    tier = DiskTier(directory / "kv", CAP, floor_bytes=0)
    assert put(tier, 1)
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    try:
        DiskTier(directory / "kv", CAP, floor_bytes=0)
    except TierUnusable as unusable:
        print(unusable)


def limited(directory: Path) -> None:
    now = [0.0]
    tier = DiskTier(directory, CAP, floor_bytes=0, segment_bytes=CAP, clock=lambda: now[0])
    told: dict[str, object] = {"before": put(tier, 0)}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (slot_bytes(HEADER_BYTES + 8192) + HEADER_BYTES + 4096, hard))
    told["cut off"], told["then"] = put(tier, 3), stats(tier)
    told["off"] = put(tier, 7)
    told["read"] = get(tier, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    told["too early"] = put(tier, 3)
    now[0] += 31
    tier.supervise()
    told["again"], told["now"] = put(tier, 3) and get(tier, 3), stats(tier)
    tier.check()
    print(json.dumps(told))


def stats(tier: DiskTier) -> dict[str, object]:
    found = tier.stats()
    return {name: getattr(found, name) for name in found.__struct_fields__}


if __name__ == "__main__":
    calls = {"write": write, "hold": hold, "full": full, "readonly": readonly, "limited": limited}
    calls[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
