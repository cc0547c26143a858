"""The setting ``log``: which store a URL names."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from sdcp_mono.cache.commit_log import CommitLogUnusable
from sdcp_mono.cache.disk import TierUnusable
from sdcp_mono.compose.logs import open_log
from sdcp_mono.settings import Settings


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


def test_a_password_is_not_shown_with_the_settings(tmp_path: Path) -> None:
    assert "a-secret" not in repr(Settings(log="postgresql://sdcp:a-secret@db/sdcp", data_dir=tmp_path))
