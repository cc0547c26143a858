"""A node whose roles meet over internal gRPC and TLS instead of by method calls: for suites that run both ways."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from sdcp_mono import certs, compose
from sdcp_mono.compose.storage import AUTHORITY, rows_from_bytes
from sdcp_mono.compose.tracing import CALLS
from sdcp_mono.grpc.cache_client import CommitLogClient, GrpcRows, ObjectStoreClient
from sdcp_mono.grpc.cache_service import CommitLogService, ObjectStoreService
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.grpc.client import DrafterClient, RouterClient, VerifierClient
from sdcp_mono.grpc.server import GrpcServer, Service, serve_grpc
from sdcp_mono.grpc.services import DrafterService, RouterService, VerifierService
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.mlc_client import HttpRows


class GrpcNode(compose.Node):
    """Its roles are the same objects; every port between two of them is a client of a server on loopback."""

    read_rows: Callable[[bytes, tuple[int, ...]], Any] | None = None  # of toy models; None: the product's own

    async def __aenter__(self) -> Self:
        self._lines = AsyncExitStack()
        self._folder = self._lines.enter_context(tempfile.TemporaryDirectory())
        certs.init(Path(self._folder), roles=self._bases)
        try:
            await self._rewire()
            return await super().__aenter__()
        except BaseException:
            await self._lines.aclose()
            raise

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        await self._lines.aclose()

    async def _rewire(self) -> None:
        bases, card, verifier, drafter, serving = (
            self._bases,
            self._engine.card,
            self._verifier,
            self._drafter,
            self.serving,
        )
        cache = await self._server("mlc", ObjectStoreService(self.storage.objects), CommitLogService(self._log))
        router = await self._server("router", RouterService(serving, serving.verifier_of))
        verify = await self._server("verifier", VerifierService(verifier, card, self._engine.drafter_of))
        read = type(self).read_rows or partial(rows_from_bytes, card.vocab_size)

        async def rows(role: str) -> HttpRows:
            ours = GrpcRows(ObjectStoreClient(await self._to(cache, role)), AUTHORITY, card.vocab_size, read)
            return HttpRows(self._caches, card.vocab_size, read, local=ours)

        self._caches._own = ObjectStoreClient(await self._to(cache, "verifier"))
        verifier._log = CommitLogClient(await self._to(cache, "verifier"))
        verifier._rows = await rows("verifier")
        self._told[0]._own = RouterClient(await self._to(router, "verifier"))
        serving._log = CommitLogClient(await self._to(cache, "router"))
        serving._objects = ObjectStoreClient(await self._to(cache, "router"))
        self._verifiers[bases["verifier"]] = VerifierClient(await self._to(verify, "router"))
        if drafter is not None:
            draft = await self._server("drafter", DrafterService(drafter))
            drafter._rows = await rows("drafter")
            self._told[1]._own = RouterClient(await self._to(router, "drafter"))
            self._drafters[bases["drafter"]] = DrafterClient(await self._to(draft, "router"))
            self._drafted_for[bases["verifier"]] = VerifierClient(await self._to(verify, "drafter"))

    async def _server(self, role: str, *services: Service) -> GrpcServer:
        access = Access.of(
            routers=(self._bases["router"],), verifiers=(self._bases["verifier"],), drafters=(self._bases["drafter"],)
        )
        files = certs.files(Path(self._folder), role)
        return await self._lines.enter_async_context(
            serve_grpc(files=files, access=access, services=services, tracing=CALLS)
        )

    async def _to(self, server: GrpcServer, role: str) -> Channel:
        """``server``, as ``role`` calls it."""
        files = certs.files(Path(self._folder), role)
        return await self._lines.enter_async_context(Channel(server.address, files, tracing=CALLS))
