"""``sdcp-mono serve`` as people meet it: a process, HTTP, the openai client, the default model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def url(smollm2: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's base URL, on a data folder of its own with the converted model."""
    data = tmp_path_factory.mktemp("serve")
    command = [sys.executable, "-m", "sdcp_mono", "serve", "--port", "0", "--model", str(smollm2.path)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        gateway_port = str(free.getsockname()[1])
    environment = {
        **os.environ, "SDCP_DATA_DIR": str(data), "SDCP_KV_MEMORY_MB": "256", "COLUMNS": "200",
        "SDCP_GATEWAY_PORT": gateway_port,
    }  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "answers at" in line:
                break
        else:
            pytest.fail("".join(lines))
        yield next(word for word in line.split() if word.startswith("http://")).removesuffix("/v1")
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0
        assert "Traceback" not in rest


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.loads(response.read())


def post(url: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_chat_in_sensible_english(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_openai_client_streams_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, max_tokens=40, stream=True,
        stream_options={"include_usage": True},
    )  # type: ignore[call-overload]  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_speculation_on_and_off_give_the_same_tokens(url: str) -> None:
    body = {"model": "default", "messages": QUESTION, "temperature": 0, "max_tokens": 32, "return_token_ids": True}
    _, on = post(f"{url}/v1/chat/completions", **body)
    _, off = post(f"{url}/v1/chat/completions", **body, disable_speculative_decoding=True)
    assert on["choices"][0]["token_ids"] == off["choices"][0]["token_ids"]
    assert on["usage"] == off["usage"]
    assert on["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert off["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


def test_c27_a_seed_gives_the_same_text_alone_and_in_a_crowd(url: str) -> None:
    def ask(seed: int | None, n: int = 1) -> list[str]:
        body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0, "n": n}
        status, answer = post(f"{url}/v1/completions", **body, **({} if seed is None else {"seed": seed}))
        assert status == 200
        return [choice["text"] for choice in answer["choices"]]

    alone = ask(7)
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(ask, [None, 1, 7, 2, None, 7, 3, 1, None, 2, 7, None]))
    assert all(crowd[i] == alone for i in (2, 5, 10))
    assert crowd[1] == crowd[7]
    assert len({tuple(crowd[i]) for i in (0, 4, 8, 11)}) == 4  # unseeded ones differ
    four = ask(7, n=4)
    assert len(set(four)) == 4
    assert four == ask(7, n=4)
    assert four[0] == alone[0]  # choice 0 uses the seed itself


def test_logprobs_are_those_of_the_verifier(url: str) -> None:
    _, answer = post(
        f"{url}/v1/completions", prompt="1 2 3 4 5 6", max_tokens=8, temperature=0, logprobs=2, return_token_ids=True
    )
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == answer["usage"]["completion_tokens"]
    for best, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert best == pytest.approx(max(top.values()))
        assert best <= 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "top_k": 0.5}, "top_k"),
        ({"prompt": "x", "max_tokens": 9000}, "max_tokens"),
        ({"prompt": [1] * 9000}, "prompt"),
        ({"prompt": "x", "min_p": 0.1}, "min_p"),
    ],
)
def test_bad_input_names_the_field_and_costs_the_neighbours_nothing(url: str, body: dict[str, Any], param: str) -> None:
    neighbour = {"prompt": "The sky is", "max_tokens": 16, "temperature": 0}
    _, before = post(f"{url}/v1/completions", **neighbour)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(post, f"{url}/v1/completions", **neighbour)
        status, answer = post(f"{url}/v1/completions", **body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert beside.result()[1]["choices"] == before["choices"]


def test_unknown_model_is_404(url: str) -> None:
    status, answer = post(f"{url}/v1/completions", model="gpt-9", prompt="x")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_c42_a_client_that_leaves_stops_its_generation_and_frees_everything(url: str) -> None:
    """2,000 tokens are asked for; the client goes after the first event. The next request finds everything free."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "Count: 1 2 3", "max_tokens": 2000, "temperature": 0, "stream": True}).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "", ""])
    committed = metric(url, "sdcp_committed_tokens_total")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.recv(65536)
    for _ in range(200):  # each question is a round trip; the session ends within one round
        if get(f"{url}/health")["active"] == 0:
            break
    else:
        pytest.fail("the session outlived its reader")
    assert metric(url, "sdcp_committed_tokens_total") - committed < 1000
    assert metric(url, "sdcp_sessions_active") == 0


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def test_health_and_models(url: str) -> None:
    health = get(f"{url}/health")
    assert health["ready"]
    assert {instance["role"] for instance in health["instances"]} == {"verifier", "drafter"}
    assert "smollm2-135m" in {model["id"] for model in get(f"{url}/v1/models")["data"]}


def test_the_curl_of_the_readme_answers(url: str, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    command = readme[readme.index("curl http") :].split("```")[0].replace("http://127.0.0.1:8000", url)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert "hash" in answer["choices"][0]["message"]["content"].lower()
