"""A server of roles over gRPC: who calls, refusals, limits, health, and a stop that finishes what is under way.

Law of this module: every call ends with a status, whatever becomes of its handler, and a caller that has gone leaves
nothing running.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from sdcp_mono.core.problems import Refusal, TooManyRequests
from sdcp_mono.grpc import problems
from sdcp_mono.grpc.calls import Call, Tracing, begin
from sdcp_mono.grpc.channel import MAX_MESSAGE, PING_MS, PONG_MS
from sdcp_mono.grpc.identity import Access, caller_of
from sdcp_mono.grpc.tls import PemFiles, Pems, server_credentials

log = logging.getLogger(__name__)

CALLS: Final = 2048  # under way over all callers: each holds a task, a long poll for 20 s
CALLS_OF_ONE: Final = 512  # a router with 256 sessions polls as many outputs and assigns as many
STREAMS: Final = 1024  # of one connection; a caller that has more under way waits
MIN_PING_MS: Final = 10_000  # a third of what our clients do, so that none is sent away (too_many_pings)
CONNECTION_MS: Final = 3_600_000  # a connection this old is renewed: certificates and CAs that were removed end here
CONNECTION_GRACE_MS: Final = 120_000  # for its calls; the longest, a stream of output, ends after 60 s
GRACE_SECONDS: Final = 5.0  # for calls under way at shutdown; a verification takes less

_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_concurrent_streams", STREAMS),
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PONG_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
    ("grpc.max_connection_age_ms", CONNECTION_MS),
    ("grpc.max_connection_age_grace_ms", CONNECTION_GRACE_MS),
    ("grpc.so_reuseport", 0),  # two servers on one port are a mistake
)

Context = grpc.aio.ServicerContext[Any, Any]


class Service(Protocol):
    """One role's side of a service; ``name`` is its full name in the proto file."""

    @property
    def name(self) -> str: ...
    def add_to(self, server: grpc.aio.Server) -> None: ...


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A running server. ``pems`` counts certificates that could not be used."""

    host: str
    port: int
    pems: Pems
    _health: health.HealthServicer
    _names: Sequence[str]

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def ready(self, ready: bool) -> None:
        """What the health service says of every service here, for who balances or probes."""
        serving = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, serving.SERVING if ready else serving.NOT_SERVING)


@asynccontextmanager
async def serve_grpc(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    files: PemFiles | Pems,
    access: Access,
    services: Sequence[Service],
    tracing: Tracing | None = None,
    reflect: bool = True,
    calls_of_one: int = CALLS_OF_ONE,
) -> AsyncIterator[GrpcServer]:
    """Serve until the block is left, then drain: health says no, polls are answered, calls get a grace period.

    Port 0 lets the system choose. ``reflect``: tell the CA's identities what there is, for tools such as grpcurl.
    Raises ``OSError`` for a port or files that can't be used.
    """
    pems = files if isinstance(files, Pems) else Pems(files)
    stopping = asyncio.Event()
    guard = Guard(access, stopping, tracing or Tracing(), calls_of_one)
    server = grpc.aio.server(interceptors=(guard,), options=_OPTIONS, maximum_concurrent_rpcs=CALLS)
    for service in services:
        service.add_to(server)
    names = [service.name for service in services]
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if reflect:
        reflection.enable_server_reflection((*names, SERVICE_NAME, reflection.SERVICE_NAME), server)
    made = GrpcServer(host, _listen(server, host, port, pems), pems, checks, names)
    await made.ready(True)
    await server.start()
    try:
        yield made
    finally:
        stopping.set()
        await checks.enter_graceful_shutdown()
        await server.stop(GRACE_SECONDS)


def _listen(server: grpc.aio.Server, host: str, port: int, pems: Pems) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_secure_port(address, server_credentials(pems))
    except RuntimeError as error:
        raise OSError(f"{address} can't be listened on: {error}") from error


class Guard(grpc.aio.ServerInterceptor):
    """Around every handler: the caller's identity, its share of calls, the trace, and refusals as statuses."""

    def __init__(self, access: Access, stopping: asyncio.Event, tracing: Tracing, calls_of_one: int) -> None:
        self._access = access
        self._stopping = stopping
        self._tracing = tracing
        self._calls_of_one = calls_of_one
        self._under_way: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # the library answers UNIMPLEMENTED
            return handler
        name = handler_call_details.method
        asked = "stream" if handler.request_streaming else "unary"
        answered = "stream" if handler.response_streaming else "unary"
        wrap = self._stream if handler.response_streaming else self._unary
        return getattr(grpc, f"{asked}_{answered}_rpc_method_handler")(
            wrap(name, getattr(handler, f"{asked}_{answered}")),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _unary(self, name: str, handle: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> Any:
            async with self._call(name, context):
                return await handle(request, context)

        return guarded

    def _stream(self, name: str, handle: Callable[[Any, Context], AsyncIterator[Any]]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            # Closed when the caller leaves, not when somebody collects garbage: it may hold what it sends.
            async with self._call(name, context), aclosing(handle(request, context)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    yield message

        return guarded

    @asynccontextmanager
    async def _call(self, name: str, context: Context) -> AsyncIterator[None]:
        try:
            caller = caller_of(context, self._access)
            remaining = context.time_remaining()
            ends = None if remaining is None else asyncio.get_running_loop().time() + remaining
            with self._share(caller.uri):
                begin(Call(caller, self._access, self._stopping, asyncio.current_task(), ends))
                metadata = context.invocation_metadata() or ()
                self._tracing.extract({key: value for key, value in metadata if isinstance(value, str)})
                yield
        except Refusal as refusal:
            await problems.abort(context, refusal)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            # The caller has gone, and hears nothing; or somebody here ended the task or what it waited for, and without
            # a status the caller would wait for its deadline.
            with suppress(grpc.aio.BaseError, Exception):
                await context.abort(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:
            log.exception("%s failed", name)
            await context.abort(grpc.StatusCode.INTERNAL, type(error).__name__)

    @contextmanager
    def _share(self, uri: str) -> Iterator[None]:
        if self._under_way[uri] >= self._calls_of_one:
            raise TooManyRequests(f"{self._calls_of_one} calls of this caller are under way", retry_after_ms=1000)
        self._under_way[uri] += 1
        try:
            yield
        finally:
            self._under_way[uri] -= 1
            if not self._under_way[uri]:
                del self._under_way[uri]
