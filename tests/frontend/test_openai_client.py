"""The ``openai`` package talks to it as to OpenAI's own server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from sdcp_mono.core.ports import Chunk, GenerateRequest
from sdcp_mono.core.problems import TooManyRequests

USER: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=USER,
        max_completion_tokens=5,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 5, "return_token_ids": True},
    )
    assert [(choice.message.content, choice.finish_reason) for choice in answer.choices] == [("abcde", "length")] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.token for one in logprobs.content] == list("abcde")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="byte-fixture",
        messages=USER,
        stream=True,
        stream_options={"include_usage": True},
        stop=["no"],
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "abcdefghijklm"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 15
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="default", messages=USER)
    again = client.chat.completions.create(model="default", messages=[*USER, first.choices[0].message, *USER])
    assert again.choices[0].message.content == "abcdefghijklmnop"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt=[[1, 2], [3]], max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["abc", "abc"]
    stream = client.completions.create(model="default", prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abcdefghijklmnop"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["byte-fixture", "default"]
    assert client.models.retrieve("default").owned_by == "sdcp-mono"


def test_errors_have_the_client_s_classes(server: Any, client: openai.OpenAI, rounds: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="default", messages=USER, frequency_penalty=1)
    assert (bad.value.param, bad.value.code) == ("frequency_penalty", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=USER)

    async def full() -> None:
        raise TooManyRequests("queue is full")

    server.serving.admit = full
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="default", messages=USER, stream=True)
    server.serving.admit = None

    async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
        yield rounds(request, b"abcdefghijklmnop")[0]
        yield Chunk(from_=5, epoch=1, tokens=(), rounds=(), final=True, finish=5, error="broken")

    server.serving.script = script
    stream = client.chat.completions.create(model="default", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="broken"):
        list(stream)
