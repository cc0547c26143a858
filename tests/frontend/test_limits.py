"""Lengths, bodies, models and refusals: the right status and the true numbers before anything is taken (C-33)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sdcp_mono.core.problems import BadContract, Refusal, TooManyRequests, Unavailable, Unprocessable
from sdcp_mono.frontend.settings import FrontendSettings


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "numbers"),
    [
        ("12345678", 2045, "max_tokens", "2048 tokens; you requested 2053 tokens (8 in prompt, 2045 in max_tokens)"),
        ("12345678", 2**62, "max_tokens", "4611686018427387904 in max_tokens"),
        ("x" * 3000, None, "prompt", "2048 tokens; you requested 3000 tokens in prompt"),
        ("x" * 2048, None, "prompt", "2048 tokens; you requested 2048 tokens in prompt"),
        ([5] * 100_000, None, "prompt", "100000 tokens in prompt"),
        ("a " * 2_000_000, None, "prompt", "at least 65520 tokens in prompt"),
    ],
)
def test_c_33_too_long(
    server: Any, stream: bool, prompt: Any, max_tokens: int | None, param: str, numbers: str
) -> None:
    answer = server.complete(prompt, max_tokens=max_tokens, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert numbers in error["message"]
    assert server.serving.requests == []


def test_c_33_too_long_chat(server: Any) -> None:
    answer = server.chat("x" * 3000, max_completion_tokens=5)
    assert answer.json()["error"]["message"].endswith("you requested 3016 tokens in messages.")
    answer = server.chat("x" * 84, max_completion_tokens=2000)
    assert answer.json()["error"]["param"] == "max_completion_tokens"
    assert "(100 in messages, 2000 in max_completion_tokens)" in answer.json()["error"]["message"]
    assert server.chat("a " * 2_000_000).json()["error"]["message"].endswith("at least 65520 tokens in messages.")


def test_longest_that_fits(server: Any) -> None:
    assert server.complete("12345678", max_tokens=2040).status_code == 200
    assert server.complete("x" * 2047).status_code == 200
    assert server.complete("x" * 2040).status_code == 200
    assert [request.max_new for request in server.serving.requests] == [2040, 1, 8]


def test_default_max_tokens(server: Any) -> None:
    server.complete("x")
    server.chat("x")
    server.chat("x" * 1984)  # 16 more from the template
    server.chat("x", max_tokens=7)
    server.chat("x", max_tokens=7, max_completion_tokens=7)
    assert [request.max_new for request in server.serving.requests] == [16, 1024, 48, 7, 7]


def test_body_over_the_limit_is_413(server: Any) -> None:
    limit = server.app.settings.max_body_bytes
    body = json.dumps({"prompt": "x" * (limit - 14)}).encode()
    assert len(body) == limit
    headers = {"content-type": "application/json"}
    assert server.http.post("/v1/completions", content=body, headers=headers).status_code == 400  # only too many tokens
    answer = server.http.post("/v1/completions", content=body + b" ", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("framing", ["content-length: 1000000000", "transfer-encoding: chunked"])
def test_body_that_never_ends_is_413_while_it_is_read(serve: Callable[..., Any], http: str, framing: str) -> None:
    with serve(FrontendSettings(max_body_bytes=1000), http=http) as server, server.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
        connection.sendall(head.encode() + (b"" if "length" in framing else b"7d0\r\n" + b" " * 2000 + b"\r\n"))
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_body_that_does_not_arrive_is_408(serve: Callable[..., Any]) -> None:
    with serve(FrontendSettings(body_timeout_s=0.05)) as server, server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_models(server: Any) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["byte-fixture", "default"]
    model = server.http.get("/v1/models/byte-fixture").json()
    assert model == listed["data"][0]
    assert {**model, "created": 0} == {
        "id": "byte-fixture",
        "object": "model",
        "created": 0,
        "owned_by": "sdcp-mono",
        "max_model_len": 2048,
    }
    for name in ("byte-fixture", "default"):
        assert server.complete("x", model=name).json()["model"] == "byte-fixture"


def test_unknown_model_is_404(server: Any) -> None:
    for answer in (
        server.complete("x", model="gpt-4"),
        server.chat("x", model="gpt-4"),
        server.complete("x", model=""),
        server.http.get("/v1/models/gpt-4"),
        server.http.get("/v1/models/a/b"),
        server.complete("x", model="gpt-4", stream=True),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_no_such_path_and_wrong_method(server: Any) -> None:
    answer = server.http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    answer = server.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "error" in answer.json()


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "retry_after"),
    [
        (TooManyRequests("queue is full", retry_after_ms=2100), 429, "rate_limit_error", "3"),
        (TooManyRequests("queue is full"), 429, "rate_limit_error", "1"),
        (Unavailable("no drafter and no room"), 503, "server_error", "1"),
        (Unprocessable("prompt: can never fit"), 400, "invalid_request_error", None),
        (BadContract("stop: too many"), 400, "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    server: Any,
    refusal: Refusal,
    status: int,
    kind: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    async def refuse() -> None:
        raise refusal

    server.serving.admit = refuse
    answer = server.chat("x", stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["message"]) == (status, kind, refusal.detail)
    assert answer.headers.get("retry-after") == retry_after


def test_one_refused_choice_closes_the_others(server: Any) -> None:
    async def only_two() -> None:
        if len(server.serving.requests) > 2:
            raise TooManyRequests("queue is full")

    server.serving.admit = only_two
    assert server.complete("x", n=3).status_code == 429
    assert server.serving.live == set()
    assert sorted(server.serving.closed.get(timeout=1) for _ in range(2)) == [1, 2]


def test_health_before_and_after_loading(serve: Callable[..., Any], tokenizer: Any) -> None:
    with serve(FrontendSettings(), loaded=False) as server:
        assert server.http.get("/health/live").status_code == 200
        answer = server.http.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading", "ready": False})
        answer = server.complete("x")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert server.http.get("/v1/models").json()["data"] == []
        server.app.attach(server.serving, tokenizer)
        answer = server.http.get("/health")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "ready": True, "model": "byte-fixture", "sessions": 0}
        assert server.complete("x").status_code == 200


def test_tokenizer_queue_is_bounded(serve: Callable[..., Any]) -> None:
    with serve(FrontendSettings(tokenizer_threads=1, tokenizer_queue=0)) as server:
        threads = server.app._threads
        threads._pending = 1  # the one thread is busy
        answer = server.complete("x")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert server.complete([1, 2]).status_code == 200  # ids need no tokenizer
        threads._pending = 0
        assert [server.complete("x").status_code for _ in range(3)] == [200] * 3
