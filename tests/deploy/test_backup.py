"""What docs/operations.md says about the backup of an SQLite log, with the command from the page."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sdcp_mono.cache.inspecting import LOG
from sdcp_mono.cache.sqlite_log import SqliteCommitLog

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def backup(data: Path, target: Path) -> subprocess.CompletedProcess[str]:
    (code,) = re.findall(r'^\$ python -c "(import sqlite3.*)"$', PAGE.read_text(), re.MULTILINE)
    code = code.replace("/data/", f"{data}/").replace("/backup/", f"{target}/")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_log_that_is_closed_is_copied(tmp_path: Path) -> None:
    for name in ("data", "backup"):
        (tmp_path / name).mkdir()
    with SqliteCommitLog(tmp_path / "data" / LOG):
        other = sqlite3.connect(tmp_path / "data" / LOG, timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):  # as the page says
            other.execute("SELECT count(*) FROM sqlite_schema")
        other.close()
    result = backup(tmp_path / "data", tmp_path / "backup")
    assert result.returncode == 0, result.stderr
    with sqlite3.connect(tmp_path / "data" / LOG) as ours, sqlite3.connect(tmp_path / "backup" / LOG) as theirs:
        assert list(ours.iterdump()) == list(theirs.iterdump())
    ours.close()
    theirs.close()
    with SqliteCommitLog(tmp_path / "backup" / LOG):  # and it is taken as a log
        pass


def test_the_page_names_the_files_of_a_log(tmp_path: Path) -> None:
    with SqliteCommitLog(tmp_path / LOG):
        left = {path.name for path in tmp_path.iterdir()}
    assert LOG in left
    assert all(name in PAGE.read_text() for name in left)
