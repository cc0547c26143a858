"""Bodies: strict types, edge values, and a 400 that names every parameter that isn't used (C-29, C-30, C-32, C-34)."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"temperature": -1}', "temperature"),
        ('{"temperature": -1e-9}', "temperature"),
        ('{"temperature": "NaN"}', "temperature"),
        ('{"temperature": 1e999}', "temperature"),
        ('{"temperature": true}', "temperature"),
        ('{"top_p": 0}', "top_p"),
        ('{"top_p": -0.1}', "top_p"),
        ('{"top_p": 1.1}', "top_p"),
        ('{"top_k": 0.5}', "top_k"),
        ('{"top_k": -2}', "top_k"),
        ('{"top_k": "5"}', "top_k"),
        ('{"n": 0}', "n"),
        ('{"n": true}', "n"),
        ('{"n": "1"}', "n"),
        ('{"n": 1.0}', "n"),
        ('{"n": 129}', "n"),
        ('{"n": 100000000000000000000000}', "n"),
        ('{"max_tokens": 0}', "max_tokens"),
        ('{"max_tokens": -1}', "max_tokens"),
        ('{"max_tokens": 1e3}', "max_tokens"),
        ('{"max_tokens": 4000000000}', "max_tokens"),
        ('{"max_tokens": 99999999999999999999999}', "max_tokens"),
        ('{"seed": 1.5}', "seed"),
        ('{"seed": true}', "seed"),
        ('{"seed": 18446744073709551616}', "seed"),
        ('{"seed": -9223372036854775809}', "seed"),
        ('{"stop": ""}', "stop"),
        ('{"stop": ["a", ""]}', "stop"),
        ('{"stop": ["a", "b", "c", "d", "e"]}', "stop"),
        ('{"stop": [1]}', "stop"),
        ('{"stop_token_ids": [300]}', "stop_token_ids"),
        ('{"stop_token_ids": [-1]}', "stop_token_ids"),
        ('{"stop_token_ids": [true]}', "stop_token_ids"),
        ('{"stream": 1}', "stream"),
        ('{"stream_options": {"include_usage": true}}', "stream_options"),
        ('{"stream": true, "stream_options": {"include_obfuscation": true}}', "stream_options"),
        ('{"stream": true, "stream_options": {"other": true}}', "stream_options"),
        ('{"frequency_penalty": 0.1}', "frequency_penalty"),
        ('{"frequency_penalty": false}', "frequency_penalty"),
        ('{"presence_penalty": -1}', "presence_penalty"),
        ('{"logit_bias": {"50256": -100}}', "logit_bias"),
        ('{"min_p": 1}', "min_p"),
        ('{"response_format": {"type": "json_object"}}', "response_format"),
        ('{"ignore_eos": true}', "ignore_eos"),
        ('{"temprature": 1}', "temprature"),
        ('{"user": 5}', "user"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_refused_parameter_is_named(server: Any, path: str, body: str, param: str) -> None:
    prompt = '"prompt": "Hi"' if path == "/v1/completions" else '"messages": [{"role": "user", "content": "Hi"}]'
    answer = server.http.post(
        path,
        content="{" + prompt + ", " + body[1:],
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]
    assert server.serving.requests == []


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_completion_parameter_is_named(server: Any, parameters: dict[str, Any], param: str) -> None:
    answer = server.complete(**parameters)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": False}, "echo"),
    ],
)
def test_chat_parameter_is_named(server: Any, parameters: dict[str, Any], param: str) -> None:
    answer = server.chat(**parameters)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "parameters",
    [
        {
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "response_format": {"type": "text"},
            "n": 1,
        },
        {
            "frequency_penalty": None,
            "logit_bias": None,
            "stop": None,
            "seed": None,
            "temperature": None,
            "n": None,
            "max_tokens": None,
            "stream": None,
            "stream_options": None,
            "user": None,
            "model": None,
            "top_p": None,
        },
        {"min_p": 0, "min_tokens": 0, "repetition_penalty": 1.0, "ignore_eos": False, "metadata": {}},
        {"user": "someone", "top_k": 10**9, "stop": [], "stop_token_ids": []},
    ],
)
def test_neutral_values_are_accepted(server: Any, parameters: dict[str, Any]) -> None:
    assert server.complete(**parameters).status_code == 200
    assert server.chat(**parameters).status_code == 200


def sampling_of(server: Any, **parameters: Any) -> tuple[int, dict[str, int]]:
    answer = server.complete(**parameters)
    assert answer.status_code == 200, answer.text
    request = server.serving.requests[-1]
    names = ("temperature_milli", "top_k", "top_p_milli", "seed")
    members = {name: getattr(request.sampling, name) for name in names}
    return int(request.rule), {name: value for name, value in members.items() if isinstance(value, int)}


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-5, 1e-6, 1e-38, 1e-45, 0.00049])
def test_c_30_tiny_temperature_is_greedy(server: Any, temperature: float) -> None:
    assert sampling_of(server, temperature=temperature, top_p=0.5, top_k=3, seed=7) == (1, {})
    assert server.serving.requests[-1].session is None


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        ({}, {"temperature_milli": 1000}),
        ({"temperature": 0.0005}, {"temperature_milli": 1}),
        ({"temperature": 0.01}, {"temperature_milli": 10}),
        ({"temperature": 0.7}, {"temperature_milli": 700}),
        ({"temperature": 1e9}, {"temperature_milli": 10**12}),
        ({"top_k": -1}, {"temperature_milli": 1000}),
        ({"top_k": 0}, {"temperature_milli": 1000}),
        ({"top_k": 1, "top_p": 0.8}, {"temperature_milli": 1000, "top_k": 1, "top_p_milli": 800}),
        ({"top_k": 299}, {"temperature_milli": 1000, "top_k": 299}),
        ({"top_k": 300}, {"temperature_milli": 1000}),
        ({"top_k": 10**9}, {"temperature_milli": 1000}),
        ({"top_p": 1}, {"temperature_milli": 1000}),
        ({"top_p": 1e-9}, {"temperature_milli": 1000, "top_p_milli": 0}),
        ({"top_p": 0.9996}, {"temperature_milli": 1000}),
        ({"seed": 0}, {"temperature_milli": 1000, "seed": 0}),
        ({"seed": 2**64 - 1}, {"temperature_milli": 1000, "seed": 2**64 - 1}),
        ({"seed": -1}, {"temperature_milli": 1000, "seed": 2**64 - 1}),
        ({"seed": -(2**63)}, {"temperature_milli": 1000, "seed": 2**63}),
    ],
)
def test_c_29_sampling_profile(server: Any, parameters: dict[str, Any], sampling: dict[str, int]) -> None:
    assert sampling_of(server, **parameters) == (2, sampling)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{} {}",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"logit_bias": ' + b"[" * 100_000,
        b'{"logit_bias": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": 01}',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_not_a_json_object_is_400(server: Any, path: str, body: bytes) -> None:
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ],
)
def test_content_type(server: Any, media_type: str | None, status: int) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    assert server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == status


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, ["x", ""], [[1], []]])
@pytest.mark.parametrize("stream", [False, True])
def test_c_32_empty_prompt(server: Any, prompt: Any, stream: bool) -> None:
    answer = server.complete(prompt, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert server.serving.requests == []
    assert server.complete("x").status_code == 200


@pytest.mark.parametrize(
    "prompt",
    [[1, "x"], ["x", [1]], [[1], 2], [1.5], [True], [-1], [[-1]], [2**32], {"a": 1}, 5, [[[1]]]],
)
def test_prompt_of_another_shape(server: Any, prompt: Any) -> None:
    answer = server.complete(prompt)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("prompt", "where"),
    [([1, 2, 300], "prompt[2]: 300"), ([[1], [299, 4294967295]], "prompt[1][1]: 4294967295")],
)
def test_ids_outside_the_vocabulary_are_named(server: Any, prompt: Any, where: str) -> None:
    error = server.complete(prompt).json()["error"]
    assert error["message"] == f"{where} is outside the vocabulary, 0 to 299"
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ([{"role": "user"}], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "y"}], "messages[1].name"),
        ([{"role": "user", "content": "x", "weight": 1}], "`weight`"),
        ([{"role": "user", "content": [{"type": "image_url", "text": ""}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "first"}], "chat template"),
    ],
)
def test_c_32_messages_that_are_none(server: Any, messages: Any, where: str) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert where in error["message"]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": ""}], "user:;assistant:"),
        ([{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}], "system:d;user:u;assistant:"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "user:ab;assistant:",
        ),
        (
            [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None},
                {"role": "user", "content": "v"},
            ],
            "user:u;assistant:a;user:v;assistant:",
        ),
    ],
)
def test_chat_template_input(server: Any, messages: Any, text: str) -> None:
    assert server.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert bytes(server.serving.requests[0].prompt).decode() == text
