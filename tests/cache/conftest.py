"""A clock that tests move, and a commit log on a real file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcp_mono.cache.sqlite_log import SqliteCommitLog


class Clock:
    """Monotonic seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_ms(self, milliseconds: int) -> None:
        self.now += milliseconds / 1000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "commits.db"


@pytest.fixture
def log(path: Path) -> Iterator[SqliteCommitLog]:
    with SqliteCommitLog(path) as log:
        yield log
