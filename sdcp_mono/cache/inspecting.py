"""The cache of a data folder, seen from outside: for ``cache stat|ls|fsck``. Read-only; a server may be using it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sdcp_mono.cache.disk import scan
from sdcp_mono.cache.kept_logs import ListedLog
from sdcp_mono.core.messages import CommitRecord
from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.problems import Refusal

DISK: Final = "kv"  # folder of the disk tier in the data folder
LOG: Final = "commit-log.sqlite"
SCOPE_SHOWN: Final = 8  # hex digits of a scope that are shown: it is the capability of a tenant (section 9)


def entries(
    data_dir: Path, *, payload: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Each slot of the disk tier as plain data; ``payload`` also reads and checks the bytes."""
    directory = data_dir / DISK
    if not directory.is_dir():
        return
    for number, entry in enumerate(scan(directory, payload=payload), 1):
        if progress is not None:
            progress("Reading objects", number, 0)
        name = None if entry.blob is None else MlcUri.parse(entry.blob.uri)
        scope = None if name is None else name.scope
        yield {
            "where": f"segment {entry.segment} at {entry.offset}",
            "kind": "" if name is None else name.kind,
            "scope": "-" if scope is None else f"{scope.hex()[:SCOPE_SHOWN]}…",
            "name": "" if name is None else name.name,
            "size": 0 if entry.blob is None else entry.blob.size,
            "dtype": "" if entry.blob is None else entry.blob.dtype,
            "shape": [] if entry.blob is None else list(entry.blob.shape),
            "state": entry.state,
            "detail": entry.detail,
        }


def folder_report(data_dir: Path) -> dict[str, Any]:
    """What ``cache stat`` shows of a folder that nobody serves: sizes, without counts of what was of use."""
    found = [entry for entry in entries(data_dir) if entry["state"] == "ok"]
    files = list((data_dir / DISK / "segments").glob("*.seg"))
    disk = {
        "name": "disk", "capacity_bytes": sum(file.stat().st_size for file in files),
        "used_bytes": sum(entry["size"] for entry in found), "objects": len(found), "hits": 0, "misses": 0, "stored": 0,
        "evicted": 0, "corrupt": 0, "healthy": True, "note": "",
    }  # fmt: skip
    log = data_dir / LOG
    return {"tiers": [disk], "log": {"file": str(log), "bytes": log.stat().st_size if log.exists() else 0}}


async def check_logs(log: ListedLog) -> dict[str, Any]:
    """Read every log to its end: records whole, counts and epochs only ever growing (6.8)."""
    names: Sequence[str] = await log.names()
    records, damaged = 0, []
    for name in names:
        try:
            read = await log.read(name)
        except Refusal as refusal:
            damaged.append(f"{name}: {refusal.detail}")
            continue
        records += len(read)
        committed, epoch = 0, 0
        for number, record in enumerate(read):
            if record.epoch < epoch:
                damaged.append(f"{name}: record {number} has epoch {record.epoch} after {epoch}")
            epoch = max(epoch, record.epoch)
            if isinstance(record, CommitRecord):
                committed += len(record.emitted)
                if record.committed != committed:
                    damaged.append(f"{name}: record {number} says {record.committed} tokens, {committed} are there")
    return {"logs": len(names), "records": records, "damaged": damaged}
