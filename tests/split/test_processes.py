"""Roles as processes of their own, with TLS between them: the same tokens, also when one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono import certs

WAIT_SECONDS = 120  # far above what a start takes; a role that doesn't come up should say so


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Cluster:
    """A cache, a router, two verifiers and two drafters."""

    NAMES = ("mlc", "router", "verifier", "verifier-b", "drafter", "drafter-b")

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.http = free_port()
        self.bases = {name: f"https://127.0.0.1:{free_port()}/{name}/" for name in self.NAMES}
        certs.init(folder / "certs", roles=self.bases)
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> None:
        role = name.partition("-")[0]
        command = {"mlc": ["cache", "serve"]}.get(role, [role])
        arguments = [
            "--base", self.bases[name], "--tls-dir", str(self.folder / "certs"), "--tls-name", name,
            "--data", str(self.folder / name),
        ]  # fmt: skip
        peers = {
            "mlc": ("routers", "verifiers", "drafters"), "router": ("verifiers", "drafters"),
            "verifier": ("routers", "drafters"), "drafter": ("routers", "verifiers"),
        }[role]  # fmt: skip
        for kind in peers:
            for base in (base for other, base in self.bases.items() if other.startswith(kind[:-1])):
                arguments += [f"--{kind}", base]
        if role != "mlc":
            arguments += ["--cache", self.bases["mlc"], "--model", str(self.model), "--dtype", "float32"]
        if role == "router":
            arguments += ["--port", str(self.http)]
        if role == "drafter":
            arguments += ["--draft", "ngram"]
        environment = {**os.environ, "SDCP_THREADS": "1", "SDCP_KV_MEMORY_MB": "16", "SDCP_LOG_LEVEL": "warning"}
        process = subprocess.Popen(
            [sys.executable, "-m", "sdcp_mono", *command, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.processes[name] = process

    def answers(self, name: str) -> None:
        """Wait until a process says that it answers."""
        process = self.processes[name]
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "answers at" in line:
                return
        raise AssertionError(f"{name} ended: {''.join(lines)}")

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """The token ids of a streamed completion, event by event."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        yield choice["token_ids"]

    def sessions_at(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/health", timeout=10) as answer:
            instances = json.load(answer)["instances"]
        return sum(i["sessions"] for i in instances if i["base"] == self.bases[name])

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stderr is not None:
                process.stderr.close()


@pytest.fixture
def cluster(tmp_path: Path, cyc: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, cyc)
    try:
        for name in made.NAMES:
            made.start(name)
        for name in made.NAMES:
            made.answers(name)
        yield made
    finally:
        made.stop()


def expected(tokens: int) -> list[int]:
    """``cyc``: 10 > 11 > ... > 19 > 10 for ever."""
    return [10 + (3 + i) % 10 for i in range(tokens)]


def test_the_split_answers_and_survives_the_death_of_either_kind(cluster: Any) -> None:
    prompt = [10, 11, 12]
    assert [t for part in cluster.stream(prompt, 60) for t in part] == expected(60)
    for kind in ("verifier", "drafter"):
        seen: list[int] = []
        killed = False
        for part in cluster.stream(prompt, 400):
            seen += part
            if not killed and len(seen) >= 20:
                victim = next(n for n in (kind, f"{kind}-b") if cluster.sessions_at(n))
                cluster.processes[victim].send_signal(signal.SIGKILL)
                killed = True
        assert killed
        assert seen == expected(400)
