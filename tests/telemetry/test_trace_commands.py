"""``sdcp-mono trace ls|show`` on a recorded session, spread over the files of three processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sdcp_mono.cli import app
from sdcp_mono.telemetry.export import TraceFile
from sdcp_mono.telemetry.trace_files import Follower

SHOWN = """\
session 000102030405060708090a0b0c0d0e0f toy  9 tokens in 250.0 ms, 3 rounds, accepted 75% of 8
   1.0 ms     ◆ admitted
  20.0 ms     ◆ opened epoch 1, verifier v
 240.0 ms     ◆ failover epoch 2, lost v
bars: ▒ draft  █ verify  ▓ commit  · waiting
  20.0 ms     1 self             +1  ················█████████████████▓▓▓▓▓▓▓   60.0 ms
  80.0 ms     2 3/4 toy          +4  ▒▒▒▒▒▒▒▒▒▒▒▒▒···█████████████████▓▓▓▓▓▓▓   60.0 ms
 140.0 ms     3 3/4 toy          +4  ▒▒▒▒▒▒▒▒▒▒▒▒▒···█████████████████▓▓▓▓▓▓▓   60.0 ms
 200.0 ms     ◆ escalation action switch, m cap 2
"""
ROUND = """\
session 000102030405060708090a0b0c0d0e0f, round 2, epoch 1
sdcp.round     verifier  ────────────────────────────────────────   0.0 ms +60.0 ms
    base 4, m 4, accepted 3, emitted 4, action continue, m cap 8, drafter toy
  sdcp.draft   drafter   ▒▒▒▒▒▒▒▒▒▒▒▒▒                              0.0 ms +20.0 ms
    m 4, drafter toy, answer seconds 41.0 ms, accepted 3, batch requests 3, batch rows 12, pass seconds 12.0 ms, \
queue seconds 2.0 ms
  sdcp.verify  verifier                  █████████████████         25.0 ms +25.0 ms
    batch requests 8, batch rows 40, pass seconds 20.0 ms, queue seconds 5.0 ms, tier hits 2
  sdcp.commit  verifier                                   ▓▓▓▓▓▓▓  50.0 ms +10.0 ms
    append seconds 10.0 ms, append rounds 8
"""


def write(folder: Path, kit: Any, dropped: int = 0) -> None:
    """A file for each role; as three hosts have them, each in a folder of its own."""
    for role in ("router", "verifier", "drafter"):
        whose = {"service.name": f"sdcp-{role}", "service.instance.id": f"{role}:1"}
        file = TraceFile(folder / role / "traces", role, 2**20, whose)
        file.export([span for span in kit.spans() if span.attributes["sdcp.role"] == role], dropped)
        file.close()


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def trace(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())


def test_show_is_a_waterfall(kit: Any, tmp_path: Path) -> None:
    write(tmp_path, kit)
    assert trace("show", tmp_path) == SHOWN
    assert trace("show", tmp_path / "router", tmp_path / "verifier", tmp_path / "drafter") == SHOWN
    assert trace("show", "--session", "000102", tmp_path) == SHOWN


def test_show_a_round_tells_everything_about_it(kit: Any, tmp_path: Path) -> None:
    write(tmp_path, kit)
    assert trace("show", "--round", 2, tmp_path) == ROUND


def test_show_json_has_spans_by_name(kit: Any, tmp_path: Path) -> None:
    write(tmp_path, kit, dropped=2)
    told = json.loads(trace("show", "--json", tmp_path))
    assert (told["session"], told["dropped"]) == (kit.SESSION.hex(), 6)
    assert {name: len(spans) for name, spans in told["spans"].items()} == {
        "sdcp.session": 1, "sdcp.round": 3, "sdcp.draft": 2, "sdcp.verify": 3, "sdcp.commit": 3,
    }  # fmt: skip
    (root,) = told["spans"]["sdcp.session"]
    assert {span["parent"] for span in told["spans"]["sdcp.round"]} == {root["span"]}
    assert told["spans"]["sdcp.draft"][0]["seconds"] == pytest.approx(0.02)
    assert {span["service"] for span in told["spans"]["sdcp.draft"]} == {"sdcp-drafter"}


def test_slow_keeps_the_rounds_above_the_limit(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    write(tmp_path, kit)
    assert "█" not in trace("show", "--slow", tmp_path)
    assert json.loads(trace("ls", "--slow", "--json", tmp_path))["sessions"] == []
    monkeypatch.setenv("SDCP_TRACE_SLOW_MS", "50")
    assert trace("show", "--slow", tmp_path) == SHOWN  # all of them, as slow as each other


def test_ls_sums_sessions_up_and_says_what_was_dropped(kit: Any, tmp_path: Path) -> None:
    write(tmp_path, kit, dropped=3)
    told = json.loads(trace("ls", "--json", tmp_path))
    (facts,) = told["sessions"]
    assert facts == {
        "session": kit.SESSION.hex(), "trace": facts["trace"], "started": "2023-11-14T22:13:20.000+00:00",
        "seconds": 0.25, "model": "toy", "tokens": 9, "rounds": 3, "drafted": 8, "accepted": 6, "escalations": 1,
        "rejections": 0, "failovers": 1, "error": None,
    }  # fmt: skip
    assert told["dropped"] == 9
    shown = trace("ls", tmp_path)
    assert "000102030405  22:13:20.000  0.250       9       3       75%" in shown
    assert "sdcp-verifier verifier:1 has dropped 3 spans" in shown


def test_what_is_not_there_says_what_to_do(kit: Any, tmp_path: Path) -> None:
    write(tmp_path, kit)
    for arguments, said in (
        (["show", tmp_path / "nothing"], "traces are written to traces/"),
        (["show", "--data", tmp_path], "no such file or folder"),
        (["show", "--session", "ff", tmp_path], "sdcp-mono trace ls lists them"),
        (["show", "--round", "9", tmp_path], "it has 3"),
    ):
        result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
        assert result.exit_code == 1
        assert said in " ".join(result.output.split())


def test_following_reads_each_line_once_through_rotation(kit: Any, tmp_path: Path) -> None:
    follower = Follower([tmp_path])
    assert list(follower.look()) == []
    file = TraceFile(tmp_path, "serve", 8000, {"service.name": "sdcp-mono"})
    seen: list[bytes] = []
    for number in range(1, 30):
        assert file.export(kit.spans(kit.round(number, float(number))), 0) == 0
        seen += follower.look()
    file.close()
    follower.close()
    assert (tmp_path / "serve.1.jsonl").exists()
    assert len(seen) == len(set(seen)) == 29


def test_following_begins_now(kit: Any, tmp_path: Path) -> None:
    file = TraceFile(tmp_path, "serve", 2**20, {"service.name": "sdcp-mono"})
    file.export(kit.spans(kit.round(1, 0.0)), 0)
    follower = Follower([tmp_path])
    file.export(kit.spans(kit.round(2, 1.0)), 0)
    (line,) = follower.look()
    file.close()
    follower.close()
    assert b'"sdcp.round","value":{"intValue":"2"}' in line
