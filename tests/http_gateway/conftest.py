"""A gateway over real TLS and HTTP/2 on loopback, port 0, in front of the real roles; the models are toys.

The target's next token is the last one plus 1, modulo 64, so every output is known by hand.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import importlib.util
import random
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec import structs

from sdcp_mono import certs
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.objects import RoutedObjects
from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.core import digest as digests
from sdcp_mono.core.engine import Engine, Limits
from sdcp_mono.core.messages import Assignment, Contract, Event, Rule, SessionOpen, Status
from sdcp_mono.core.names import format_session
from sdcp_mono.core.ports import Draft, DraftRequest, ModelCard, RowsProblem, Scored, ScoreFailure, ScoreRequest
from sdcp_mono.core.problems import UnknownSession
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.limits import GatewayLimits
from sdcp_mono.http_gateway.mlc import MlcResources
from sdcp_mono.http_gateway.mlc_client import Caches, HttpRows, Logs
from sdcp_mono.http_gateway.roles import DrafterResources, RouterResources
from sdcp_mono.http_gateway.server import Gateway, serve_gateway
from sdcp_mono.http_gateway.verifier import VerifierResources
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.verifier import Verifier

VOCAB = 64
TARGET = bytes.fromhex("254e528c669a2084c9727298cacb83e8854e0a6ff80e2bf18096b9dce0f7ebda")
TOKENIZER = bytes.fromhex("9f42a7a29dca3063ad26d7be7fe6a930fa38afb1a703e4f7ff538db4e133b19c")
CARD = ModelCard("toy", TARGET, TOKENIZER, VOCAB, 4096)
SESSION = bytes(range(16))
CONTRACT = Contract(
    target=TARGET, tokenizer=TOKENIZER, rule=1, m_max=8, max_new=256, stop=(2,), low_rounds=3, fallback=(1, 2, 3, 5)
)
BASES = certs.base_uris()


def _wire() -> Any:
    """Tests can't import each other by name."""
    spec = importlib.util.spec_from_file_location("http_gateway_wire", Path(__file__).with_name("wire.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wire = _wire()
WAIT_S: float = wire.WAIT_S


def successor(last: int) -> Sequence[float]:
    return tuple(float(i == (last + 1) % VOCAB) for i in range(VOCAB))


def draw(weights: Sequence[float], u: float) -> int:
    sums = list(accumulate(weights))
    return next((i for i, mass in enumerate(sums) if mass > u * sums[-1]), max(i for i, w in enumerate(weights) if w))


class ToyRows:
    """q rows; ``from_bytes`` reads what crossed the wire."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows = rows

    def to_bytes(self) -> bytes:
        return b"".join(struct.pack(f"<{len(row)}f", *row) for row in self.rows)

    @classmethod
    def from_bytes(cls, data: bytes, tokens: tuple[int, ...]) -> ToyRows:
        if len(data) != len(tokens) * VOCAB * 4:
            raise RowsProblem(f"q_rows: {len(data)} octets", unavailable=len(data) < len(tokens) * VOCAB * 4)
        rows = [struct.unpack_from(f"<{VOCAB}f", data, i * VOCAB * 4) for i in range(len(tokens))]
        if any(row[token] <= 0 for row, token in zip(rows, tokens, strict=True)):
            raise RowsProblem("q_rows: q(x) is 0", unavailable=False)
        return cls(rows)


class ToyTarget:
    card = CARD

    def __init__(self, next_: Callable[[int], Sequence[float]] = successor) -> None:
        self.next = next_

    block_tokens, longest, free_tokens = 16, 2**20, 2**20

    def admit(self, session: bytes, tokens: int, *, scope: bytes | None = None) -> bool:
        return True

    def release(self, session: bytes) -> None: ...

    def step(self, requests: Sequence[ScoreRequest]) -> list[list[Scored] | ScoreFailure | None]:
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> list[Scored]:
        scored = []
        for i, token in enumerate([request.prefix[request.length - 1], *request.tokens]):
            p = self.next(token)
            best = max(range(len(p)), key=lambda x: (p[x], -x))
            if request.rule is Rule.GREEDY:
                scored.append(Scored(best, best))
                continue
            assert request.uniforms is not None
            u = request.uniforms.extra[i]
            if i == len(request.tokens):
                scored.append(Scored(best, draw(p, u)))
                continue
            q, x = request.rows.rows[i], request.tokens[i]
            residual = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
            scored.append(Scored(best, draw(residual if sum(residual) else p, u), p[x], q[x]))
        return scored


class ToyDraft:
    """Greedy over ``next_``."""

    name = "toy"
    identity = b"d" * 32
    vocab_size = VOCAB

    def __init__(self, next_: Callable[[int], Sequence[float]] = successor, seed: int = 0) -> None:
        self.next = next_
        self.random = random.Random(seed)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._draft(request) for request in requests]

    def release(self, session: bytes) -> None: ...

    def _draft(self, request: DraftRequest) -> Draft:
        last, tokens, rows = request.prefix[request.length - 1], [], []
        for _ in range(request.m):
            q = self.next(last)
            last = q.index(max(q)) if request.rule is Rule.GREEDY else draw(q, self.random.random())
            tokens.append(last)
            rows.append(q)
        return Draft(tuple(tokens), ToyRows(rows) if request.rule is not Rule.GREEDY else None)


class Silent:
    """An observer that looks away."""

    def round(self, *_: Any) -> None: ...
    def rejected(self, *_: Any) -> None: ...
    def passed(self, *_: Any) -> None: ...
    def sessions(self, *_: Any) -> None: ...


class HeardRouter:
    """Implements ``RouterPort`` and remembers."""

    def __init__(self) -> None:
        self.statuses: list[Status] = []
        self.events: list[Event] = []
        self.known: set[bytes] | None = None

    async def status(self, status: Status) -> None:
        self.statuses.append(status)

    async def event(self, event: Event) -> None:
        if self.known is not None and event.session not in self.known:
            raise UnknownSession("session: unknown")
        self.events.append(event)


class HeardDrafter:
    def __init__(self) -> None:
        self.assignments: list[Assignment] = []

    async def assign(self, assignment: Assignment) -> None:
        self.assignments.append(assignment)


class Site:
    """One gateway with all roles behind it."""

    def __init__(self, gateway: Gateway, directory: Path) -> None:
        self.gateway = gateway
        self.directory = directory
        self.verifier: Verifier
        self.engine: Engine
        self.router: HeardRouter
        self.drafter: HeardDrafter
        self.objects: MemoryObjects
        self.log: SqliteCommitLog

    def files(self, name: str) -> certs.Certificates:
        return certs.files(self.directory, name)

    def url(self, role: str) -> str:
        return f"{self.gateway.url}/{role}/"

    async def curl(self, role: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """One request of an independent client (h2 on a plain socket) with ``role``'s certificate."""
        async with wire.Wire.connect(self.gateway.port, self.files(role)) as connection:
            return await connection.request(method, path, body, **headers)


@asynccontextmanager
async def site(
    directory: Path,
    work: Path,
    *,
    limits: GatewayLimits | None = None,
    next_: Callable[[int], Sequence[float]] = successor,
    access: Mapping[str, Any] | None = None,
    trusted: Sequence[str] = (BASES["drafter"],),
    rules: Limits | None = None,
    files: certs.Certificates | None = None,
    prefix: str = "",
) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1))
        log = stack.enter_context(SqliteCommitLog(work / "log.sqlite"))
        memory = MemoryObjects(64 * 2**20, scope_percent=50)
        objects = RoutedObjects(memory)
        engine = Engine(CARD, rules or Limits(), trusted=frozenset(trusted))
        target = ToyTarget(next_)
        caches = Caches({}, objects, authority="local", own_base=BASES["mlc"])
        router, drafter = HeardRouter(), HeardDrafter()
        batcher: Batcher[ScoreRequest, Any] = Batcher(
            "toy", target.step, thread, expected=lambda: 0, rows=lambda request: 1, observer=Silent()
        )
        verifier = Verifier(
            BASES["verifier"], engine, target, batcher, Logs(log, caches), HttpRows(caches, VOCAB, ToyRows.from_bytes),
            router, caches.tokens, Silent(), self_decode_idle=False,
        )  # fmt: skip

        def drafter_of(session: bytes) -> str | None:
            known = engine.sessions.get(session)
            return None if known is None or known.assignment is None or known.released else known.assignment.drafter

        allowed = {
            "routers": (BASES["router"],), "verifiers": (BASES["verifier"],), "frontends": (BASES["frontend"],),
            **(access or {}),
        }  # fmt: skip
        gateway = await stack.enter_async_context(
            serve_gateway(
                port=0,
                files=files or certs.files(directory, "gateway"),
                access=Access.of(**allowed),
                limits=limits,
                roles={
                    f"{prefix}/verifier/": VerifierResources(verifier, CARD, drafter_of, limits).resources,
                    f"{prefix}/drafter/": DrafterResources(drafter).resources,
                    f"{prefix}/router/": RouterResources(router).resources,
                    f"{prefix}/mlc/": MlcResources(objects, log, "local").resources,
                },
            )
        )
        verifier.start()
        stack.push_async_callback(verifier.stop)
        made = Site(gateway, directory)
        made.verifier, made.engine, made.router, made.drafter = verifier, engine, router, drafter
        made.objects, made.log = memory, log
        yield made


