"""One role a process: the same objects as in one process, with gRPC clients where another role would be an object."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import uvicorn
from msgspec import structs
from prometheus_client import CollectorRegistry

from sdcp_mono.cache.kept_logs import KeptLogs
from sdcp_mono.compose.links import Links
from sdcp_mono.compose.loading import load_unless_told
from sdcp_mono.compose.logs import open_log
from sdcp_mono.compose.models import LoadedDrafters, Progress, load_drafters, load_target
from sdcp_mono.compose.serving import Server
from sdcp_mono.compose.storage import (
    AUTHORITY,
    Tiered,
    open_objects,
    open_tiers,
    prefill_seconds,
    report_stores,
    rows_from_bytes,
)
from sdcp_mono.compose.tracing import open_tracing, tracer
from sdcp_mono.core import cbor
from sdcp_mono.core.engine import Engine, Limits
from sdcp_mono.core.ports import (
    DraftRequest,
    ObjectStore,
    ScoreRequest,
)
from sdcp_mono.core.problems import Unavailable
from sdcp_mono.core.routing import Router
from sdcp_mono.frontend.app import FrontEnd
from sdcp_mono.frontend.settings import FrontendSettings
from sdcp_mono.grpc.cache_client import GrpcRows
from sdcp_mono.grpc.cache_service import CommitLogService, ObjectStoreService
from sdcp_mono.grpc.services import DrafterService, RouterService, VerifierService
from sdcp_mono.http_gateway.mlc import MlcResources
from sdcp_mono.models.source import resolve
from sdcp_mono.models.tokenizer import Tokenizer
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.drafter import Drafter, Source
from sdcp_mono.roles.router import RouterRole
from sdcp_mono.roles.terms import Terms
from sdcp_mono.roles.verifier import TokenFetcher, Verifier
from sdcp_mono.settings import (
    CacheSettings,
    DrafterSettings,
    LinkSettings,
    RouterSettings,
    VerifierSettings,
)
from sdcp_mono.telemetry.http import HttpMetrics
from sdcp_mono.telemetry.metrics import RoleMetrics
from sdcp_mono.telemetry.tiers import TierMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")
Ready = Callable[[str], None]

GRACE_SECONDS: Final = 30  # for streams that are being read when a router stops


class Everyone:
    """Every instance that may report: it has a certificate of its role, so it may also be trusted (section 9)."""

    def __contains__(self, base: object) -> bool:
        return True


def token_fetcher(objects: ObjectStore) -> TokenFetcher:
    """The token ids behind a reference to the cache (AMB-037)."""

    async def fetch(uri: str, scope: bytes | None) -> tuple[int, ...]:
        value = await objects.get(uri, scope)
        if value is None:
            raise Unavailable("cache-ref: the object is absent", retry_after_ms=1000)
        data = value if isinstance(value, bytes) else value.to_bytes()
        return cbor.decode_value(data, tuple[int, ...])

    return fetch


# ---- the roles ---------------------------------------------------------------------------------------


async def run_cache(settings: CacheSettings, progress: Progress, ready: Ready) -> None:
    """``sdcp-mono cache serve``."""
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack, _status(settings, registry) as status:
        links = Links(settings, "mlc", stack, registry)
        store = await asyncio.to_thread(open_log, settings.log, settings.data_dir, stack)
        log = KeptLogs(store, settings.kept_logs)
        await log.adopt()  # those of live sessions are among the newest, which are kept
        tiers = await asyncio.to_thread(open_tiers, settings)
        if tiers is not None:
            tiers.start()
            stack.push_async_callback(tiers.stop)
        objects = await asyncio.to_thread(open_objects, settings, tiers)
        TierMetrics(registry, objects.stats, dict, objects)
        await links.serve((ObjectStoreService(objects), CommitLogService(log)))
        if settings.http_port:
            await links.serve_http(MlcResources(objects, store, AUTHORITY).resources, settings)

        async def report(check: bool) -> dict[str, Any]:
            told = {"tiers": [structs.asdict(tier) for tier in objects.stats()]}
            return told | await report_stores(objects, log, check)

        await status.until_told(lambda: {"role": "cache"}, lambda: ready(settings.base), report)


async def run_verifier(settings: VerifierSettings, progress: Progress, ready: Ready) -> None:
    """``sdcp-mono verifier``."""
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack, _status(settings, registry) as status:
        tracing = await open_tracing(settings, "verifier", registry, stack)
        links = Links(settings, "verifier", stack, registry)
        loaded = await status.load(partial(load_target, settings, progress))
        stack.callback(loaded.close)
        objects, card = links.objects(), loaded.card
        observer = RoleMetrics(registry, ("target",), 64)
        engine = Engine(card, Limits(sessions=2 * settings.max_sessions), Everyone())

        def running() -> int:
            return sum(s.ended is None for s in engine.sessions.values())

        score = Batcher[ScoreRequest, Any](
            "target", loaded.target.step, loaded.thread, expected=running, observer=observer,
            rows=lambda request: len(request.tokens) + 1, cost=loaded.costs.get("target"),
        )  # fmt: skip
        tiered = Tiered(settings, loaded.kv, remote=objects if settings.kv_shared else None)
        TierMetrics(registry, tiered.stats, tiered.counts)
        await tiered.open(loaded.thread, stack)
        verifier = Verifier(
            settings.base, engine, loaded.target, score, links.log(),
            GrpcRows(objects, AUTHORITY, card.vocab_size, partial(rows_from_bytes, card.vocab_size)),
            links.routers(), token_fetcher(objects), observer,
            restore=tiered.restorer(
                "target", score.call, lambda tokens: prefill_seconds(score.cost, settings.token_budget, tokens)
            ),
            fault=loaded.fault, tracer=tracer(tracing, "verifier"),
        )  # fmt: skip
        stack.push_async_callback(verifier.stop)
        server = await links.serve((VerifierService(verifier, card, engine.drafter_of),))
        verifier.start()  # it reports, so it must answer

        def facts() -> dict[str, Any] | None:
            counts = {"sessions": running(), "preempted": verifier.residency.preempted}
            return None if verifier.lost else {"role": "verifier", **counts}

        await status.until_told(facts, lambda: ready(settings.base), tiered.report)
        await server.ready(False)
        await verifier.drain(settings.drain_seconds)


async def run_drafter(settings: DrafterSettings, progress: Progress, ready: Ready) -> None:
    """``sdcp-mono drafter``."""
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack, _status(settings, registry) as status:
        tracing = await open_tracing(settings, "drafter", registry, stack)
        links = Links(settings, "drafter", stack, registry)
        loaded: LoadedDrafters = await status.load(partial(load_drafters, settings, progress))
        stack.callback(loaded.thread.shutdown)
        if not loaded.drafts:
            raise ValueError("draft: a drafter needs at least one; leave it out for the best that ships")
        objects, card = links.objects(), loaded.card
        observer = RoleMetrics(registry, tuple(model.name for model, _ in loaded.drafts), 64)
        tiered = Tiered(settings, loaded.kv, remote=objects if settings.kv_shared else None)
        TierMetrics(registry, tiered.stats, tiered.counts)
        await tiered.open(loaded.thread, stack)
        sources: list[Source] = []
        for model, instant in loaded.drafts:
            if instant:
                sources.append(Source(model, None))
                continue
            batcher = Batcher[DraftRequest, Any](
                model.name, model.draft, loaded.thread, expected=lambda: drafter.sessions, observer=observer,
                rows=lambda request: request.m,
            )  # fmt: skip
            restore = tiered.restorer(model.name, batcher.call, partial(_seconds, batcher, settings.token_budget))
            sources.append(Source(model, batcher, restore=restore))
        drafter = Drafter(
            settings.base, sources, links.verifiers(),
            GrpcRows(objects, AUTHORITY, card.vocab_size, partial(rows_from_bytes, card.vocab_size)),
            links.routers(), token_fetcher(objects), m_fixed=settings.m_fixed, tracer=tracer(tracing, "drafter"),
        )  # fmt: skip
        stack.push_async_callback(drafter.stop)
        server = await links.serve((DrafterService(drafter),))
        drafter.start()
        await status.until_told(
            lambda: {"role": "drafter", "sessions": drafter.sessions}, lambda: ready(settings.base), tiered.report
        )
        await server.ready(False)
        await drafter.drain(settings.drain_seconds)


def _seconds(batcher: Batcher[DraftRequest, Any], budget: int, tokens: int) -> float:
    return prefill_seconds(batcher.cost, budget, tokens)


async def run_router(settings: RouterSettings, progress: Progress, ready: Ready) -> None:
    """``sdcp-mono router``: no model is loaded, only a tokenizer."""
    registry = CollectorRegistry()
    app = FrontEnd(FrontendSettings(), HttpMetrics(registry))
    async with AsyncExitStack() as stack:
        server, serving = await stack.enter_async_context(_http(app, settings.host, settings.port))
        tracing = await open_tracing(settings, "router", registry, stack)
        links = Links(settings, "router", stack, registry)
        find = partial(resolve, settings.model, settings.data_dir, progress, dtype=settings.dtype)
        folder = await load_unless_told(find, serving)
        terms = Terms(
            m_max=settings.m_max, m_init=min(settings.m_init, settings.m_max), low_ratio=settings.low_ratio,
            active=settings.max_sessions, queue=settings.max_queue, wait_seconds=settings.queue_seconds,
            drafted=bool(settings.drafters),
        )  # fmt: skip
        role = RouterRole(
            Router(trusted=Everyone()), folder.card, links.verifiers(), links.drafters(), links.log(),
            links.objects(), terms, tracer=tracer(tracing, "router"),
        )  # fmt: skip
        role.start()
        stack.push_async_callback(role.stop)
        await links.serve((RouterService(role, role.verifier_of),))
        arrived = asyncio.create_task(role.ready(drafters=False))
        await asyncio.wait((arrived, serving), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            app.attach(role, Tokenizer(folder.path))
            ready(f"http://{settings.host}:{server.servers[0].sockets[0].getsockname()[1]}")
        await serving
        arrived.cancel()
        await asyncio.gather(arrived, return_exceptions=True)


# ---- HTTP beside a role ------------------------------------------------------------------------------


class Status:
    """The status server of a role; ``until_told`` returns when a signal says so."""

    def __init__(self, app: Any, serving: asyncio.Task[None]) -> None:
        self._app = app
        self._serving = serving

    async def load(self, load: Callable[[], T]) -> T:
        """What ``load`` answers; told to stop meanwhile, the process ends."""
        return await load_unless_told(load, self._serving)

    async def until_told(
        self,
        facts: Callable[[], dict[str, Any] | None],
        ready: Callable[[], None],
        cache: Callable[[bool], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        """Be ready until told to stop, then not ready."""
        self._app.attach(facts, cache)
        ready()
        await asyncio.wait((self._serving,))
        self._app.detach()


@asynccontextmanager
async def _status(settings: LinkSettings, registry: CollectorRegistry) -> AsyncIterator[Status]:
    from sdcp_mono.telemetry.status import StatusApp

    app = StatusApp(registry)
    async with _http(app, settings.status_host, settings.status_port) as (_, serving):
        yield Status(app, serving)


@asynccontextmanager
async def _http(app: Any, host: str, port: int) -> AsyncIterator[tuple[Server, asyncio.Task[None]]]:
    """An HTTP server that ends when the process is told to stop, or the block is left."""
    config = uvicorn.Config(
        app, host=host, port=port, log_config=None, log_level="warning", access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )  # fmt: skip
    server = Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    serving = asyncio.create_task(server.serve())
    try:
        yield server, serving
    finally:
        server.should_exit = True
        await serving
