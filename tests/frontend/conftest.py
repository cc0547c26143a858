"""A served front end over real sockets: the application, uvicorn, and a ``Serving`` that plays given chunks.

The fixture model has a byte-level vocabulary (ids 0..255 are bytes, 256 is EOS, V = 300). It continues any prompt with
``abcdefghijklmnop`` in rounds of five tokens: four accepted drafts and the additional token.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import prometheus_client
import pytest
import uvicorn

from sdcp_mono.core.ports import Chunk, GenerateRequest, ModelCard, RoundInfo, TokenInfo, TokenLogprob
from sdcp_mono.frontend.app import FrontEnd, create_app
from sdcp_mono.frontend.settings import FrontendSettings

EOS = 256
BULK = 299  # a token with 64 KiB of text, to fill sockets with
ALPHABET = b"abcdefghijklmnop"
WAIT_S = 20  # how long a test waits for something that must happen; reached only by a failure


def _bytes(ids: Sequence[int]) -> bytes:
    return bytes(token for token in ids if token < 256)


class ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return "".join("x" * 65536 if token == BULK else self._utf8.decode(_bytes([token])) for token in ids)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteTokenizer:
    eos_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return _bytes(ids).decode("utf-8", "replace")

    def apply_chat(self, messages: Sequence[Any]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise ValueError("the assistant can't speak first")
        return self.encode("".join(f"{one['role']}:{one['content']};" for one in messages) + "assistant:")

    def incremental(self) -> ByteDecoder:
        return ByteDecoder()


def token_info(request: GenerateRequest, token: int) -> TokenInfo:
    if request.top_logprobs < 0:
        return TokenInfo(origin="accepted", p=0.5, q=0.5)
    top = tuple(TokenLogprob(token + i, -0.25 - i) for i in range(request.top_logprobs))
    return TokenInfo(origin="accepted", p=0.5, q=0.5, logprob=-0.25, top=top)


def rounds_of(
    request: GenerateRequest,
    tokens: Sequence[int],
    plan: Sequence[tuple[int, int]] = (),
    default: tuple[int, int] = (4, 4),
) -> list[Chunk]:
    """One chunk per round; ``plan`` gives (proposed, accepted) of the first rounds, (0, 0) is self-decoded.

    Cut behind the first stop token and at ``max_new``, as the verifier does.
    """
    ends = [i + 1 for i, token in enumerate(tokens) if token in request.stop]
    tokens = tokens[: min([request.max_new, *ends])]
    chunks: list[Chunk] = []
    base = 0
    while base < len(tokens):
        number = len(chunks) + 1
        proposed, accepted = plan[number - 1] if number <= len(plan) else default
        emitted = tuple(tokens[base : base + accepted + 1])
        info = RoundInfo(
            round=number,
            epoch=1,
            base=base,
            proposed=tuple(range(proposed)),
            accepted=accepted,
            emitted=emitted,
            tokens=tuple(token_info(request, token) for token in emitted),
            action=0,
            m_cap=4,
        )
        final = base + len(emitted) == len(tokens)
        chunks.append(
            Chunk(from_=base, epoch=1, tokens=emitted, rounds=(info,), final=final, finish=4 if final else None),
        )
        base += len(emitted)
    return chunks


Script = Callable[[GenerateRequest], AsyncIterator[Chunk]]


class PlayedGeneration:
    def __init__(self, serving: PlayedServing, request: GenerateRequest, number: int) -> None:
        self.session = request.session or number.to_bytes(16, "big")
        self.log = request.resume or "ab" * 16
        self._serving = serving
        self._request = request
        self._number = number

    def chunks(self, from_: int = 0) -> AsyncIterator[Chunk]:
        return self._serving.script(self._request)

    async def close(self) -> None:
        if self._number in self._serving.live:
            self._serving.live.remove(self._number)
            self._serving.closed.put(self._number)


class PlayedServing:
    """A real implementation of the port, with what it plays under the test's control."""

    card = ModelCard(name="byte-fixture", target=b"\1" * 32, tokenizer=b"\2" * 32, vocab_size=300, context=2048)

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.live: set[int] = set()
        self.closed: queue.Queue[int] = queue.Queue()
        self.admit: Callable[[], Any] | None = None
        self.tell([*ALPHABET, EOS])

    def tell(
        self, tokens: Sequence[int], plan: Sequence[tuple[int, int]] = (), default: tuple[int, int] = (4, 4)
    ) -> None:
        async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
            for chunk in rounds_of(request, tokens, plan, default):
                yield chunk

        self.script: Script = script

    async def generate(self, request: GenerateRequest) -> PlayedGeneration:
        self.requests.append(request)
        number = len(self.requests)
        if self.admit is not None:
            await self.admit()
        self.live.add(number)
        return PlayedGeneration(self, request, number)

    def stats(self) -> dict[str, Any]:
        return {"sessions": len(self.live)}


class PrometheusMetrics:
    """``RequestMetrics`` on prometheus_client, as compose passes it in."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "sdcp_http_requests",
            "HTTP requests",
            ["route", "model", "status"],
            registry=self.registry,
        )

        self.counted: queue.Queue[tuple[str, int]] = queue.Queue()

    def count_request(self, route: str, model: str, status: int, seconds: float) -> None:
        self.counted.put((route, status))
        self._requests.labels(route, model, str(status)).inc()

    def exposition(self) -> tuple[bytes, str]:
        return prometheus_client.generate_latest(self.registry), prometheus_client.CONTENT_TYPE_LATEST


class Server:
    """The application on a port of this machine; ``serving`` says what it plays."""

    def __init__(self, app: FrontEnd, serving: PlayedServing, metrics: PrometheusMetrics, port: int) -> None:
        self.app = app
        self.metrics = metrics
        self.serving = serving
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)

    def complete(self, prompt: Any = "Hi", **parameters: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **parameters})

    def chat(self, content: Any = "Hi", **parameters: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": content}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, **parameters})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)


@contextmanager
def running(settings: FrontendSettings, *, loaded: bool = True, http: str = "auto") -> Iterator[Server]:
    serving = PlayedServing()
    metrics = PrometheusMetrics()
    app = create_app(serving, ByteTokenizer(), settings, metrics) if loaded else FrontEnd(settings, metrics)
    # With the protocol given, asyncio turns Nagle's algorithm off on accepted connections; create_server gives none.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(app, log_level="warning", access_log=False, http=http)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        run = Server(app, serving, metrics, listener.getsockname()[1])
        with run.http:
            yield run
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with running(FrontendSettings()) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.serving.reset()
    return shared_server


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """``with serve(settings) as server``: a server of one's own."""
    return running


@pytest.fixture
def rounds() -> Callable[..., list[Chunk]]:
    return rounds_of


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def endless() -> Script:
    """A generation that ends only by being closed, 64 KiB of text each round."""

    async def script(request: GenerateRequest) -> AsyncIterator[Chunk]:
        for index in itertools.count():
            yield Chunk(from_=index, epoch=1, tokens=(BULK,), rounds=(), final=False)
            await asyncio.sleep(0)

    return script
