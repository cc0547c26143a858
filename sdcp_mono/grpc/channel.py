"""A connection to one peer: its certificate, keepalive, sizes, and a deadline on every call.

A host such as ``10-1-2-3.drafter.ns.svc`` is dialled at 10.1.2.3, so that a new instance needs no DNS entry before it
can be called. Nothing is taken from the address: the certificate must name the host all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, Self

import grpc

from sdcp_mono.core.problems import Unavailable
from sdcp_mono.grpc import problems
from sdcp_mono.grpc.calls import Tracing, seconds_left
from sdcp_mono.grpc.identity import INSTANCE
from sdcp_mono.grpc.tls import PemFiles, Pems, channel_credentials

MAX_MESSAGE: Final = 20 * 2**20  # octets: an inline prompt of 4 Mi token ids; objects and logs come in pieces
PING_MS: Final = 30_000  # three times what our servers allow, and below the idle timeouts of proxies
PONG_MS: Final = 10_000  # a peer that is paused for so long is lost
CLOSE_SECONDS: Final = 30.0  # what an old connection has under way may take after its certificate was replaced

_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PONG_MS),
    ("grpc.keepalive_permit_without_calls", 1),  # so that a peer's death is known before the next call needs it
    ("grpc.http2.max_pings_without_data", 0),  # otherwise an idle connection stops pinging after two
    # The defaults wait 20 s for a connection and up to 120 s between two: a peer that restarts is back in a few.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # roles of one process have certificates of their own
    ("grpc.service_config_disable_resolution", 1),  # nobody's DNS decides about retries
    ("grpc.enable_http_proxy", 0),  # nor does the environment about proxies
)


class Channel:
    """Calls to the server at ``address`` (``host:port``). Usable from one event loop; close it before that ends.

    The server's certificate must be of the CA and name the host. ``instance`` is the base URI of who calls, where its
    certificate is a pool's. Raises ``OSError`` for files that can't be used.
    """

    def __init__(
        self, address: str, files: PemFiles | Pems, *, instance: str = "", tracing: Tracing | None = None
    ) -> None:
        self.address = address
        self._pems = files if isinstance(files, Pems) else Pems(files)
        self._pem = self._pems.current()
        self._instance = instance
        self._tracing = tracing or Tracing()
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[Callable[..., Any], Any] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace_seconds: float | None = None) -> None:
        """Calls under way end at once, or may take ``grace_seconds``."""
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        channel, self._channel, self._stubs = self._channel, None, {}
        if channel is not None:
            await _close_later(channel, grace_seconds)

    async def call(self, stub: Callable[..., Any], method: str, request: Any, seconds: float) -> Any:
        """One call, its request a message or an iterator of them. Raises the ``Refusal`` that was answered.

        ``seconds`` is its deadline, or what is left to the call that is being handled, if that is less.
        """
        timeout = self._timeout(seconds)
        try:
            return await getattr(self._stub(stub), method)(request, timeout=timeout, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise problems.read(error, self.address) from error

    async def stream(self, stub: Callable[..., Any], method: str, request: Any, seconds: float) -> AsyncIterator[Any]:
        """The messages of one answer; ``aclose`` cancels the call."""
        timeout = self._timeout(seconds)
        call: AsyncIterable[Any] = getattr(self._stub(stub), method)(
            request, timeout=timeout, metadata=self._metadata()
        )
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise problems.read(error, self.address) from error
        finally:
            call.cancel()  # type: ignore[attr-defined]  # of no effect once it is over

    def _stub(self, stub: Callable[..., Any]) -> Any:
        if self._channel is None or self._pem is not self._pems.current():
            self._replace()
        if stub not in self._stubs:
            self._stubs[stub] = stub(self._channel)
        return self._stubs[stub]

    def _replace(self) -> None:
        """Connect with the certificate that is in the files now; what the old connection has under way may end."""
        if self._channel is not None:
            task = asyncio.get_running_loop().create_task(_close_later(self._channel, CLOSE_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._pem = self._pems.current()
        target, options = dialled(self.address)
        self._channel = grpc.aio.secure_channel(target, channel_credentials(self._pem), options=(*_OPTIONS, *options))
        self._stubs = {}

    def _timeout(self, seconds: float) -> float:
        left = seconds_left()
        if left is None:
            return seconds
        if left <= 0:
            raise Unavailable(f"{self.address}: no time is left for it")
        return min(seconds, left)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        instance = ((INSTANCE, self._instance),) if self._instance else ()
        return (*instance, *self._tracing.inject().items())


def dialled(address: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What to tell gRPC to connect to for ``host:port``, and with which options."""
    host, _, port = address.rpartition(":")
    label, dot, _ = host.partition(".")
    found = address_in(label) if dot else None
    if found is None:
        return address, ()
    where = f"ipv6:[{found}]:{port}" if found.version == 6 else f"ipv4:{found}:{port}"
    return where, (("grpc.ssl_target_name_override", host), ("grpc.default_authority", address))


def label_of(address: str) -> str:
    """The label of the instance at an IP address: with hyphens, as Kubernetes names the pods of a headless service."""
    return str(ip_address(address)).replace(".", "-").replace(":", "-")


def address_in(label: str) -> IPv4Address | IPv6Address | None:
    """The address that a label spells, if it does."""
    for separator in ".:":
        with suppress(ValueError):
            return ip_address(label.replace("-", separator))
    return None


async def _close_later(channel: grpc.aio.Channel, grace_seconds: float | None) -> None:
    try:
        await channel.close(grace_seconds)
    finally:
        await channel.close()
