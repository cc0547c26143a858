"""A PostgreSQL server of the tests' own, and a line to it that can be cut."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOBODY = 65534  # PostgreSQL refuses to run as root


def binaries() -> Path | None:
    """Where ``initdb`` is; Debian keeps it out of the PATH."""
    found = shutil.which("initdb")
    places = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists()), None)


class PostgresServer:
    """Listens on 127.0.0.1; the database ``postgres`` belongs to the user ``sdcp``, who needs no password."""

    def __init__(self, place: Path, folder: Path) -> None:
        self._place = place
        self._folder = folder
        self._data = folder / "data"
        self._as = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._run("initdb", "-U", "sdcp", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://sdcp@127.0.0.1:{self.port}/postgres"

    def start(self, options: str = "") -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k '' -c max_connections=50 {options}"
        self._run("pg_ctl", "-w", "-l", str(self._folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        """As a power cut does."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._place / program), "-D", str(self._data), *arguments]
        done = subprocess.run(command, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **self._as)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr.decode()


@contextmanager
def running(place: Path) -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="sdcp-postgres-"))  # pytest's own folders are closed to other users
    try:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        server = PostgresServer(place, folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Line:
    """A TCP proxy to the server. ``cut_answer``: the next answer that has ``mark`` before it is lost with the line."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lose: bytes | None = None  # a request with these bytes is carried out and never answered
        self.refuse: bytes | None = None  # a request with these bytes never arrives
        self.hold = False  # nothing is answered, and the line stays
        self.lost = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._cut()

    def _cut(self) -> None:
        for line in self._open:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._open += [near, far]
            silent = threading.Event()
            threading.Thread(target=self._requests, args=(near, far, silent), daemon=True).start()
            threading.Thread(target=self._answers, args=(far, near, silent), daemon=True).start()

    def _requests(self, near: socket.socket, far: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):
            while data := near.recv(65536):
                if self.refuse is not None and self.refuse in data:
                    self.refuse = None
                    self._cut()
                    return
                if self.lose is not None and self.lose in data:
                    self.lose = None
                    silent.set()
                far.sendall(data)

    def _answers(self, far: socket.socket, near: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):
            while data := far.recv(65536):
                if silent.is_set() and not self.hold:
                    self.lost.set()
                    self._cut()
                    return
                if not silent.is_set():
                    near.sendall(data)
        with suppress(OSError):
            near.close()
