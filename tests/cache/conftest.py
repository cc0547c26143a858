"""A clock that tests move, a commit log on a real file, an S3 server with faults."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sdcp_mono.cache.disk import DiskTier
from sdcp_mono.cache.sqlite_log import SqliteCommitLog

from . import disk_writer, postgres


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


@pytest.fixture
def tiers() -> Iterator[Callable[..., DiskTier]]:
    """Opens disk tiers, and closes them at the end."""
    made: list[DiskTier] = []

    def opened(path: Path, cap: int = disk_writer.SMALL_CAP, **options: Any) -> DiskTier:
        made.append(DiskTier(path, cap, **{"floor_bytes": 0} | options))
        return made[-1]

    yield opened
    for tier in made:
        tier.close()


# ---- a PostgreSQL server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresServer]:
    place = postgres.binaries()
    if place is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres.running(place) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: postgres.PostgresServer) -> str:
    """A schema of its own for each test."""
    schema = f"test_{secrets.token_hex(8)}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
    return f"{postgres_server.url}?options=-csearch_path%3D{schema}"


# ---- an S3 server, and what goes wrong on the way to it --------------------------------------------------------------

BUCKET = "sdcp"


class S3Proxy:
    """A real HTTP proxy in front of the S3 server: it counts, and does what ``fault`` says of a request.

    ``fault(method, path)`` answers None or one of: ``refuse`` (500, not forwarded), ``cut`` (closed, not forwarded),
    ``hold`` (sets ``held``, forwarded when ``go`` is set); ``500 after``, ``cut after``, ``hold after`` (forwarded,
    then no good answer); ``garble`` (other bytes in the answer), ``unconditional`` (If-None-Match is lost).
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.held, self.go = threading.Event(), threading.Event()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def do_GET(self) -> None:
                proxy.handle(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, *_: object) -> None: ...

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._listener.server_port}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.go.set()
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()

    def count(self, method: str, part: str = "") -> int:
        return sum(method == m and part in path for m, path in self.requests)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        with self._lock:
            self.requests.append((request.command, request.path))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self._answer(request, body, self.fault(request.command, request.path))
        finally:
            with self._lock:
                self.at_once -= 1

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes, fault: str | None) -> None:
        request.close_connection = True
        if fault == "cut":
            return
        if fault == "hold":
            self.held.set()
            assert self.go.wait(20)
        status, headers, answer = (500, [], b"") if fault == "refuse" else self._forward(request, body, fault)
        if fault == "hold after":
            assert self.go.wait(20)
        if fault == "cut after":
            return
        if fault == "500 after":
            status, headers, answer = 500, [], b""
        if fault == "garble":
            answer = bytes(byte ^ 0xFF for byte in answer)
        request.send_response(status)
        for name, value in headers:
            request.send_header(name, value)
        if not headers:
            request.send_header("Content-Length", "0")
        request.end_headers()
        request.wfile.write(answer)

    def _forward(
        self, request: BaseHTTPRequestHandler, body: bytes, fault: str | None
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.removeprefix("http://"), timeout=20)
        left_out = {"connection", "if-none-match"} if fault == "unconditional" else {"connection"}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in left_out}
        with contextlib.closing(connection):
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "transfer-encoding")]
            return answer.status, kept, answer.read()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """moto's S3 server with the bucket ``sdcp``; its URL."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()  # moto looks whether a key is taken and then stores: S3 does both in one step

    def application(environ: Any, start_response: Any) -> Any:
        with one_at_a_time:
            return list(moto(environ, start_response))

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    with contextlib.closing(connection):
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def s3_url(s3_server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own for each test; the rest is in the environment, where an operator would set it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return f"s3://{BUCKET}/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"


@pytest.fixture
def s3(s3_server: str, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """What ``s3_url`` leads through, in tests that ask for it."""
    proxy = S3Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture(params=["bucket-memory", "bucket-s3"])
def bucket_url(request: pytest.FixtureRequest) -> str:
    """An object store that can keep a log."""
    return request.getfixturevalue("s3_url") if request.param == "bucket-s3" else "memory://"
