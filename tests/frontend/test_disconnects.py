"""Clients that leave or stop reading: the generation is closed, nothing is left, nobody else notices (C-41, C-42)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from sdcp_mono.core.ports import Chunk, GenerateRequest
from sdcp_mono.frontend.settings import FrontendSettings

WAIT_S = 20


def ask(server: Any, connection: socket.socket, **parameters: Any) -> None:
    body = json.dumps({"prompt": "Hi", **parameters}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def leave(connection: socket.socket, how: str) -> None:
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing above INFO is logged, in particular no traceback."""
    with caplog.at_level(logging.INFO):
        yield
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []


@pytest.fixture(scope="module", params=["h11", "httptools"])
def either_server(request: pytest.FixtureRequest, serve: Callable[..., Any]) -> Iterator[Any]:
    # Half-closed with all buffers full is the same as not reading: such a client is cut off when a write takes too long.
    with serve(FrontendSettings(write_timeout_s=3.0), http=request.param) as running:
        yield running


@pytest.fixture
def server(either_server: Any) -> Any:
    either_server.serving.reset()
    return either_server


LEAVING = ["close", "reset", "half-close"]


@pytest.mark.parametrize("how", LEAVING)
def test_c_42_gone_in_mid_stream(server: Any, endless: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    server.serving.script = endless
    with quiet(caplog):
        with server.connect() as connection:
            ask(server, connection, stream=True)
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(65536)
            leave(connection, how)
            assert server.serving.closed.get(timeout=WAIT_S) == 1
        assert server.serving.live == set()
        server.serving.tell([97])
        assert server.complete("x", max_tokens=1).status_code == 200


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
def test_c_42_gone_during_prefill(
    server: Any,
    how: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started = threading.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
        started.set()
        await asyncio.Event().wait()
        yield Chunk(from_=0, epoch=1, tokens=(), rounds=(), final=True)

    server.serving.script = script
    with quiet(caplog), server.connect() as connection:
        ask(server, connection, stream=stream, n=2)
        assert started.wait(WAIT_S)
        leave(connection, how)
        assert sorted(server.serving.closed.get(timeout=WAIT_S) for _ in range(2)) == [1, 2]
        assert server.serving.live == set()


@pytest.mark.parametrize("how", LEAVING)
def test_c_42_gone_during_a_whole_response(
    server: Any, endless: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    started = threading.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in endless(request):
            started.set()
            yield chunk

    server.serving.script = script
    with quiet(caplog), server.connect() as connection:
        ask(server, connection)
        assert started.wait(WAIT_S)
        leave(connection, how)
        assert server.serving.closed.get(timeout=WAIT_S) == 1


@pytest.mark.parametrize("how", LEAVING)
def test_c_42_gone_while_waiting_for_admission(server: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    waiting, cancelled = threading.Event(), threading.Event()

    async def queue() -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server.serving.admit = queue
    with quiet(caplog), server.connect() as connection:
        ask(server, connection, stream=True)
        assert waiting.wait(WAIT_S)
        leave(connection, how)
        assert cancelled.wait(WAIT_S)
    assert server.serving.live == set()


@pytest.mark.parametrize("how", ["close", "reset"])
def test_c_42_gone_while_sending_the_body(
    serve: Callable[..., Any],
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve(FrontendSettings()) as server, quiet(caplog):
        with server.connect() as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            leave(connection, how)
        assert server.metrics.counted.get(timeout=WAIT_S) == ("/v1/completions", 499)


@pytest.mark.parametrize("stream", [False, True])
def test_c_42_client_that_stops_reading_is_cut(
    serve: Callable[..., Any],
    endless: Any,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve(FrontendSettings(write_timeout_s=0.2)) as server, quiet(caplog):
        server.serving.script = endless
        if not stream:  # one body of 64 MiB: more than any socket buffer
            server.serving.tell([299] * 1024)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_S)
        connection.connect(("127.0.0.1", server.port))
        with connection:
            ask(server, connection, stream=stream, max_tokens=1024)
            assert server.metrics.counted.get(timeout=WAIT_S) == ("/v1/completions", 200)
            assert server.serving.closed.get(timeout=WAIT_S) == 1
            received = bytearray()
            with suppress(ConnectionResetError):
                while part := connection.recv(2**20):
                    received += part
            assert len(received) < 32 * 2**20  # what the kernel had, not what the front end kept
            assert b"[DONE]" not in received
        messages = [record.getMessage() for record in caplog.records if record.name == "sdcp_mono.frontend"]
        assert [message.endswith(", stopped reading") for message in messages] == [True]


def test_one_log_line_without_content(serve: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sdcp_mono.frontend"), serve(FrontendSettings()) as server:
        for path in ("/v1/completions?q=secret", "/v1/secret"):
            server.http.post(path, json={"prompt": "secret"}, headers={"x-request-id": "r-1"})
            server.metrics.counted.get(timeout=WAIT_S)
        ours = [record.getMessage() for record in caplog.records if "id=r-1" in record.getMessage()]
    assert [re.sub(r"\d\.\d{3} s", "0 s", line) for line in ours] == [
        "POST /v1/completions 200 0 s id=r-1",
        "POST other 404 0 s id=r-1",
    ]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("r-1", True), ("!~", True), ("", False), ("a b", False), ("x" * 129, False), ("ü", False)],
)
def test_request_id_is_echoed_or_made(server: Any, given: str, echoed: bool) -> None:
    for path in ("/v1/models", "/v1/nothing", "/metrics"):
        answer = server.http.get(path, headers={"x-request-id": given.encode()})
        got = answer.headers["x-request-id"]
        assert (got == given) if echoed else (len(got) == 32)
    answers = [server.complete("x", stream=True) for _ in range(2)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 2


def test_c_41_same_request_id_twice_is_two_requests(server: Any) -> None:
    answers = [
        server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3}, headers={"x-request-id": "same"})
        for prompt in ("a", "bc")
    ]
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [1, 2]
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert [request.session for request in server.serving.requests] == [None, None]


def test_c_41_seeded_retry_has_the_same_session(server: Any, endless: Any) -> None:
    server.serving.script = endless
    with server.connect() as connection:
        ask(server, connection, stream=True, seed=7, max_tokens=9)
        connection.recv(1)
        leave(connection, "reset")
    server.serving.tell([97])
    assert server.complete("Hi", seed=7, max_tokens=9).status_code == 200
    first, second = server.serving.requests
    assert first == second
    assert server.serving.closed.get(timeout=WAIT_S) is not None
