"""C-48: the probes' paths on real processes whose model takes its time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono import certs

SECONDS = 120  # far above what a start takes


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def get(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class SlowFolder:
    """A model folder whose config.json is a pipe: who loads it waits until ``let_go``."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.path = folder / "model"
        self.path.mkdir()
        for file in model.iterdir():
            if file.name != "config.json":
                (self.path / file.name).symlink_to(file)
        self._config = model / "config.json"
        os.mkfifo(self.path / "config.json")

    def wait_for_reader(self, port: int) -> None:
        """Until somebody reads, and the process listens; which is first is a matter of milliseconds."""
        self._pipe = (self.path / "config.json").open("w")
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "nothing listens"

    def let_go(self) -> None:
        (self.path / "next").symlink_to(self._config)
        (self.path / "next").replace(self.path / "config.json")  # for those who read it again
        self._pipe.write(self._config.read_text())
        self._pipe.close()


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(role, **settings)``: a process of its own, as a pod starts it."""
    bases = {name: f"https://127.0.0.1:{free_port()}/{name}/" for name in ("router", "verifier", "drafter", "mlc")}
    certs.init(tmp_path / "tls", roles=bases)
    running: list[subprocess.Popen[str]] = []

    def start(role: str, **settings: object) -> subprocess.Popen[str]:
        peers = {"SDCP_ROUTERS": bases["router"], "SDCP_VERIFIERS": bases["verifier"], "SDCP_CACHE": bases["mlc"]}
        environment = {
            "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "SDCP_BASE": bases[role],
            "SDCP_TLS_DIR": str(tmp_path / "tls"), "SDCP_DATA_DIR": str(tmp_path / "data"), "SDCP_DRAIN_SECONDS": "0",
            "SDCP_THREADS": "1", "SDCP_KV_MEMORY_MB": "16", **peers, **{k: str(v) for k, v in settings.items()},
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "sdcp_mono", role],
            env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_c_48_a_verifier_is_alive_while_it_loads(start: Start, tmp_path: Path, cyc: Path) -> None:
    model, port = SlowFolder(tmp_path, cyc), free_port()
    process = start("verifier", SDCP_MODEL=model.path, SDCP_DTYPE="float32", SDCP_STATUS_PORT=port)
    model.wait_for_reader(port)
    assert get(port, "/health/live")[0] == 200
    assert get(port, "/health")[0] == 503
    model.let_go()
    assert process.stderr is not None
    assert any("answers at" in line for line in process.stderr)
    assert get(port, "/health")[0] == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0


def test_c_48_a_router_lists_no_model_while_it_loads(start: Start, tmp_path: Path, cyc: Path) -> None:
    model, port = SlowFolder(tmp_path, cyc), free_port()
    process = start("router", SDCP_MODEL=model.path, SDCP_DTYPE="float32", SDCP_PORT=port)
    model.wait_for_reader(port)
    assert get(port, "/health/live")[0] == 200
    assert get(port, "/health")[0] == 503
    assert get(port, "/v1/models") == (200, {"object": "list", "data": []})
    model.let_go()
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
