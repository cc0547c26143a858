"""A node of real roles over toy models: the real SQLite log and object store, one event loop, one model thread."""

from __future__ import annotations

import asyncio
import importlib.util
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sdcp_mono import compose
from sdcp_mono.core.messages import UNSET, Rule, Sampling
from sdcp_mono.core.ports import Chunk, GenerateRequest, ModelCard, RowsProblem
from sdcp_mono.roles.tasks import repeat
from sdcp_mono.settings import Settings

VOCAB = 64
CARD = ModelCard("toy", b"t" * 32, b"k" * 32, VOCAB, 4096)
EDGES = {token: (5 * token + 7) % VOCAB for token in range(VOCAB)}  # one cycle through all ids
_SLEEP = asyncio.sleep
HANG_SECONDS = 60  # far above what any test takes: a test that hangs should say so


def _module(name: str, path: Path) -> Any:
    """Tests can't import each other by name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


toy = _module("roles_toy", Path(__file__).with_name("toy.py"))
over_grpc = _module("roles_over_grpc", Path(__file__).parents[1] / "split" / "over_grpc.py")


class GrpcNode(over_grpc.GrpcNode):  # type: ignore[name-defined, misc]
    @staticmethod
    def read_rows(data: bytes, tokens: tuple[int, ...]) -> Any:
        """An independent reader of M * V little-endian binary32."""
        size = VOCAB * 4
        if len(data) != len(tokens) * size:
            raise RowsProblem(f"q_rows: {len(data)} octets", unavailable=len(data) < len(tokens) * size)
        rows = toy.ToyRows([struct.unpack_from(f"<{VOCAB}f", data, i * size) for i in range(len(tokens))])
        rows.check(tokens, VOCAB)
        return rows


def follow(last: int, count: int) -> tuple[int, ...]:
    """What the target's chain says after ``last``."""
    tokens = [last]
    for _ in range(count):
        tokens.append(EDGES[tokens[-1]])
    return tuple(tokens[1:])


def request(prompt: Sequence[int] = (1, 2, 3), max_new: int = 40, **changes: Any) -> GenerateRequest:
    sampled = {"rule": Rule.SPECULATIVE_SAMPLING, "sampling": Sampling(seed=changes.pop("seed", UNSET))}
    members: dict[str, Any] = {
        "prompt": tuple(prompt), "max_new": max_new, "stop": (), "rule": Rule.GREEDY, "sampling": Sampling(),
    }  # fmt: skip
    if changes.pop("sampled", False):
        members |= sampled
    return GenerateRequest(**members | changes)


async def until(condition: Callable[[], Any]) -> None:
    """Let the event loop turn until something is so; ``run`` ends it if it never is."""
    while not condition():
        await _SLEEP(0)


class World:
    """A running node, and where to look whether it kept something."""

    def __init__(self, node: compose.Node, target: Any, drafts: tuple[Any, ...], thread: ThreadPoolExecutor) -> None:
        self.node = node
        self.thread = thread
        self.target = target
        self.drafts = drafts
        self.serving = node.serving
        self.verifier = node._verifier
        self.engine = self.verifier.engine
        self.drafter = node._drafter
        self.log = node.storage.store
        self.objects: Any = node.storage.objects.memory

    async def text(self, wish: GenerateRequest) -> tuple[int, ...]:
        """All tokens of a request that must finish."""
        chunks = await self.read(wish)
        assert chunks[-1].final
        assert (chunks[-1].finish, chunks[-1].error) == (4, "")
        return tuple(token for chunk in chunks for token in chunk.tokens)

    async def read(self, wish: GenerateRequest) -> list[Chunk]:
        generation = await self.serving.generate(wish)
        try:
            return [chunk async for chunk in generation.chunks()]
        finally:
            await generation.close()

    async def idle(self) -> None:
        """Wait until what was set in motion has come to rest: the drafter has heard, the model thread is free."""
        await until(lambda: not ((self.drafter is not None and self.drafter.sessions) or self.verifier._scores))
        await asyncio.wrap_future(self.thread.submit(lambda: None))

    async def assert_empty(self) -> None:
        """Nobody reads any more, so nothing is held."""
        await self.idle()
        assert self.engine.sessions == {}
        assert self.serving.machine.sessions == {}
        assert (self.serving._active, self.serving._waiting) == ({}, 0)
        assert self.serving._slots._value == self.serving.terms.active
        assert self.target.held == set()
        assert self.verifier._waiters == {}
        assert self.verifier._news == {}
        assert self.verifier._scores == {}
        assert [i.sessions for i in self.serving.machine.instances.values()] == [0] * len(
            self.serving.machine.instances
        )
        await until(lambda: self.objects.sweep() or self.objects.stats().objects == 0)  # over a wire it takes a moment
        while await self.log.names():
            await _SLEEP(0)


class Kit:
    VOCAB, CARD, EDGES = VOCAB, CARD, EDGES
    toy = toy
    follow = staticmethod(follow)
    until = staticmethod(until)
    request = staticmethod(request)

    def __init__(self, tmp_path: Path, node: type[compose.Node] = compose.Node) -> None:
        self._path = tmp_path
        self._node = node
        self._threads: list[ThreadPoolExecutor] = []

    @asynccontextmanager
    async def node(
        self, *drafts: Any, target: Any = None, instant: bool = False, tracing: Any = None, **settings: Any
    ) -> AsyncIterator[World]:
        thread = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._threads.append(thread)
        target = target or toy.ToyTarget(toy.chain(EDGES), CARD)
        nothing: Any = None
        loaded = compose.Loaded(
            Settings(data_dir=self._path, **{"kept_logs": 0} | settings), nothing, CARD, nothing, target,
            tuple((draft, instant) for draft in drafts), thread, 0.0,
        )  # fmt: skip
        async with self._node(loaded, CollectorRegistry(), tracing=tracing) as node:
            yield World(node, target, drafts, thread)

    @staticmethod
    def hold(thread: ThreadPoolExecutor) -> threading.Event:
        """Keep the model's thread busy until the event is set."""
        held = threading.Event()
        thread.submit(held.wait, HANG_SECONDS)
        return held

    @staticmethod
    async def no_sleep(_: float) -> None:
        await _SLEEP(0)

    repeat = staticmethod(repeat)

    @staticmethod
    async def collect(generation: Any) -> list[Chunk]:
        return [chunk async for chunk in generation.chunks()]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture(params=["one process", "gRPC"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    """Roles that call each other, and the same roles behind servers of their own."""
    kit = Kit(tmp_path, GrpcNode if request.param == "gRPC" else compose.Node)
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a test's coroutine to its end; afterwards no task is left."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        async def main() -> Any:
            answer = await asyncio.wait_for(work, HANG_SECONDS)
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left
            return answer

        return asyncio.run(main())

    return run
