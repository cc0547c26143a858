"""All roles in one process: one event loop, one compute thread, one thread that owns SQLite.

Target and draft models share the compute thread: on a CPU they share the cores anyway.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry

from sdcp_mono import certs
from sdcp_mono.cache.row_source import LocalRows
from sdcp_mono.compose.models import Loaded
from sdcp_mono.compose.storage import AUTHORITY, Storage, prefill_seconds, rows_from_bytes
from sdcp_mono.compose.tracing import tracer
from sdcp_mono.core.engine import Engine, Limits
from sdcp_mono.core.ports import DrafterPort, DraftRequest, RouterPort, ScoreRequest, VerifierPort
from sdcp_mono.core.routing import Candidate, Router, prefer_idle
from sdcp_mono.core.speculation import CostTable
from sdcp_mono.http_gateway.client import Drafters, Routers, Verifiers
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.mlc import MlcResources
from sdcp_mono.http_gateway.mlc_client import Caches, HttpRows, Logs, MlcClient
from sdcp_mono.http_gateway.peer import Peer
from sdcp_mono.http_gateway.roles import DrafterResources, RouterResources
from sdcp_mono.http_gateway.server import Gateway, serve_gateway
from sdcp_mono.http_gateway.verifier import VerifierResources
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.drafter import Drafter, Source
from sdcp_mono.roles.router import RouterRole
from sdcp_mono.roles.routers import EveryRouter
from sdcp_mono.roles.terms import Terms
from sdcp_mono.roles.verifier import Verifier
from sdcp_mono.settings import Settings
from sdcp_mono.telemetry.metrics import RoleMetrics
from sdcp_mono.telemetry.tracing import Tracing


class Node:
    """Router, verifier, drafter and cache as objects of one process; ``gateway`` also serves them to others."""

    def __init__(
        self, loaded: Loaded, registry: CollectorRegistry, *, gateway: bool = False, tracing: Tracing | None = None
    ) -> None:
        settings, card = loaded.settings, loaded.card
        self.loaded = loaded
        self._settings = settings
        self._gateway = gateway
        self._stack = AsyncExitStack()
        self._bases = bases = certs.base_uris(settings.gateway_port)
        self._kit = certs.base_uris(settings.kit_port) if _plays(settings, gateway) else {}
        observer = RoleMetrics(registry, ("target", *(model.name for model, _ in loaded.drafts)), settings.m_max)
        self.storage = storage = Storage(settings, loaded.kv)
        self._caches = caches = Caches(
            {}, storage.objects, authority=AUTHORITY, own_base=bases["mlc"] if gateway else ""
        )
        self._log = Logs(storage.log, caches)
        rows = HttpRows(
            caches, card.vocab_size, partial(rows_from_bytes, card.vocab_size),
            local=LocalRows(storage.objects, AUTHORITY, card.vocab_size),
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
            self._verifiers, self._drafters, self._log, storage.objects, terms, caches.reference,
            tracer=tracer(tracing, "router"),
        )  # fmt: skip
        self._told = [EveryRouter(self.serving, others) for others in (self._verifier_routers, self._drafter_routers)]

        def running() -> int:
            return sum(s.ended is None for s in engine.sessions.values())

        score = self._score = Batcher[ScoreRequest, Any](
            "target", loaded.target.step, loaded.thread, expected=running, observer=observer,
            rows=lambda request: len(request.tokens) + 1, cost=loaded.costs.get("target"),
        )  # fmt: skip
        restore = {name: storage.restorer(name, score.call, partial(self._compute_seconds, name)) for name in loaded.kv}
        self._verifier = self._verifiers[bases["verifier"]] = self._drafted_for[bases["verifier"]] = Verifier(
            bases["verifier"], engine, loaded.target, score, self._log, rows, self._told[0], caches.tokens, observer,
            restore=restore.get("target"), tracer=tracer(tracing, "verifier"),
        )  # fmt: skip
        self._drafter: Drafter | None = None
        if loaded.drafts:
            sources = []
            for model, instant in loaded.drafts:
                batcher = None if instant else Batcher[DraftRequest, Any](
                    model.name, model.draft, loaded.thread, expected=running, observer=observer,
                    rows=lambda request: request.m,
                )  # fmt: skip
                sources.append(
                    Source(
                        model, batcher, loaded.costs.get(model.name, CostTable()),
                        hold=self._verifier.residency.hold if model.name in loaded.borrows else None,
                        restore=restore.get(model.name),
                    )
                )  # fmt: skip
            self._drafter = self._drafters[bases["drafter"]] = Drafter(
                bases["drafter"], sources, self._drafted_for, rows, self._told[1], caches.tokens,
                m_fixed=settings.m_fixed, verify_seconds=lambda rows: score.cost.seconds(rows),
                tracer=tracer(tracing, "drafter"),
            )  # fmt: skip

    async def __aenter__(self) -> Self:
        # Stopped in reverse order: whoever calls goes before whoever is called.
        await self.storage.start(self.loaded.thread)
        self._stack.push_async_callback(self.storage.stack.aclose)
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

    def _compute_seconds(self, model: str, tokens: int) -> float:
        """What computing the KV of ``tokens`` tokens would take."""
        cost = self._score.cost if model == "target" else self.loaded.costs.get(model, CostTable())
        return prefill_seconds(cost, self._settings.token_budget, tokens)

    async def cache_report(self, check: bool = False) -> dict[str, Any]:
        """Plain data for ``cache stat``."""
        report = await self.storage.report(check)
        report["kv"]["preempted_sessions"] = self._verifier.residency.preempted
        return report

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
            "/mlc/": MlcResources(self.storage.objects, self.storage.store, AUTHORITY).resources,
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
