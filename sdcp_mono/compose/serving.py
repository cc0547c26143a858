"""What the command line starts."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import uvicorn
from prometheus_client import CollectorRegistry

from sdcp_mono.compose.loading import load_unless_told
from sdcp_mono.compose.models import Loaded, Progress, load
from sdcp_mono.compose.node import Node
from sdcp_mono.compose.tracing import open_tracing
from sdcp_mono.frontend import terminal
from sdcp_mono.frontend.app import FrontEnd
from sdcp_mono.frontend.settings import FrontendSettings
from sdcp_mono.settings import Settings
from sdcp_mono.telemetry.http import HttpMetrics
from sdcp_mono.telemetry.tiers import TierMetrics


async def generate(loaded: Loaded, wish: terminal.Wish, view: terminal.View) -> terminal.Result:
    """``sdcp-mono generate``."""
    async with Node(loaded, CollectorRegistry()) as node:
        return await terminal.generate(node.serving, loaded.tokenizer, wish, view, loaded.seconds)


def serve(settings: Settings, progress: Progress, ready: Callable[[str], None]) -> None:
    """``sdcp-mono serve``: answers from the start, and is ready when the model is loaded. Returns when told to stop."""
    asyncio.run(run(settings, progress, ready))


class Server(uvicorn.Server):
    """Ends with exit code 0 when it is told to stop; uvicorn itself would raise the signal once more.

    Where it can't listen that is an ``OSError``, not an exit from within a task.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            where = f"{self.config.host}:{self.config.port}"
            raise OSError(f"port: {where} can't be listened at; another process may have it") from None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Finish what is running; asked a second time, don't."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def run(settings: Settings, progress: Progress, ready: Callable[[str], None]) -> None:
    registry = CollectorRegistry()
    app = FrontEnd(FrontendSettings(), HttpMetrics(registry))
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_config=None, log_level="warning", access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=30,  # a stream that is still running then is cut
    )  # fmt: skip
    server = Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    serving = asyncio.create_task(server.serve())
    try:
        loaded = await load_unless_told(partial(load, settings, progress), serving)
        async with AsyncExitStack() as stack:
            tracing = await open_tracing(settings, "serve", registry, stack)
            node = await stack.enter_async_context(Node(loaded, registry, gateway=settings.gateway, tracing=tracing))
            TierMetrics(registry, node.storage.stats, node.storage.counts, node.storage.objects)
            app.attach(node.serving, loaded.tokenizer, node.cache_report)
            port = server.servers[0].sockets[0].getsockname()[1]
            ready(f"http://{settings.host}:{port}")
            await serving
    finally:
        server.should_exit = True
        await serving
