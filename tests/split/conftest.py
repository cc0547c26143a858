"""Roles as servers of their own on loopback, with TLS and certificates of their own; the models are toys."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono import certs
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.core.engine import Engine, Limits
from sdcp_mono.core.messages import UNSET, Contract, Rule, Sampling, SessionOpen, SessionState, Status
from sdcp_mono.core.ports import (
    ByteSource,
    GenerateRequest,
    ModelCard,
    ObjectMeta,
    RowsProblem,
    ScoreRequest,
)
from sdcp_mono.core.routing import Router
from sdcp_mono.grpc.cache_client import CommitLogClient, GrpcRows, ObjectStoreClient
from sdcp_mono.grpc.cache_service import CommitLogService, ObjectStoreService
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.grpc.client import DrafterClient, RouterClient, VerifierClient
from sdcp_mono.grpc.server import GrpcServer, Service, serve_grpc
from sdcp_mono.grpc.services import DrafterService, RouterService, VerifierService
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.mlc_client import Caches
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.drafter import Drafter, Source
from sdcp_mono.roles.router import RouterRole
from sdcp_mono.roles.terms import Terms
from sdcp_mono.roles.verifier import Verifier
from sdcp_mono.settings import Settings

HANG_SECONDS = 60  # far above what any test takes: a test that hangs should say so
END_SECONDS = 10  # for tasks that end by themselves
VOCAB = 64
CARD = ModelCard("toy", b"t" * 32, b"k" * 32, VOCAB, 4096)
EDGES = {token: (5 * token + 7) % VOCAB for token in range(VOCAB)}  # one cycle through all ids
BASES = certs.base_uris()
ACCESS = Access.of(
    routers=(BASES["router"],),
    verifiers=(BASES["verifier"], BASES["verifier-b"]),
    frontends=(BASES["frontend"],),
    drafters=(BASES["drafter"], BASES["drafter-b"]),
)
SESSION = bytes(range(16))
SETTINGS = Settings()
CONTRACT = Contract(
    target=CARD.target, tokenizer=CARD.tokenizer, rule=1, m_max=8, max_new=256, stop=(2,), low_rounds=3, fallback=(1, 2)
)
OPENING = SessionOpen(
    session=SESSION, epoch=1, contract=CONTRACT, prompt=(1, 2, 3), commit_log=f"mlc://local/-/log/{SESSION.hex()}"
)
STATE = SessionState(session=SESSION, epoch=1, round=0, committed=0, digest=b"d" * 32)
STATUS = Status(instance=BASES["drafter"], role=1, load=0, queue=0, ttl_ms=1000)


def _of_roles(name: str) -> Any:
    """A module of the roles' tests; tests can't import each other by name."""
    spec = importlib.util.spec_from_file_location(f"split_{name}", Path(__file__).parents[1] / "roles" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


toy = _of_roles("toy")


def rows_from_bytes(data: bytes, tokens: tuple[int, ...]) -> Any:
    """An independent reader of M * V little-endian binary32."""
    import struct

    if len(data) != len(tokens) * VOCAB * 4:
        raise RowsProblem(f"q_rows: {len(data)} octets", unavailable=len(data) < len(tokens) * VOCAB * 4)
    rows = toy.ToyRows([struct.unpack_from(f"<{VOCAB}f", data, i * VOCAB * 4) for i in range(len(tokens))])
    rows.check(tokens, VOCAB)
    return rows


class Silent:
    """An observer that looks away."""

    def round(self, *_: Any) -> None: ...
    def rejected(self, *_: Any) -> None: ...
    def passed(self, *_: Any) -> None: ...
    def sessions(self, *_: Any) -> None: ...


class Heard:
    """Any port at all: remembers what it was called with, and answers or raises what it was told to."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = answers

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *([kwargs] if kwargs else [])))
            answer = self.answers.get(name)
            if callable(answer):
                answer = answer(*args, **kwargs)
            if isinstance(answer, Coroutine):
                answer = await answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return called


class Counted(MemoryObjects):
    """Remembers what was put."""

    puts: list[str]

    async def put(self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None) -> ObjectMeta:
        self.puts.append(uri)
        return await super().put(uri, value, ttl_ms=ttl_ms)


class World:
    """Router, verifier, drafter and cache, each behind its own server, none knowing another but by address."""

    serving: RouterRole
    verifier: Verifier
    drafter: Drafter
    log: SqliteCommitLog
    objects: Counted
    puts: list[str]

    async def text(self, request: GenerateRequest) -> tuple[int, ...]:
        generation = await self.serving.generate(request)
        try:
            chunks = [chunk async for chunk in generation.chunks()]
        finally:
            await generation.close()
        assert (chunks[-1].finish, chunks[-1].error) == (4, "")
        return tuple(token for chunk in chunks for token in chunk.tokens)


