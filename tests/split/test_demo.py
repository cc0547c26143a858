"""``sdcp-mono split-demo``: it answers the README's curl, gets over a death, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.compose.cluster import free_ports, health
from sdcp_mono.compose.demo import CURL

README = Path(__file__).parents[2] / "README.md"
CYCLE = [10 + i % 10 for i in range(10)]  # ``cyc``: 10 > 11 > ... > 19 > 10 for ever


class Demo:
    """The command, with a tiny checkpoint; its own words on stderr."""

    def __init__(self, folder: Path, model: Path, port: int = 0) -> None:
        self.port = port or free_ports(1)[0]
        environment = {**os.environ, "SDCP_THREADS": "1", "SDCP_DRAFT": "ngram", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sdcp_mono", "split-demo", "--model", str(model), "--dtype", "float32",
             "--port", str(self.port), "--data", str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def says(self, words: str) -> str:
        """What it says until a line that has ``words``."""
        assert self.process.stderr is not None
        lines = ""
        for line in self.process.stderr:
            lines += line
            if words in line:
                return lines
        raise AssertionError(f"it ended: {lines}")

    def ask(self, url: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


@pytest.fixture
def demo(tmp_path: Path, cyc: Path) -> Iterator[Demo]:
    model = shutil.copytree(cyc, tmp_path / "model")
    (model / "chat_template.jinja").write_text("t5")  # whatever is said, 10 comes first
    made = Demo(tmp_path, model)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGTERM)
    made.process.communicate(timeout=60)


def test_the_readmes_curl_is_the_demos() -> None:
    assert CURL.format(url="http://127.0.0.1:8000/v1") in README.read_text()


def test_it_answers_the_curl_starts_the_dead_again_and_ends_all(demo: Demo) -> None:
    table = demo.says("answers at")
    pids = {name: int(pid) for name, pid in re.findall(r"^(\S+-?\d?) +(\d+)  https", table, re.MULTILINE)}
    assert set(pids) == {"cache", "router", "verifier-0", "verifier-1", "drafter-0", "drafter-1"}
    words = shlex.split(CURL.format(url=f"http://127.0.0.1:{demo.port}/v1"))
    body = json.loads(words[words.index("-d") + 1])
    answer = demo.ask(words[1], {**body, "max_tokens": 12})
    assert answer["choices"][0]["message"]["content"].split() == [f"t{token}" for token in (*CYCLE, 10, 11)]
    os.kill(pids["verifier-0"], signal.SIGKILL)
    demo.says("verifier-0 is back")
    body = {"model": "default", "prompt": CYCLE, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    answer = demo.ask(f"http://127.0.0.1:{demo.port}/v1/completions", body)
    assert answer["choices"][0]["token_ids"] == CYCLE * 3
    demo.process.send_signal(signal.SIGINT)
    demo.says("stopping")
    assert demo.process.wait(60) == 0
    assert health(f"http://127.0.0.1:{demo.port}") is None
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_role_that_never_comes_up_ends_it_with_its_last_words(tmp_path: Path, cyc: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        demo = Demo(tmp_path, cyc, taken.getsockname()[1])
        _, told = demo.process.communicate(timeout=120)
    assert demo.process.returncode == 1
    assert "router ended with code" in told
    assert "another process may have it" in told
