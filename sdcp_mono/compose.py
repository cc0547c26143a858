"""THE wiring: which role is an object, which a client, and what each is given. Nothing else decides that.

All in one process: one event loop, one compute thread that owns target and draft models (on a CPU they share the cores
anyway), one thread that owns SQLite.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import uvicorn
from msgspec import structs
from prometheus_client import CollectorRegistry

from sdcp_mono import certs
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.row_source import LocalRows
from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.core.engine import Engine, Limits
from sdcp_mono.core.ports import (
    DrafterPort,
    DraftModel,
    DraftRequest,
    ModelCard,
    RouterPort,
    ScoreRequest,
    TargetModel,
    VerifierPort,
)
from sdcp_mono.core.routing import Candidate, Router, prefer_idle
from sdcp_mono.core.speculation import CostTable
from sdcp_mono.frontend import terminal
from sdcp_mono.frontend.app import FrontEnd
from sdcp_mono.frontend.settings import FrontendSettings
from sdcp_mono.http_gateway.client import Drafters, Routers, Verifiers
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.mlc import MlcResources
from sdcp_mono.http_gateway.mlc_client import Caches, HttpRows, Logs, MlcClient
from sdcp_mono.http_gateway.peer import Peer
from sdcp_mono.http_gateway.roles import DrafterResources, RouterResources
from sdcp_mono.http_gateway.server import Gateway, serve_gateway
from sdcp_mono.http_gateway.verifier import VerifierResources
from sdcp_mono.models.identity import ModelFolder
from sdcp_mono.models.source import resolve
from sdcp_mono.models.tokenizer import Tokenizer
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.drafter import Drafter, Source
from sdcp_mono.roles.router import RouterRole, Terms
from sdcp_mono.roles.routers import EveryRouter
from sdcp_mono.roles.verifier import Verifier
from sdcp_mono.settings import Settings
from sdcp_mono.telemetry.http import HttpMetrics
from sdcp_mono.telemetry.metrics import RoleMetrics

Progress = Callable[[str, int, int], None]

AUTHORITY: Final = "local"
OBJECT_BYTES: Final = 256 * 2**20  # draft rows of 32 sessions, M = 8, V = 49,152 are 50 MB; vocabularies grow
SWITCH_SECONDS: Final = 0.0005  # a busy Python thread otherwise adds 5 ms to every turn of the event loop


@dataclass(frozen=True, slots=True)
class Loaded:
    """Models in memory, owned by ``thread``; what a node is made of. ``instant`` drafters run on the event loop."""

    settings: Settings
    folder: ModelFolder
    card: ModelCard
    tokenizer: Tokenizer
    target: TargetModel
    drafts: tuple[tuple[DraftModel, bool], ...]
    thread: ThreadPoolExecutor
    seconds: float
    costs: Mapping[str, CostTable] = field(default_factory=dict)  # of a pass, by model, measured once loaded


def load(settings: Settings, progress: Progress) -> Loaded:
    """Fetch, convert and load the models; raises ``ModelError`` or ``ValueError`` with what to do next."""
    started = time.perf_counter()
    sys.setswitchinterval(SWITCH_SECONDS)
    folder = resolve(settings.model, settings.data_dir, progress, dtype=settings.dtype)
    thread = ThreadPoolExecutor(1, thread_name_prefix="models")
    tokenizer = Tokenizer(folder.path)
    target, drafts = thread.submit(_load_models, settings, folder, tokenizer, progress).result()
    costs = thread.submit(_measure, target, drafts).result()
    return Loaded(
        settings, folder, target.card, tokenizer, target, drafts, thread, time.perf_counter() - started, costs
    )


def _measure(target: TargetModel, drafts: tuple[tuple[DraftModel, bool], ...]) -> dict[str, CostTable]:
    from sdcp_mono.runners.calibration import drafting_costs, pass_costs

    return {
        "target": pass_costs(target),
        **{model.name: drafting_costs(model, target) for model, instant in drafts if not instant},
    }


def _load_models(
    settings: Settings, folder: ModelFolder, tokenizer: Tokenizer, progress: Progress
) -> tuple[TargetModel, tuple[tuple[DraftModel, bool], ...]]:
    """On the thread that owns them from now on. Imports torch, which a router never needs."""
    from sdcp_mono.runners.blocks import BLOCK_SIZE
    from sdcp_mono.runners.loading import load_decoder
    from sdcp_mono.runners.paged import PagedModel
    from sdcp_mono.runners.target import TargetRunner

    def show(done: int, total: int) -> None:
        progress("Loading the target", done, total)

    decoder = load_decoder(folder.path, settings.dtype, settings.engine, settings.threads, show)
    context = min(settings.max_context or folder.card.context, folder.card.context, decoder.context)
    card = structs.replace(folder.card, context=context)
    identity = card.target + settings.dtype.encode()  # KV of other weights or another dtype is other KV
    blocks = settings.kv_memory_mb * 2**20 // (BLOCK_SIZE * decoder.kv_bytes_per_token)
    paged = PagedModel(decoder, identity, blocks=blocks, token_budget=settings.token_budget)
    return TargetRunner(card, paged), tuple(_load_drafts(settings, folder, card, paged, tokenizer, progress))


def _load_drafts(
    settings: Settings, folder: ModelFolder, card: ModelCard, target: Any, tokenizer: Tokenizer, progress: Progress
) -> Iterator[tuple[DraftModel, bool]]:
    """The drafters in the order in which they are asked, with whether they are instant."""
    from sdcp_mono.drafters import parse
    from sdcp_mono.drafters.detached import check_vocabulary, load_detached
    from sdcp_mono.drafters.ngram import MIN_MATCH, MIN_MATCH_BESIDE_MODEL, NgramDraft
    from sdcp_mono.drafters.quantized import can_share, load_beside, load_quantized
    from sdcp_mono.kernels import native

    # Without the compiled kernels an int4 pass isn't faster than the target's, so n-gram alone is the best default.
    specs = settings.draft or (("ngram", "quantized") if native.available() else ("ngram",))
    kv_bytes = settings.kv_memory_mb * 2**20
    for spec, draft in [(spec, parse(spec)) for spec in specs]:  # a wrong one is told before any is loaded

        def show(done: int, total: int, spec: str = spec) -> None:
            progress(f"Loading drafter {spec}", done, total)

        if draft.kind == "ngram":
            yield NgramDraft(card.vocab_size, min_match=MIN_MATCH if len(specs) == 1 else MIN_MATCH_BESIDE_MODEL), True
        elif draft.kind == "quantized" and settings.share_kv and can_share(target, settings.dtype):
            yield load_beside(target, folder.path, card.target, threads=settings.threads, progress=show), False
        elif draft.kind == "quantized":
            yield load_quantized(
                folder.path, card.target, kv_bytes=kv_bytes, token_budget=settings.token_budget,
                engine=settings.engine, threads=settings.threads, progress=show,
            ), False  # fmt: skip
        elif draft.folder is not None:
            other = resolve(str(draft.folder), settings.data_dir, progress, dtype=settings.dtype)
            check_vocabulary(other.card, Tokenizer(other.path), card, tokenizer)
            yield load_detached(
                other.path, other.card, weights=settings.dtype, kv_bytes=kv_bytes, token_budget=settings.token_budget,
                engine=settings.engine, threads=settings.threads, progress=show,
            ), False  # fmt: skip


class Node:
    """Router, verifier, drafter and cache as objects of one process; ``gateway`` also serves them to others."""

    def __init__(self, loaded: Loaded, registry: CollectorRegistry, *, gateway: bool = False) -> None:
        settings, card = loaded.settings, loaded.card
        self.loaded = loaded
        self._settings = settings
        self._gateway = gateway
        self._stack = AsyncExitStack()
        self._bases = bases = certs.base_uris(settings.gateway_port)
        self._kit = certs.base_uris(settings.kit_port) if _plays(settings, gateway) else {}
        observer = RoleMetrics(registry, ("target", *(model.name for model, _ in loaded.drafts)), settings.m_max)
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        self._sqlite = SqliteCommitLog(settings.data_dir / "commit-log.sqlite")
        self._objects = MemoryObjects(OBJECT_BYTES)
        self._caches = caches = Caches({}, self._objects, authority=AUTHORITY, own_base=bases["mlc"] if gateway else "")
        self._log = Logs(self._sqlite, caches)
        rows = HttpRows(
            caches, card.vocab_size, partial(_rows_from_bytes, card.vocab_size),
            local=LocalRows(self._objects, AUTHORITY, card.vocab_size),
        )  # fmt: skip
        trusted = frozenset({bases["drafter"], *settings.trusted_drafters})
        self._engine = engine = Engine(card, Limits(sessions=2 * settings.max_sessions), trusted)
        terms = Terms(
            m_max=settings.m_max, m_init=min(settings.m_init, settings.m_max), low_ratio=settings.low_ratio,
            active=settings.max_sessions, queue=settings.max_queue, wait_seconds=settings.queue_seconds,
            drafted=bool(loaded.drafts or settings.drafters),
        )  # fmt: skip
        # Peers are added when the gateway opens. Each role calls them with its own certificate, so each has its own.
        self._verifiers: dict[str, VerifierPort] = {}  # of the router
        self._drafters: dict[str, DrafterPort] = {}
        self._drafted_for: dict[str, VerifierPort] = {}  # of the drafter
        self._verifier_routers: dict[str, RouterPort] = {}
        self._drafter_routers: dict[str, RouterPort] = {}
        self.serving = RouterRole(
            Router(trusted=trusted, prefer=partial(_kit_first, frozenset(self._kit.values()))), card,
            self._verifiers, self._drafters, self._log, self._objects, terms, caches.reference,
        )  # fmt: skip
        self._told = [EveryRouter(self.serving, others) for others in (self._verifier_routers, self._drafter_routers)]

        def running() -> int:
            return sum(s.ended is None for s in engine.sessions.values())

        score = Batcher[ScoreRequest, Any](
            "target", loaded.target.step, loaded.thread, expected=running, observer=observer,
            rows=lambda request: len(request.tokens) + 1, cost=loaded.costs.get("target"),
        )  # fmt: skip
        self._verifier = self._verifiers[bases["verifier"]] = self._drafted_for[bases["verifier"]] = Verifier(
            bases["verifier"], engine, loaded.target, score, self._log, rows, self._told[0], caches.tokens, observer,
        )  # fmt: skip
        self._drafter: Drafter | None = None
        if loaded.drafts:
            sources = []
            for model, instant in loaded.drafts:
                batcher = None if instant else Batcher[DraftRequest, Any](
                    model.name, model.draft, loaded.thread, expected=running, observer=observer,
                    rows=lambda request: request.m,
                )  # fmt: skip
                sources.append(Source(model, batcher, loaded.costs.get(model.name, CostTable())))
            self._drafter = self._drafters[bases["drafter"]] = Drafter(
                bases["drafter"], sources, self._drafted_for, rows, self._told[1], caches.tokens,
                m_fixed=settings.m_fixed, verify_seconds=lambda rows: score.cost.seconds(rows),
            )  # fmt: skip

    async def __aenter__(self) -> Self:
        # Stopped in reverse order: whoever calls goes before whoever is called.
        self._stack.callback(self._sqlite.close)
        if self._gateway:
            await self._stack.enter_async_context(self._served())
        for routers in self._told:
            self._stack.push_async_callback(routers.stop)
        self._verifier.start()
        self._stack.push_async_callback(self._verifier.stop)
        if self._drafter is not None:
            self._drafter.start()
            self._stack.push_async_callback(self._drafter.stop)
        self.serving.start()
        self._stack.push_async_callback(self.serving.stop)
        await self.serving.ready(drafters=self._drafter is not None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _served(self) -> AbstractAsyncContextManager[Gateway]:
        """The gateway in front of the roles, with development certificates that are made on first start."""
        settings, bases, kit = self._settings, self._bases, self._kit
        directory = settings.certs_dir or settings.data_dir / "certs"
        if settings.certs_dir is None:
            certs.init(directory, roles=bases)
        if kit:
            certs.init(directory / certs.KIT, roles=kit, ca=directory)

        def listed(own: tuple[str, ...], *roles: str) -> tuple[str, ...]:
            return (*own, *(kit[role] for role in roles if kit))

        verifiers = listed(settings.verifiers, "verifier", "verifier-b")
        self._connect(directory, verifiers, listed(settings.drafters, "drafter", "drafter-b"))
        resources = {
            "/verifier/": VerifierResources(
                self._verifier, self._engine.card, self._engine.drafter_of, mlc=bases["mlc"]
            ).resources,
            "/router/": RouterResources(self.serving, self.serving.verifier_of).resources,
            "/mlc/": MlcResources(self._objects, self._sqlite, AUTHORITY).resources,
        }
        if self._drafter is not None:
            resources["/drafter/"] = DrafterResources(self._drafter).resources
        access = Access.of(
            routers=(bases["router"], *listed(settings.routers, "router")), verifiers=(bases["verifier"], *verifiers),
            frontends=(bases["frontend"],),
        )  # fmt: skip
        return serve_gateway(
            host=settings.gateway_host, port=settings.gateway_port, files=certs.files(directory, certs.GATEWAY),
            access=access, roles=resources,
        )  # fmt: skip

    def _connect(self, directory: Path, verifiers: tuple[str, ...], drafters: tuple[str, ...]) -> None:
        """Clients of the peers that may be called; a role of our own is never called over the wire."""
        router, verifier, drafter = (certs.files(directory, name) for name in ("router", "verifier", "drafter"))
        routers = dict.fromkeys(self._settings.routers)
        remote = (
            Verifiers(dict.fromkeys(verifiers), router),
            Drafters(dict.fromkeys(drafters), router),
            Verifiers(dict.fromkeys(verifiers), drafter),
            Routers(routers, verifier),
            Routers(routers, drafter),
        )
        try:
            caches = [Peer(base, verifier) for base in self._settings.caches]  # the verifier follows references
            self._verifiers.update({**remote[0], **self._verifiers})
            self._drafters.update({**remote[1], **self._drafters})
            self._drafted_for.update({**remote[2], **self._drafted_for})
            self._verifier_routers.update(remote[3])
            self._drafter_routers.update(remote[4])
        except FileNotFoundError as error:
            raise ValueError(f"certs_dir: {error.filename} is missing; it tells peers who we are") from None
        for clients in remote:
            self._stack.push_async_callback(clients.close)
        for cache in caches:
            self._stack.push_async_callback(cache.close)
            self._caches.trust(MlcClient(cache))


def _plays(settings: Settings, gateway: bool) -> bool:
    """Whether the conformance kit may play our peers: with our own development CA only, whose keys are on this disk."""
    return gateway and settings.certs_dir is None and settings.kit_port not in (0, settings.gateway_port)


def _kit_first(kit: frozenset[str], candidate: Candidate) -> tuple[int | str, ...]:
    """The kit's roles report only while it tests, and then they are the ones to be asked."""
    return (candidate.base not in kit, *prefer_idle(candidate))


