"""Roles as processes of their own, with TLS between them: the same tokens, also when one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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

    def tls_name(self, name: str) -> str:
        return name

    def listen(self, name: str) -> str:
        return ""

    def more(self, name: str) -> dict[str, str]:
        """Further environment."""
        return {}

    def listed(self, kind: str) -> list[str]:
        """What everybody is told of the instances of a kind."""
        return [base for other, base in self.bases.items() if other.startswith(kind)]

    def start(self, name: str) -> None:
        role = name.partition("-")[0]
        command = {"mlc": ["cache", "serve"]}.get(role, [role])
        arguments = [
            "--base", self.bases[name], "--tls-dir", str(self.folder / "certs"), "--tls-name", self.tls_name(name),
            "--data", str(self.folder / name),
        ]  # fmt: skip
        peers = {
            "mlc": ("routers", "verifiers", "drafters"), "router": ("verifiers", "drafters"),
            "verifier": ("routers", "drafters"), "drafter": ("routers", "verifiers"),
        }[role]  # fmt: skip
        for kind in peers:
            for base in self.listed(kind[:-1]):
                arguments += [f"--{kind}", base]
        if role != "mlc":
            arguments += ["--cache", self.bases["mlc"], "--model", str(self.model), "--dtype", "float32"]
        if role == "router":
            arguments += ["--port", str(self.http)]
        if role == "drafter":
            arguments += ["--draft", "ngram"]
        environment = {**os.environ, "SDCP_THREADS": "1", "SDCP_KV_MEMORY_MB": "16", "SDCP_LOG_LEVEL": "warning"}
        environment |= {"SDCP_LISTEN": self.listen(name), **self.more(name)}
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

    def instances(self) -> dict[str, int]:
        """The sessions at every instance that the router knows, by base."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/health", timeout=10) as answer:
            return {i["base"]: i["sessions"] for i in json.load(answer)["instances"]}

    def sessions_at(self, name: str) -> int:
        return self.instances().get(self.bases[name], 0)

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


class Pools(Cluster):
    """Verifiers and drafters are pools: instances at addresses of their own share a certificate; nobody lists them."""

    NAMES = ("mlc", "router", "verifier-1", "drafter-1", "verifier-2", "drafter-2")

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model)
        pools = {kind: f"https://{kind}.sdcp.test:{free_port()}/" for kind in ("verifier", "drafter")}
        for n, name in enumerate(self.NAMES[2:], start=2):
            self.bases[name] = pools[self.tls_name(name)].replace("://", f"://127-0-0-{n}.")
        certs.init(folder / "certs", roles={name: self.bases[name] for name in ("mlc", "router")}, pools=pools)
        self.patterns = {kind: base.replace("://", "://*.") for kind, base in pools.items()}

    def tls_name(self, name: str) -> str:
        return name.partition("-")[0]

    def listen(self, name: str) -> str:
        if name in ("mlc", "router"):
            return ""
        host, _, port = self.bases[name].removeprefix("https://").rstrip("/").rpartition(":")
        return f"{host.partition('.')[0].replace('-', '.')}:{port}"

    def listed(self, kind: str) -> list[str]:
        return [self.patterns[kind]] if kind in self.patterns else super().listed(kind)


class Requests:
    """A stream of requests from several clients, until it is told to end."""

    def __init__(self, cluster: Cluster, clients: int, tokens: int) -> None:
        self._cluster, self._tokens = cluster, tokens
        self.ending = threading.Event()
        self.wrong: list[Any] = []
        self.done = [0] * clients
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, client: int) -> None:
        try:
            while not self.ending.is_set():
                ids = [token for part in self._cluster.stream([10, 11, 12], self._tokens) for token in part]
                if ids != expected(self._tokens):
                    self.wrong.append(ids)
                self.done[client] += 1
        except Exception as error:
            self.wrong.append(repr(error))

    def more(self, requests: int) -> None:
        """Wait until every client has finished so many more."""
        goal = [done + requests for done in self.done]
        while not self.wrong and any(done < least for done, least in zip(self.done, goal, strict=True)):
            self._cluster.instances()  # takes its time
        assert not self.wrong, self.wrong

    def end(self) -> None:
        self.ending.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        assert not self.wrong, self.wrong


def test_instances_that_come_register_themselves_and_those_that_go_fail_no_request(tmp_path: Path, cyc: Path) -> None:
    """A rolling restart: a second verifier and drafter come, the first ones get SIGTERM under a stream of requests."""
    cluster = Pools(tmp_path, cyc)
    first, second = ("verifier-1", "drafter-1"), ("verifier-2", "drafter-2")
    try:
        for name in ("mlc", "router", *first):
            cluster.start(name)
        for name in ("mlc", "router", *first):
            cluster.answers(name)
        requests = Requests(cluster, clients=3, tokens=300)
        try:
            requests.more(1)
            for name in second:
                cluster.start(name)
            for name in second:
                cluster.answers(name)
            while not {cluster.bases[name] for name in second} <= cluster.instances().keys():
                assert not requests.wrong, requests.wrong
            requests.more(1)
            for name in first:
                while not cluster.sessions_at(name):
                    assert not requests.wrong, requests.wrong
                cluster.processes[name].send_signal(signal.SIGTERM)
                assert cluster.processes[name].wait(WAIT_SECONDS) == 0
            requests.more(2)
        finally:
            requests.end()
        assert [cluster.sessions_at(name) for name in first] == [0, 0]
    finally:
        cluster.stop()


class Divided(Cluster):
    """The first verifier's target is divided among two ranks."""

    NAMES = ("mlc", "router", "verifier", "verifier-b")

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model)
        self.status = free_port()

    def more(self, name: str) -> dict[str, str]:
        if name != "verifier":
            return {}
        return {"SDCP_TENSOR_PARALLEL": "2", "SDCP_STATUS_PORT": str(self.status)}

    def ranks(self) -> list[int]:
        pid = self.processes["verifier"].pid
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def answer(self, path: str) -> int:
        """The verifier's own word on how it is."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.status}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks would take a GPU each")
def test_a_verifier_that_loses_a_rank_is_not_ready_and_its_sessions_go_on_elsewhere(tmp_path: Path, cyc: Path) -> None:
    cluster = Divided(tmp_path, cyc)
    try:
        for name in ("mlc", "router", "verifier"):
            cluster.start(name)
        for name in ("mlc", "router", "verifier"):
            cluster.answers(name)
        assert cluster.answer("/health") == 200
        (rank,) = cluster.ranks()
        seen: list[int] = []
        for part in cluster.stream([10, 11, 12], 400):
            seen += part
            if len(seen) >= 20 and "verifier-b" not in cluster.processes:
                cluster.start("verifier-b")
                os.kill(rank, signal.SIGKILL)
        assert seen == expected(400)
        assert (cluster.answer("/health"), cluster.answer("/health/live")) == (503, 503)
        assert not cluster.sessions_at("verifier")
        cluster.processes["verifier"].send_signal(signal.SIGTERM)
        assert cluster.processes["verifier"].wait(WAIT_SECONDS) == 0
    finally:
        cluster.stop()
