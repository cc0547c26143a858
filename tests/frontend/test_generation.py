"""What comes back: text, tokens, finish reasons, usage, log-probabilities, speculation; whole and streamed alike."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sdcp_mono.core.messages import Rule
from sdcp_mono.core.ports import Chunk, GenerateRequest

EOS = 256


def events(answer: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that is well formed: ``data:`` lines, [DONE] last."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.partition("data: ")[2]) for chunk in chunks]


def fixed(text: str) -> str:
    """Ids and time replaced by fixed ones."""
    text = re.sub(r"\nid: [0-9a-f]{32}\.", "\nid: S.", "\n" + text)[1:]
    return re.sub(r'"created":\d+', '"created":0', re.sub(r"(cmpl-)[0-9a-f]{32}", r"\1X", text))


LOG = "ab" * 16  # of every generation that the server plays


# The chain in rounds of 5, 5, 5 and 2 tokens (EOS is the 17th).
SPECULATION = {
    "mean_acceptance_length": 5.0,
    "draft_acceptance_rate": 1.0,
    "acceptance_histogram": [0, 0, 0, 0, 4],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 16,
    "num_draft_tokens": 16,
}


def test_whole_completion(server: Any) -> None:
    body = server.complete("Hi", max_tokens=20).text
    assert fixed(body) == (
        '{"id":"cmpl-X","created":0,"model":"byte-fixture","object":"text_completion",'
        '"choices":[{"index":0,"text":"abcdefghijklmnop","logprobs":null,"finish_reason":"stop"}],'
        '"usage":{"prompt_tokens":2,"completion_tokens":17,"total_tokens":19},'
        '"metrics":{"speculative_decoding":' + json.dumps(SPECULATION, separators=(",", ":")) + "}}"
    )


def test_whole_chat(server: Any) -> None:
    body = server.chat("Hi", max_tokens=5, return_token_ids=True).json()
    assert body["object"] == "chat.completion"
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", body["id"])
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abcde", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "token_ids": [97, 98, 99, 100, 101],
        }
    ]
    assert body["usage"] == {"prompt_tokens": 18, "completion_tokens": 5, "total_tokens": 23}


def test_streamed_completion_bytes(server: Any) -> None:
    answer = server.complete("Hi", max_tokens=7, stream=True)
    head = 'data: {"id":"cmpl-X","created":0,"model":"byte-fixture","object":"text_completion","choices":[{"index":0,'
    metrics = (
        '"metrics":{"speculative_decoding":{"mean_acceptance_length":5.0,"draft_acceptance_rate":1.0,'
        '"acceptance_histogram":[0,0,0,0,2],"num_spec_steps":2,"num_accepted_draft_tokens":8,"num_draft_tokens":8}}'
    )
    assert fixed(answer.text) == (
        f"id: S.{LOG}.1.5.5\n"
        + head
        + '"text":"abcde","logprobs":null,"finish_reason":null}]}\n\n'
        + f"id: S.{LOG}.1.7.7\n"
        + head
        + '"text":"fg","logprobs":null,"finish_reason":"length"}],'
        + metrics
        + "}\n\ndata: [DONE]\n\n"
    )


def test_streamed_chat_bytes_with_usage(server: Any) -> None:
    answer = server.chat("Hi", max_tokens=7, stream=True, stream_options={"include_usage": True})
    head = 'data: {"id":"chatcmpl-X","created":0,"model":"byte-fixture","object":"chat.completion.chunk","choices":['
    lines = fixed(answer.text).split("\n\n")
    assert lines[:3] == [
        head
        + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}',
        f"id: S.{LOG}.1.5.5\n"
        + head
        + '{"index":0,"delta":{"content":"abcde"},"logprobs":null,"finish_reason":null}],"usage":null}',
        f"id: S.{LOG}.1.7.7\n"
        + head
        + '{"index":0,"delta":{"content":"fg"},"logprobs":null,"finish_reason":"length"}],"usage":null}',
    ]
    assert lines[3].startswith(
        head
        + '],"usage":{"prompt_tokens":18,"completion_tokens":7,"total_tokens":25},"metrics":{"speculative_decoding":{',
    )
    assert lines[4:] == ["data: [DONE]", ""]


STOPS = [
    # stop, max_tokens, text, finish reason, completion tokens
    (["bc"], 20, "a", "stop", 3),
    (["op"], 20, "abcdefghijklmn", "stop", 16),
    (["zz", "b"], 20, "a", "stop", 2),
    (["cd", "bc"], 20, "a", "stop", 3),
    (["p"], 15, "abcdefghijklmno", "length", 15),
    (["op"], 15, "abcdefghijklmno", "length", 15),
    (["pq"], 20, "abcdefghijklmnop", "stop", 17),
    ("xyz", 20, "abcdefghijklmnop", "stop", 17),
    ("abcdefghijklmnop", 20, "", "stop", 16),
    ("a", 20, "", "stop", 1),
    ("ef", 20, "abcd", "stop", 6),
    (["d", "cdefgX"], 20, "abc", "stop", 4),
    (["d", "cdefgh"], 20, "ab", "stop", 8),
]


@pytest.mark.parametrize(("stop", "max_tokens", "text", "finish", "count"), STOPS)
@pytest.mark.parametrize("plan", [[(12, 12)], [(0, 0)] * 20, [(4, 1), (4, 0)] * 20], ids=["k12", "plain", "rejecting"])
def test_c_34_stop_strings(
    server: Any,
    stop: Any,
    max_tokens: int,
    text: str,
    finish: str,
    count: int,
    plan: list[tuple[int, int]],
) -> None:
    server.serving.tell([*b"abcdefghijklmnop", EOS], plan)
    wanted = {"stop": stop, "max_tokens": max_tokens, "return_token_ids": True, "logprobs": 0}
    ids = [*b"abcdefghijklmnop", EOS][:count]

    body = server.complete("Hi", **wanted).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (text, finish, ids)
    assert body["usage"]["completion_tokens"] == count
    assert len(choice["logprobs"]["tokens"]) == count
    assert choice["logprobs"]["text_offset"] == list(range(count))

    chunks = events(server.complete("Hi", stream=True, stream_options={"include_usage": True}, **wanted))
    *deltas, last = chunks
    choices = [chunk["choices"][0] for chunk in deltas]
    assert "".join(one["text"] for one in choices) == text
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + [finish]
    assert all(one["text"] for one in choices[:-1])
    assert [token for one in choices for token in one["token_ids"]] == ids
    assert [token for one in choices for token in one["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
    # A token comes with its text, never before: no delta lists a token of the stop string, except the last.
    shown = 0
    for one in choices[:-1]:
        shown += len(one["text"])
        assert one["text"] == bytes(one["token_ids"]).decode()
    assert shown <= len(text)
    assert last["usage"]["completion_tokens"] == count
    assert server.serving.live == set()


def test_c_34_stop_inside_a_token_s_text(server: Any, rounds: Callable[..., list[Chunk]]) -> None:
    """A character of several tokens: the stop ends with the token that completes it."""
    server.serving.tell([*"aé€b".encode(), EOS])
    choice = server.complete("x", stop="€", return_token_ids=True, logprobs=0).json()["choices"][0]
    assert (choice["text"], bytes(choice["token_ids"]).decode()) == ("aé", "aé€")
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2]


def test_characters_are_never_split(server: Any) -> None:
    text = "a🎉b"
    server.serving.tell([*text.encode(), EOS], default=(0, 0))
    chunks = events(server.chat("x", stream=True))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "a", "🎉", "b", None]
    server.serving.tell([*text.encode()[:3], EOS])
    assert server.chat("x").json()["choices"][0]["message"]["content"] == "a�"


@pytest.mark.parametrize("parameters", [{}, {"stop_token_ids": [97]}, {"max_tokens": 1}])
def test_c_35_first_token_ends(server: Any, parameters: dict[str, Any]) -> None:
    first = 97 if "stop_token_ids" in parameters else EOS
    server.serving.tell([first, 98, 99])
    for n in (1, 2):
        body = server.complete("x", n=n, return_token_ids=True, **parameters).json()
        assert [(one["text"], one["finish_reason"], one["token_ids"]) for one in body["choices"]] == [
            ("", "stop", [first])
        ] * n
        assert body["usage"]["completion_tokens"] == n
        chunks = events(server.chat("x", n=n, stream=True, stream_options={"include_usage": True}, **parameters))
        assert [chunk["choices"][0]["delta"] for chunk in chunks[:n]] == [{"role": "assistant", "content": ""}] * n
        ends = [chunk["choices"][0] for chunk in chunks[n:-1]]
        assert [
            (one["index"], one["delta"], one["finish_reason"]) for one in sorted(ends, key=lambda one: one["index"])
        ] == [(i, {}, "stop") for i in range(n)]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == n


def test_completion_logprobs(server: Any) -> None:
    choice = server.complete("x", max_tokens=2, logprobs=2).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"a": -0.25, "b": -1.25}, {"b": -0.25, "c": -1.25}],
        "text_offset": [0, 1],
    }
    assert server.serving.requests[0].top_logprobs == 2
    assert server.complete("x", max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [
        {"a": -0.25}
    ]


def test_chat_logprobs(server: Any) -> None:
    server.serving.tell([*"é".encode(), EOS])
    logprobs = server.chat("x", logprobs=True, top_logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"]
    half = {"token": "�", "logprob": -0.25, "bytes": None}
    assert logprobs == {"content": [half | {"top_logprobs": [half]}] * 2, "refusal": None}
    server.serving.tell([97])
    chunks = events(server.chat("x", logprobs=True, max_tokens=1, stream=True))
    assert server.serving.requests[1].top_logprobs == 0
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [
        None,
        {"content": [{"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []}], "refusal": None},
    ]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # 4 proposed 2 accepted (3 tokens), self-decoded (1), 4/0 (1), 4/4 (5), 2/2 (3), 4/2 (3), last: EOS
        (
            [(4, 2), (0, 0), (4, 0), (4, 4), (2, 2), (4, 2), (0, 0)],
            {
                "mean_acceptance_length": 3.0,
                "draft_acceptance_rate": 10 / 18,
                "acceptance_histogram": [1, 0, 3, 0, 1],
                "num_spec_steps": 5,
                "num_accepted_draft_tokens": 10,
                "num_draft_tokens": 18,
            },
        ),
        (
            [(0, 0)] * 17,
            {
                "mean_acceptance_length": 0.0,
                "draft_acceptance_rate": 0.0,
                "acceptance_histogram": [],
                "num_spec_steps": 0,
                "num_accepted_draft_tokens": 0,
                "num_draft_tokens": 0,
            },
        ),
    ],
)
def test_speculation_metrics(server: Any, plan: list[tuple[int, int]], expected: dict[str, Any]) -> None:
    server.serving.tell([*b"abcdefghijklmnop", EOS], plan)
    body = server.complete("x", max_tokens=30).json()
    assert body["metrics"]["speculative_decoding"] == expected
    streamed = events(server.chat("x", stream=True))
    assert ["metrics" in chunk for chunk in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["metrics"]["speculative_decoding"] == expected


def test_opt_out_of_speculation(server: Any) -> None:
    server.complete("x")
    server.complete("x", disable_speculative_decoding=True)
    assert [request.speculative for request in server.serving.requests] == [True, False]


def test_stop_tokens_are_the_model_s_and_the_request_s(server: Any) -> None:
    body = server.complete("x", stop_token_ids=[101, 99, 101]).json()
    assert server.serving.requests[0].stop == (99, 101, EOS)
    assert body["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [(97, 98)]),
        ([97, 98], [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_prompt_shapes(server: Any, prompt: Any, prompts: list[tuple[int, ...]]) -> None:
    body = server.complete(prompt, n=2, temperature=0, max_tokens=1).json()
    assert [request.prompt for request in server.serving.requests] == [one for one in prompts for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(prompts)))
    assert body["usage"] == {
        "prompt_tokens": sum(map(len, prompts)),
        "completion_tokens": 2 * len(prompts),
        "total_tokens": sum(map(len, prompts)) + 2 * len(prompts),
    }


def sessions(server: Any, **parameters: Any) -> list[tuple[int, bytes]]:
    server.serving.requests.clear()
    assert server.complete(**{"prompt": "Hi", "seed": 7, "max_tokens": 5, **parameters}).status_code == 200
    return [(request.sampling.seed, request.session) for request in server.serving.requests]


def test_c_27_seeded_choices_differ_and_repeat(server: Any) -> None:
    four = sessions(server, n=4)
    assert sessions(server, n=4) == four
    assert len({session for _, session in four}) == 4
    # printf "sdcp-mono choice\x00\x00\x00\x00\x00\x00\x00\x07\x00\x00\x00\x01" | sha256sum | cut -c1-16, and so on
    assert [seed for seed, _ in four] == [7, 0xDEEAC75DB09745C9, 0x7D1899C5CDBA6622, 0xDF5D75E8A857B377]
    assert sessions(server) == four[:1]
    assert all(len(session) == 16 for _, session in four)


def test_c_27_session_depends_on_all_that_determines_the_output(server: Any) -> None:
    variations: list[dict[str, Any]] = [
        {},
        {"prompt": "Ho"},
        {"seed": 8},
        {"max_tokens": 6},
        {"temperature": 0.9},
        {"top_p": 0.5},
        {"top_k": 5},
        {"stop_token_ids": [9]},
        {"logprobs": 1},
        {"disable_speculative_decoding": True},
    ]
    assert len({sessions(server, **one)[0][1] for one in variations}) == len(variations)
    assert sessions(server, stop="b") == sessions(server, prompt=[72, 105], stream=True, user="u") == sessions(server)


def test_c_27_unseeded_requests_share_nothing(server: Any) -> None:
    server.complete("Hi", n=3)
    assert [request.session for request in server.serving.requests] == [None] * 3
    assert all(request.rule == Rule.SPECULATIVE_SAMPLING for request in server.serving.requests)


def failing_after(chunks: int, rounds: Callable[..., list[Chunk]]) -> Any:
    async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
        played = rounds(request, b"abcdefghijklmnop")[:chunks]
        for chunk in played:
            yield chunk
        yield Chunk(
            from_=5 * len(played), epoch=1, tokens=(), rounds=(), final=True, finish=5, error="logits are not finite"
        )

    return script


@pytest.mark.parametrize("chunks", [0, 1])
def test_failed_generation_is_500(server: Any, rounds: Any, chunks: int) -> None:
    server.serving.script = failing_after(chunks, rounds)
    answer = server.chat("x")
    assert (answer.status_code, answer.json()["error"]) == (
        500,
        {"message": "logits are not finite", "type": "server_error", "param": None, "code": "generation_failed"},
    )
    if chunks == 0:  # nothing was sent yet, so a stream has a status too
        assert server.chat("x", stream=True).status_code == 500
    assert server.serving.live == set()


def test_failure_in_mid_stream_is_an_event(server: Any, rounds: Any) -> None:
    server.serving.script = failing_after(1, rounds)
    *_, text, end, error = events(server.chat("x", stream=True))
    assert text["choices"][0]["delta"] == {"content": "abcde"}
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "error")
    assert error["error"]["message"] == "logits are not finite"
    assert server.serving.live == set()


def test_exception_in_mid_stream_is_an_event_without_details(server: Any, rounds: Any) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
        yield rounds(request, b"abcdefghijklmnop")[0]
        raise RuntimeError("secret")

    server.serving.script = script
    answer = server.complete("x", stream=True)
    assert events(answer)[-1]["error"]["message"] == "internal error"
    assert "secret" not in answer.text
    assert server.serving.live == set()
    assert server.complete("x").status_code == 500


def test_one_failed_choice_ends_the_request_only(server: Any, rounds: Any) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
        if len(server.serving.live) == 2:
            yield Chunk(from_=0, epoch=1, tokens=(), rounds=(), final=True, finish=5, error="broken")
        else:
            yield rounds(request, [97])[0]

    server.serving.script = script
    assert server.complete("x", n=2, max_tokens=1).status_code == 500
    assert server.complete("x", max_tokens=1).json()["choices"][0]["text"] == "a"


def test_traces_are_told_the_endpoint_and_the_clients_trace(server: Any) -> None:
    """The header goes on as it came: who traces judges it."""
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    server.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"traceparent": given})
    completion = server.serving.requests[-1]
    server.chat()
    chat = server.serving.requests[-1]
    assert (completion.operation, completion.trace) == ("text_completion", given)
    assert (chat.operation, chat.trace) == ("chat", "")