def _rows_from_bytes(vocab_size: int, data: bytes, tokens: tuple[int, ...]) -> Any:
    from sdcp_mono.runners.rows import QRows

    rows = QRows.from_bytes(data, len(tokens), vocab_size)
    rows.check(tokens, vocab_size)
    return rows


async def generate(loaded: Loaded, wish: terminal.Wish, view: terminal.View) -> terminal.Result:
    """``sdcp-mono generate``."""
    async with Node(loaded, CollectorRegistry()) as node:
        return await terminal.generate(node.serving, loaded.tokenizer, wish, view, loaded.seconds)


def serve(settings: Settings, progress: Progress, ready: Callable[[str], None]) -> None:
    """``sdcp-mono serve``: answers from the start, and is ready when the model is loaded. Returns when told to stop."""
    asyncio.run(_serve(settings, progress, ready))


class _Server(uvicorn.Server):
    """Ends with exit code 0 when it is told to stop; uvicorn itself would raise the signal once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Finish what is running; asked a second time, don't."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def _serve(settings: Settings, progress: Progress, ready: Callable[[str], None]) -> None:
    registry = CollectorRegistry()
    app = FrontEnd(FrontendSettings(), HttpMetrics(registry))
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_config=None, log_level="warning", access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=30,  # a stream that is still running then is cut
    )  # fmt: skip
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    serving = asyncio.create_task(server.serve())
    loading = asyncio.create_task(asyncio.to_thread(load, settings, progress))
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():  # the port is taken, or we were told to stop while loading
        await serving
        await asyncio.gather(loading, return_exceptions=True)
        return
    try:
        loaded = loading.result()
        async with Node(loaded, registry, gateway=settings.gateway) as node:
            app.attach(node.serving, loaded.tokenizer)
            port = server.servers[0].sockets[0].getsockname()[1]
            ready(f"http://{settings.host}:{port}")
            await serving
    finally:
        server.should_exit = True
        await serving
