"""``sdcp-mono cache`` on a data folder: nobody's, damaged, or in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.cache.blob import HEADER_BYTES, Blob, checksum
from sdcp_mono.cache.disk import DiskTier

SCOPE = "5c" * 16


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sdcp_mono", "cache", *arguments, "--data", str(tmp_path)]
        environment = {**os.environ, "SDCP_PORT": "1", "COLUMNS": "100"}  # nothing answers on port 1
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    return call


@pytest.fixture
def tier(tmp_path: Path) -> Any:
    """A disk tier with three objects, in use by this process."""
    tier = DiskTier(tmp_path / "kv", 1 << 20, floor_bytes=0)
    for number in range(3):
        data = memoryview(bytes([number]) * 8192)
        tier.write(
            Blob(f"mlc://local/{SCOPE}/target_kv/{number:064x}", 8192, "bfloat16", (8192,)), data, checksum(data)
        )
    yield tier
    tier.close()


def test_ls_shows_what_is_there_but_no_whole_scope(run: Any, tier: DiskTier) -> None:
    entries = json.loads(run("ls", "--json").stdout)
    assert [entry["name"] for entry in entries] == [f"{number:064x}" for number in range(3)]
    assert {(e["kind"], e["size"], e["dtype"], e["state"]) for e in entries} == {("target_kv", 8192, "bfloat16", "ok")}
    answer = run("ls")
    assert SCOPE not in answer.stdout
    assert "5c5c5c5c" in answer.stdout


def test_fsck_of_a_good_folder_in_use(run: Any, tier: DiskTier) -> None:
    answer = run("fsck", "--json")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["objects"]["ok"] == 3
    assert told["damaged"] == []


def test_fsck_tells_what_is_damaged_and_changes_nothing(run: Any, tier: DiskTier, tmp_path: Path) -> None:
    (segment,) = (tmp_path / "kv" / "segments").iterdir()
    with segment.open("r+b") as file:
        file.seek(HEADER_BYTES + 10)
        file.write(b"\xff")
    before = segment.read_bytes()
    answer = run("fsck")
    assert answer.returncode == 1
    assert "damaged" in answer.stdout
    assert "CRC32C" in answer.stdout
    assert segment.read_bytes() == before


def test_stat_of_a_folder_that_nobody_serves(run: Any, tier: DiskTier) -> None:
    told = json.loads(run("stat", "--json").stdout)
    assert told["tiers"][0]["objects"] == 3
    assert told["tiers"][0]["used_bytes"] == 3 * 8192


def test_a_server_that_does_not_answer_is_told(run: Any) -> None:
    answer = run("stat", "--url", "http://127.0.0.1:1")
    assert answer.returncode == 1
    assert "sdcp-mono serve" in answer.stderr


def test_an_empty_folder_is_good(run: Any) -> None:
    answer = run("fsck", "--json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout)["logs"]["logs"] == 0
