"""A process that appends to many logs until it is killed, and tells what was acknowledged (run by test_sqlite_log)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path

from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.core.messages import CommitRecord
from sdcp_mono.core.ports import LogAppend

LOGS = 4


async def append_for_ever(log: SqliteCommitLog, name: str) -> None:
    await log.create(name) if not await log.read(name) else None
    sequence = len(await log.read(name))
    while True:
        digest = hashlib.sha256(os.urandom(32)).digest()
        record = CommitRecord(epoch=1, round=sequence + 1, emitted=(sequence,), committed=sequence + 1, digest=digest)
        (outcome,) = await log.append([LogAppend(name, sequence, record)])
        assert outcome == "ok"
        os.write(1, f"{name} {sequence} {digest.hex()}\n".encode())  # one write, so the parent never sees half a line
        sequence += 1


async def main() -> None:
    with SqliteCommitLog(Path(sys.argv[1])) as log:
        await asyncio.gather(*(append_for_ever(log, f"log-{number}") for number in range(LOGS)))


asyncio.run(main())
