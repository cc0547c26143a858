"""Around every HTTP exchange: request id, write timeout, one count and one log line. No content is logged."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sdcp_mono.frontend.errors import ClientGone

logger = logging.getLogger("sdcp_mono.frontend")

OTHER: Final = "other"
CLIENT_GONE: Final = 499  # nginx's status for an exchange whose client left before the answer; never sent

# Servers wait for room before a write, not after it: a large body goes out in pieces of their buffer's size.
_PIECE = 2**16

# What may be echoed into a header and a log line; anything else gets an id of ours.
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestMetrics(Protocol):
    """Where requests are counted, and the whole registry as Prometheus text. Labels come from fixed sets."""

    def count_request(self, route: str, model: str, status: int, seconds: float) -> None: ...

    def exposition(self) -> tuple[bytes, str]:
        """The text of ``/metrics`` and its content type."""


def set_model(scope: Scope, model: str) -> None:
    """Remember which model a request is for; ``model`` is a name of ours or ``other``."""
    scope["sdcp.model"] = model


class Boundary:
    """ASGI wrapper; must be outermost, because cutting a connection needs the server's own ``send``."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, write_timeout_s: float) -> None:
        self._app = app
        self._metrics = metrics
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(_request_id(scope), send, self._write_timeout_s)
        started = time.perf_counter()
        try:
            await self._app(scope, receive, exchange.send)
        except ClientGone:
            pass
        finally:
            seconds = time.perf_counter() - started
            self._observe(scope, exchange, seconds)
        if exchange.stalled and _abort(send):
            # The server learns of it in its own turn; leaving before that looks to it like a bug of ours.
            while (await receive())["type"] != "http.disconnect":
                pass

    def _observe(self, scope: Scope, exchange: _Exchange, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        ending = "" if exchange.complete else ", stopped reading" if exchange.stalled else ", cut short"
        logger.info(
            "%s %s %d %.3f s id=%s%s",
            scope["method"],
            route,
            exchange.status,
            seconds,
            exchange.request_id.decode(),
            ending,
        )
        self._metrics.count_request(route, scope.get("sdcp.model", ""), exchange.status, seconds)


class _Exchange:
    """One response on its way out."""

    def __init__(self, request_id: bytes, send: Send, write_timeout_s: float) -> None:
        self.request_id = request_id
        self.status = CLIENT_GONE
        self.complete = False
        self.stalled = False
        self._send = send
        self._write_timeout_s = write_timeout_s

    async def send(self, message: Message) -> None:
        """Raises ``ClientGone`` if the client doesn't read; the server's buffer is the only one on the way."""
        if self.stalled:
            raise ClientGone
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self.request_id)]}
        body = message.get("body", b"")
        start = 0
        while len(body) - start > _PIECE:
            await self._write({**message, "body": body[start : start + _PIECE], "more_body": True})
            start += _PIECE
        if start:
            message = {**message, "body": body[start:]}
        await self._write(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send(message)
        except TimeoutError:
            self.stalled = True
            raise ClientGone from None


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _abort(send: Send) -> bool:
    """Drop the connection with whatever is buffered. ASGI has no word for it; uvicorn's bound ``send`` has a transport.

    False under another server: the unfinished response then makes it close the connection when it can.
    """
    abort = getattr(getattr(getattr(send, "__self__", None), "transport", None), "abort", None)
    if abort is None:
        return False
    abort()
    return True
