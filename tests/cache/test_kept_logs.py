"""Logs outlive their sessions for a while, and no longer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sdcp_mono.cache.kept_logs import KeptLogs
from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.core.messages import FenceRecord

from .log_records import make_append


def name(number: int) -> str:
    return f"mlc://local/-/log/{number}"


def test_the_newest_are_kept_and_the_rest_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        with SqliteCommitLog(tmp_path / "log.sqlite") as store:
            logs = KeptLogs(store, 3)
            for number in range(6):
                await logs.create(name(number))
            for number in (4, 0, 1, 2):
                await logs.drop(name(number))
            assert await store.names() == [name(i) for i in (0, 1, 2, 3, 5)]  # 3 and 5 are in use

    asyncio.run(main())


def test_a_log_that_is_taken_up_again_is_in_use(tmp_path: Path) -> None:
    async def main() -> None:
        with SqliteCommitLog(tmp_path / "log.sqlite") as store:
            logs = KeptLogs(store, 1)
            for number in range(3):
                await logs.create(name(number))
            await logs.drop(name(0))
            assert await logs.fence(name(0), 2)
            await logs.drop(name(1))
            await logs.drop(name(2))
            assert await store.names() == [name(0), name(2)]
            assert await logs.read(name(0)) == (FenceRecord(epoch=2),)

    asyncio.run(main())


def test_what_an_earlier_process_left_is_kept_within_the_same_bound(tmp_path: Path) -> None:
    async def main() -> None:
        with SqliteCommitLog(tmp_path / "log.sqlite") as store:
            for number in range(5):
                await store.create(name(number))
        with SqliteCommitLog(tmp_path / "log.sqlite") as store:
            logs = KeptLogs(store, 2)
            assert await logs.adopt() == 5
            assert len(await store.names()) == 5  # some may be in use: only the process in front of them is new
            assert await logs.append([make_append(name(0), 0)]) == ["ok"]
            await logs.drop(name(4))
            assert await store.names() == [name(0), name(3), name(4)]

    asyncio.run(main())
