"""Roles as processes of their own on this machine: what ``split-demo``, tests and benchmarks start."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sdcp_mono import certs

POLL_SECONDS: Final = 0.05
START_SECONDS: Final = 180.0  # a large model loads for a minute or two
STOP_SECONDS: Final = 15.0  # streams and sessions end within a few; then a process is killed
LAST_LINES: Final = 15
LOOPBACK: Final = "127.0.0.1"
PEERS: Final = {
    "cache": ("router", "verifier", "drafter"),
    "router": ("verifier", "drafter"),
    "verifier": ("router", "drafter"),
    "drafter": ("router", "verifier"),
}
STOPPING: Final = ("router", "drafter", "verifier", "cache")  # whoever is needed goes after those who need it


class RoleDied(Exception):
    """A process ended by itself; the message has the last lines of its log."""


@dataclass(slots=True)
class Member:
    """One role: where it answers, and the process, once there is one. ``url`` is that of ``/health``."""

    name: str
    role: str
    base: str
    url: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def death(self) -> RoleDied:
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        code = None if self.process is None else self.process.poll()
        return RoleDied(f"{self.name} ended with code {code}; the end of {self.log}:\n" + "\n".join(lines))


class Cluster:
    """One cache, one router, and as many verifiers and drafters as asked for, under ``folder``.

    ``settings`` are ``SDCP_`` variables for all. ``command`` is what each is started with, ``host`` where it listens;
    both are for harnesses that put a process somewhere else.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str],
        *,
        verifiers: int = 2,
        drafters: int = 2,
        port: int = 0,
        command: Callable[[str], Sequence[str]] = lambda name: (sys.executable, "-m", "sdcp_mono"),
        host: Callable[[str], str] = lambda name: LOOPBACK,
    ) -> None:
        self.folder = folder
        self._settings = settings
        self._command = command
        named = [("cache", "cache"), ("router", "router")]
        named += [(f"verifier-{i}", "verifier") for i in range(verifiers)]
        named += [(f"drafter-{i}", "drafter") for i in range(drafters)]
        ports = free_ports(2 * len(named))
        self.members: dict[str, Member] = {}
        for name, role in named:
            shown = port if role == "router" and port else ports.pop()
            base, url = f"https://{host(name)}:{ports.pop()}/{name}/", f"http://{host(name)}:{shown}"
            self.members[name] = Member(name, role, base, url, folder / "logs" / f"{name}.log")
        hosts = dict.fromkeys((*certs.HOSTS, *(host(name) for name, _ in named)))
        certs.init(folder / "certs", hosts=tuple(hosts), roles={m.name: m.base for m in self.members.values()})
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """Of the OpenAI API."""
        return f"{self.members['router'].url}/v1"

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    def start(self, *names: str) -> None:
        """Start processes, all without names; each in a session of its own, so that Ctrl-C reaches only us."""
        for member in map(self.members.__getitem__, names or self.members):
            verb = ("cache", "serve") if member.role == "cache" else (member.role,)
            with member.log.open("ab") as log:
                member.process = subprocess.Popen(
                    [*self._command(member.name), *verb], env=self._environment(member), start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip

    def _environment(self, member: Member) -> dict[str, str]:
        host, _, port = member.url.removeprefix("http://").rpartition(":")
        peers = {f"SDCP_{role.upper()}S": ",".join(m.base for m in self.of(role)) for role in PEERS[member.role]}
        shown = ("SDCP_HOST", "SDCP_PORT") if member.role == "router" else ("SDCP_STATUS_HOST", "SDCP_STATUS_PORT")
        own = {
            "SDCP_BASE": member.base, "SDCP_TLS_DIR": str(self.folder / "certs"), "SDCP_TLS_NAME": member.name,
            "SDCP_DATA_DIR": str(self.folder / member.name), "SDCP_CACHE": self.of("cache")[0].base,
            shown[0]: host, shown[1]: port,
        }  # fmt: skip
        return {**os.environ, "COLUMNS": "200", **self._settings, **peers, **own}  # a log line is a line

    def wait(self, *names: str) -> None:
        """Until those processes are ready, all without names. Raises ``RoleDied`` if any ends, or ``TimeoutError``."""
        deadline = time.monotonic() + START_SECONDS
        for member in map(self.members.__getitem__, names or self.members):
            while not (health(member.url) or {}).get("ready"):
                for gone in self.ended():  # one that is waited for may wait for it in turn
                    raise gone.death()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{member.name} isn't ready after {START_SECONDS:.0f} s; see {member.log}")
                time.sleep(POLL_SECONDS)

    def ended(self) -> list[Member]:
        return [member for member in self.members.values() if member.ended()]

    def stop(self) -> None:
        """End all, also those that are paused; nothing is left behind."""
        deadline = time.monotonic() + STOP_SECONDS
        for role in STOPPING:
            running = [(m, m.process) for m in self.of(role) if m.process is not None]
            for _, process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.send_signal(signal.SIGCONT)
            for member, process in running:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                member.process = None


def health(url: str) -> dict[str, Any] | None:
    """What ``/health`` says; None while nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError, urllib.error.URLError):
        return None


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in taken]
