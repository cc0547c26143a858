"""The setting ``log``: which store a URL names."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.cache.commit_log import CommitLogUnusable
from sdcp_mono.cache.disk import TierUnusable
from sdcp_mono.compose.logs import open_log
from sdcp_mono.compose.storage import open_objects
from sdcp_mono.settings import CacheSettings, Settings


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://somewhere/db", "not mysql://"),
        ("/var/lib/log", "log: expected postgresql://, s3://, gs:// or az://, or nothing for SQLite"),
        ("postgresql://sdcp:a-secret@127.0.0.1:1/db", "can't be used"),
        ("s3://key:a-secret@bucket/prefix", "credentials and options belong in the environment"),
    ],
)
def test_what_can_not_keep_logs_is_told_without_secrets(tmp_path: Path, url: str, said: str) -> None:
    with ExitStack() as stack, pytest.raises((CommitLogUnusable, TierUnusable)) as refused:
        open_log(url, tmp_path, stack)
    assert said in str(refused.value)
    assert "a-secret" not in str(refused.value)


def test_shared_objects_outlive_the_process(s3_url: str, tmp_path: Path) -> None:
    """The setting ``objects``: what one process put is read by the next; draft rows stay where they are."""
    settings = CacheSettings(base="https://mlc:9443/", objects=s3_url, data_dir=tmp_path)
    prompt, rows = "mlc://local/-/prompt/a", "mlc://local/-/q_rows/a"

    async def put() -> None:
        objects = open_objects(settings, None)
        await objects.put(prompt, b"tokens")
        await objects.put(rows, b"rows")

    async def read() -> list[Any]:
        objects = open_objects(settings, None)
        return [await objects.get(uri, None) for uri in (prompt, rows)]

    asyncio.run(put())
    assert asyncio.run(read()) == [b"tokens", None]


def test_a_password_is_not_shown_with_the_settings(tmp_path: Path) -> None:
    assert "a-secret" not in repr(Settings(log="postgresql://sdcp:a-secret@db/sdcp", data_dir=tmp_path))