class Kit:
    """What test modules use, as a fixture because tests can't import each other."""

    ACCESS, BASES, CARD, CONTRACT, OPENING, SESSION, STATE, STATUS, VOCAB, EDGES = (
        ACCESS, BASES, CARD, CONTRACT, OPENING, SESSION, STATE, STATUS, VOCAB, EDGES,
    )  # fmt: skip
    Heard = Heard
    toy = toy
    rows_from_bytes = staticmethod(rows_from_bytes)

    def __init__(self, directory: Path, work: Path) -> None:
        self.directory = directory
        self.work = work

    def files(self, name: str) -> certs.Certificates:
        return certs.files(self.directory, name)

    @asynccontextmanager
    async def server(self, *services: Service, role: str = "verifier", **options: Any) -> AsyncIterator[GrpcServer]:
        members: dict[str, Any] = {"files": self.files(role), "access": ACCESS, **options}
        async with serve_grpc(services=services, **members) as server:
            yield server

    def channel(self, server: GrpcServer, role: str, **options: Any) -> Channel:
        return Channel(server.address, options.pop("files", None) or self.files(role), **options)

    @asynccontextmanager
    async def verifier(
        self, port: Any, role: str = "router", *, drafter: str | None = None, **options: Any
    ) -> AsyncIterator[VerifierClient]:
        """``port`` behind a server, and a client with ``role``'s certificate."""
        service = VerifierService(port, CARD, lambda session: drafter)
        async with self.server(service, **options) as server, self.channel(server, role) as channel:
            yield VerifierClient(channel)

    @asynccontextmanager
    async def world(self, target: Any, draft: Any) -> AsyncIterator[World]:
        made = World()
        async with AsyncExitStack() as stack:
            thread = stack.enter_context(ThreadPoolExecutor(1))
            made.log = log = stack.enter_context(SqliteCommitLog(self.work / "log.sqlite"))
            made.objects = objects = Counted(64 * 2**20)
            made.puts = objects.puts = []
            store: Any = objects
            enter = stack.enter_async_context
            cache = await enter(self.server(ObjectStoreService(store), CommitLogService(log), role="mlc"))

            async def to(server: GrpcServer, role: str) -> Channel:
                return await enter(self.channel(server, role))

            async def stored(role: str) -> tuple[ObjectStoreClient, CommitLogClient, GrpcRows, Caches]:
                channel = await to(cache, role)
                client = ObjectStoreClient(channel)
                rows = GrpcRows(client, "local", VOCAB, rows_from_bytes)
                return client, CommitLogClient(channel), rows, Caches({}, client, authority="local")

            verifiers: dict[str, Any] = {}
            drafters: dict[str, Any] = {}
            router_objects, router_log, _, _ = await stored("router")
            made.serving = RouterRole(
                Router(trusted=frozenset({BASES["drafter"]})), CARD, verifiers, drafters, router_log, router_objects,
                Terms(m_max=SETTINGS.m_max, m_init=SETTINGS.m_init, low_ratio=SETTINGS.low_ratio),
            )  # fmt: skip
            router = await enter(
                self.server(RouterService(made.serving, made.serving.verifier_of), role="router")
            )  # fmt: skip

            _, verifier_log, verifier_rows, caches = await stored("verifier")
            engine = Engine(CARD, Limits(), frozenset({BASES["drafter"]}))
            batcher = Batcher[ScoreRequest, Any](
                "toy", target.step, thread, expected=lambda: 0, rows=lambda request: 1, observer=Silent()
            )
            made.verifier = Verifier(
                BASES["verifier"], engine, target, batcher, verifier_log, verifier_rows,
                RouterClient(await to(router, "verifier")), caches.tokens, Silent(),
            )  # fmt: skip
            verifier = await enter(self.server(VerifierService(made.verifier, CARD, engine.drafter_of)))
            verifiers[BASES["verifier"]] = VerifierClient(await to(verifier, "router"))

            _, _, drafter_rows, caches = await stored("drafter")
            made.drafter = Drafter(
                BASES["drafter"], [Source(draft, None)],
                {BASES["verifier"]: VerifierClient(await to(verifier, "drafter"))}, drafter_rows,
                RouterClient(await to(router, "drafter")), caches.tokens,
            )  # fmt: skip
            drafter = await enter(self.server(DrafterService(made.drafter), role="drafter"))
            drafters[BASES["drafter"]] = DrafterClient(await to(drafter, "router"))

            for role in (made.verifier, made.drafter, made.serving):
                role.start()  # type: ignore[attr-defined]
                stack.push_async_callback(role.stop)  # type: ignore[attr-defined]
            await made.serving.ready(drafters=True)
            yield made

    @staticmethod
    def request(prompt: Sequence[int] = (1, 2, 3), max_new: int = 40, seed: int | None = None) -> GenerateRequest:
        """Greedy, or sampled with a seed, from which the session's id follows."""
        rule = Rule.GREEDY if seed is None else Rule.SPECULATIVE_SAMPLING
        sampling = Sampling(seed=UNSET if seed is None else seed)
        session = None if seed is None else seed.to_bytes(16, "big")
        return GenerateRequest(tuple(prompt), max_new, (), rule, sampling, session=session)

    @staticmethod
    def run(work: Coroutine[Any, Any, Any]) -> Any:
        """Run a test's coroutine to its end; afterwards no task of its own is left."""

        async def main() -> Any:
            before = asyncio.all_tasks()
            answer = await asyncio.wait_for(work, HANG_SECONDS)
            if left := asyncio.all_tasks() - before:  # the library's own tasks end a little later
                _, left = await asyncio.wait(left, timeout=END_SECONDS)
            assert not left, left
            return answer

        return asyncio.run(main())


@pytest.fixture(scope="session")
def split_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    certs.init(directory)
    return directory


@pytest.fixture
def kit(split_certs: Path, tmp_path: Path) -> Kit:
    return Kit(split_certs, tmp_path)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[Any]:
    """All roles as objects of one process, to compare with."""
    kit = _of_roles("conftest").Kit(tmp_path / "in_process")
    yield kit
    kit.close()
