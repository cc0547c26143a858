"""``/health`` and ``/metrics`` of a role that serves no HTTP otherwise: for probes, Prometheus and people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Facts = Callable[[], dict[str, Any] | None]
Report = Callable[[bool], Awaitable[dict[str, Any]]]


class StatusApp(Starlette):
    """Not ready until ``attach``; alive as long as the event loop answers, unless the role itself says it is not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._facts: Facts | None = None
        self._cache: Report | None = None
        super().__init__(
            routes=[
                Route("/health", self._health),
                Route("/health/live", self._live),
                Route("/metrics", self._metrics),
                Route("/cache", self._show_cache),
            ]
        )

    def attach(self, facts: Facts, cache: Report | None = None) -> None:
        """Ready: ``facts`` go into ``/health``, None where only a restart helps; ``cache stat`` asks ``cache``."""
        self._facts, self._cache = facts, cache

    def detach(self) -> None:
        """Not ready any more."""
        self._facts = None

    async def _health(self, _: Request) -> Response:
        facts = None if self._facts is None else self._facts()
        if facts is None:
            return JSONResponse({"status": "not ready", "ready": False}, 503)
        return JSONResponse({**facts, "status": "ok", "ready": True})

    async def _live(self, _: Request) -> Response:
        if self._facts is not None and self._facts() is None:
            return JSONResponse({"status": "to be restarted"}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _show_cache(self, request: Request) -> Response:
        if self._cache is None:
            return JSONResponse({"status": "there is no cache here"}, 503)
        return JSONResponse(await self._cache(request.query_params.get("check") == "1"))
