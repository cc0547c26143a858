"""A connection to one peer: its certificate, keepalive, sizes, and a deadline on every call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Self

import grpc

from sdcp_mono.core.problems import Unavailable
from sdcp_mono.grpc import problems
from sdcp_mono.grpc.calls import Tracing, seconds_left
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

    The server's certificate must be of the CA and name the host. Raises ``OSError`` for files that can't be used.
    """

    def __init__(self, address: str, files: PemFiles, *, tracing: Tracing | None = None) -> None:
        self.address = address
        self._pems = Pems(files)
        self._tracing = tracing or Tracing()
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[Callable[..., Any], Any] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        self._channel, self._stubs = None, {}

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
        if self._channel is None or self._pems.renewed():
            self._replace()
        if stub not in self._stubs:
            self._stubs[stub] = stub(self._channel)
        return self._stubs[stub]

    def _replace(self) -> None:
        """Connect with the certificate that is in the files now; what the old connection has under way may end."""
        if self._channel is not None:
            task = asyncio.get_running_loop().create_task(_close_later(self._channel))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._channel = grpc.aio.secure_channel(self.address, channel_credentials(self._pems), options=_OPTIONS)
        self._stubs = {}

    def _timeout(self, seconds: float) -> float:
        left = seconds_left()
        if left is None:
            return seconds
        if left <= 0:
            raise Unavailable(f"{self.address}: no time is left for it")
        return min(seconds, left)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._tracing.inject().items())


async def _close_later(channel: grpc.aio.Channel) -> None:
    with suppress(asyncio.CancelledError):
        await channel.close(CLOSE_SECONDS)
    await channel.close()