class Kit:
    """What test modules use, as a fixture because tests can't import each other."""

    BASES, CARD, CONTRACT, SESSION, VOCAB, WAIT_S = BASES, CARD, CONTRACT, SESSION, VOCAB, WAIT_S
    Wire, Site, ToyDraft, ToyRows = wire.Wire, Site, ToyDraft, ToyRows
    HeardRouter, HeardDrafter = HeardRouter, HeardDrafter
    successor = staticmethod(successor)
    tls = staticmethod(wire.tls)
    stub = staticmethod(wire.stub)
    path = format_session(SESSION)

    def __init__(self, directory: Path, work: Path) -> None:
        self.directory = directory
        self.work = work

    def run(self, test: Callable[[Site], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def with_site() -> None:
            async with asyncio.timeout(3 * WAIT_S), site(self.directory, self.work, **options) as made:
                await test(made)

        asyncio.run(with_site())

    def site(self, **options: Any) -> Any:
        return site(self.directory, self.work, **options)

    @staticmethod
    def contract(**changes: Any) -> Contract:
        return structs.replace(CONTRACT, **changes)

    @staticmethod
    def opening(contract: Contract = CONTRACT, session: bytes = SESSION, **changes: Any) -> SessionOpen:
        base = SessionOpen(
            session=session, epoch=1, contract=contract, prompt=(1, 3, 3, 4),
            commit_log=f"mlc://local/{session.hex()}/log/{session.hex()}",
        )  # fmt: skip
        return structs.replace(base, **changes)

    @staticmethod
    def assignment(state: Mapping[str, Any], contract: Contract = CONTRACT, **changes: Any) -> Assignment:
        base = Assignment(
            session=state["session"], epoch=state["epoch"], contract=contract, verifier=BASES["verifier"],
            drafter=BASES["drafter"], prompt=(1, 3, 3, 4), round=state["round"], committed=state["committed"],
            digest=state["digest"], m_init=8,
        )  # fmt: skip
        return structs.replace(base, **changes)

    @staticmethod
    def status(**changes: Any) -> Status:
        return structs.replace(Status(instance="drafter-1", role=1, load=0, queue=0, ttl_ms=1000), **changes)

    @staticmethod
    def proposal(state: Mapping[str, Any], tokens: Sequence[int], **changes: Any) -> dict[str, Any]:
        return {
            "session": state["session"], "epoch": state["epoch"], "round": state["round"] + 1,
            "drafter": BASES["drafter"], "base": state["committed"], "base_digest": state["digest"],
            "tokens": list(tokens), "status": {"instance": "d", "role": 1, "load": 0, "queue": 0, "ttl_ms": 1000},
            **changes,
        }  # fmt: skip

    async def assigned(self, made: Site, contract: Contract = CONTRACT, session: bytes = SESSION) -> dict[str, Any]:
        """A session that is open with the drafter named to the verifier; its state."""
        opened = await made.curl("router", "POST", "/verifier/sessions", self.opening(contract, session))
        assert opened.status == 201, opened.body
        path = f"/verifier/sessions/{format_session(session)}/drafter"
        told = await made.curl("router", "PUT", path, self.assignment(opened.cbor, contract))
        assert told.status == 200, told.body
        state: dict[str, Any] = told.cbor
        return state

    @staticmethod
    def digest(contract: Contract, prompt: Sequence[int], output: Sequence[int]) -> bytes:
        return digests.extend(digests.prefix_digest(digests.contract_digest(contract), prompt), tuple(output))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    certs.init(directory)
    return directory


@pytest.fixture
def kit(certificates: Path, tmp_path: Path) -> Kit:
    return Kit(certificates, tmp_path)


@pytest.fixture
def strangers(certificates: Path, tmp_path: Path) -> Callable[..., certs.Certificates]:
    """Certificates that something is wrong with, by name."""
    now = dt.datetime.now(dt.UTC)

    def make(name: str, *, rogue: bool = False, **changes: Any) -> certs.Certificates:
        ca, key = certs.make_ca(now) if rogue else certs.load_ca(certificates)
        settings: dict[str, Any] = {"uris": (BASES["router"],), "now": now, **changes}
        cert, own = certs.issue(ca, key, name, **settings)
        trusted = x509.load_pem_x509_certificate((certificates / "ca.pem").read_bytes())
        return certs.save(tmp_path / "strangers" / name, name, cert, own, trusted)

    return make


SERVER_ONLY = (ExtendedKeyUsageOID.SERVER_AUTH,)
