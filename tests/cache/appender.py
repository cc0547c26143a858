"""A process that appends to logs until it is killed, and tells what was acknowledged.

appender.py URL DIRECTORY         4 logs at once, as fast as it goes
appender.py URL DIRECTORY step    one log, one record a line of input
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from sdcp_mono.compose.logs import open_log
from sdcp_mono.core.messages import CommitRecord
from sdcp_mono.core.ports import CommitLog, LogAppend

LOGS = 4


async def append(log: CommitLog, name: str, sequence: int) -> None:
    digest = hashlib.sha256(os.urandom(32)).digest()
    record = CommitRecord(epoch=1, round=sequence + 1, emitted=(sequence,), committed=sequence + 1, digest=digest)
    (outcome,) = await log.append([LogAppend(name, sequence, record)])
    assert outcome == "ok"
    os.write(1, f"{name} {sequence} {digest.hex()}\n".encode())  # one write, so the parent never sees half a line


async def append_for_ever(log: CommitLog, name: str, step: bool) -> None:
    await log.create(name) if not await log.read(name) else None
    sequence = len(await log.read(name))
    while not step or sys.stdin.readline():
        await append(log, name, sequence)
        sequence += 1


async def main(url: str, data_dir: str, mode: str = "") -> None:
    with ExitStack() as stack:
        log = open_log(url, Path(data_dir), stack)
        names = ["log-0"] if mode == "step" else [f"log-{number}" for number in range(LOGS)]
        await asyncio.gather(*(append_for_ever(log, name, mode == "step") for name in names))


asyncio.run(main(*sys.argv[1:]))
