"""The gateway's listener: one port, TLS 1.3, HTTP/2 only, roles mounted under their base paths (5.1).

``serve_gateway`` runs in the event loop of its caller. It drains on the way out: open polls are answered, requests
under way get a grace period, then connections are cut.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import anycorn
from anycorn.config import Config, Sockets
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount, Route, Router

from sdcp_mono.http_gateway.exchange import Endpoint, Front, Gate, Handler, unknown_resource
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.limits import GatewayLimits
from sdcp_mono.http_gateway.tls import Connections, PemFiles, ReloadingContext, quiet_handshakes

log = logging.getLogger(__name__)

STREAMS: Final = 1024  # per connection, as advertised: long polls count too, and an overrun kills the connection
# Without a stream. anycorn also keeps a connection for so long that its peer has closed, so it is short; roles at work
# report their status every second and don't notice.
IDLE_SECONDS: Final = 15.0
HANDSHAKE_SECONDS: Final = 10.0
HEADER_OCTETS: Final = 16 * 2**10
GRACE_SECONDS: Final = 5.0  # for requests under way at shutdown; a verification takes less
FLUSH_SECONDS: Final = 0.05  # anycorn closes a connection it drains without waiting for a last response's end
STALL_MS: Final = 30_000  # a peer that doesn't read for so long is cut by the kernel (TCP_USER_TIMEOUT)
BACKLOG: Final = 128

Resources = Mapping[str, Mapping[str, Handler]]
"""A role's resources: path below the base (Starlette's syntax) -> method -> handler."""


@dataclass(slots=True)
class Gateway:
    """A running gateway. ``url`` is the origin, without a trailing slash."""

    host: str
    port: int
    url: str
    gate: Gate
    context: ReloadingContext

    @property
    def connections(self) -> int:
        return len(self.context.connections)


class _Config(Config):
    """anycorn's settings (transport notes: these four are not its defaults) on a socket and a context of our own."""

    def __init__(self, bound: socket.socket, context: ReloadingContext, files: PemFiles) -> None:
        super().__init__()
        self.alpn_protocols = ["h2"]
        self.certfile, self.keyfile, self.ca_certs = str(files.cert), str(files.key), str(files.ca)
        self.keep_alive_max_requests = 2**62  # otherwise every thousandth request is lost
        self.keep_alive_timeout = IDLE_SECONDS
        self.h2_max_concurrent_streams = STREAMS
        self.h2_max_header_list_size = HEADER_OCTETS
        self.ssl_handshake_timeout = HANDSHAKE_SECONDS
        self.graceful_timeout = 1.0  # requests have had GRACE_SECONDS by then
        self.include_server_header = False
        self.errorlog = logging.getLogger(f"{__name__}.http2")
        self.accesslog = None
        self._bound = bound
        self._context = context

    def create_ssl_context(self) -> ReloadingContext:
        return self._context

    def create_sockets(self) -> Sockets:
        return Sockets([self._bound], [], [])  # never QUIC: its server asks for no client certificate


def application(gate: Gate, roles: Mapping[str, Resources]) -> Front:
    """The ASGI application: each role's resources under its base path, such as ``/verifier/``."""
    mounts: list[BaseRoute] = []
    for base, resources in sorted(roles.items(), key=lambda item: -len(item[0])):  # the longest prefix wins
        routes = [Route(path, Endpoint(gate, methods)) for path, methods in resources.items()]
        mounts.append(Mount(urlsplit(base).path.rstrip("/"), app=Router(routes, redirect_slashes=False)))
    app = Starlette(routes=mounts, exception_handlers={HTTPException: unknown_resource})
    app.router.redirect_slashes = False
    return Front(app)


@asynccontextmanager
async def serve_gateway(
    *,
    host: str = "127.0.0.1",
    port: int = 8443,
    files: PemFiles,
    roles: Mapping[str, Resources],
    access: Access,
    limits: GatewayLimits | None = None,
) -> AsyncIterator[Gateway]:
    """Serve ``roles`` (base path or base URI -> resources) until the block is left.

    Port 0 lets the system choose; the answer says which. Raises ``OSError`` for a port or certificate files that can't
    be used.
    """
    quiet_handshakes()
    gate = Gate.of(access, limits or GatewayLimits())
    context = ReloadingContext.of(files, Connections(gate.limits.connections, gate.limits.caller_connections))
    bound = _listen(host, port)
    port = bound.getsockname()[1]
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    drained = asyncio.Event()

    async def stop() -> None:
        await drained.wait()

    app: Any = application(gate, roles)  # anycorn has ASGI types of its own
    serving = anycorn.serve(app, _Config(bound, context, files), shutdown_trigger=stop, mode="asgi")
    running = asyncio.get_running_loop().create_task(serving)
    try:
        yield Gateway(host, port, url, gate, context)
    finally:
        gate.stopping.set()  # polls are answered, new requests refused
        with suppress(TimeoutError):
            await asyncio.wait_for(gate.requests.none(), GRACE_SECONDS)
        await asyncio.sleep(FLUSH_SECONDS)
        drained.set()
        done, _ = await asyncio.wait((running,), timeout=3.0)
        if not done:
            running.cancel()
            done, _ = await asyncio.wait((running,), timeout=1.0)
        bound.close()
        if not done:
            log.warning("the gateway left a connection behind that neither reads nor closes")
        elif not running.cancelled() and (error := running.exception()) is not None:
            log.error("the gateway failed: %s", error)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these. anycorn itself has no write timeout.
        options: Sequence[tuple[int, str, int]] = (
            (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", STALL_MS),
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 30),
        )
        for level, name, value in options:
            if hasattr(socket, name):  # not every system has all of them
                bound.setsockopt(level, getattr(socket, name), value)
        bound.bind((host, port))
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{error.strerror} (the gateway's {host}:{port})") from error
    except BaseException:
        bound.close()
        raise
    return bound
