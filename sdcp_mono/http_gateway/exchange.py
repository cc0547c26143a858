"""One request and its response: media types, bounded bodies, problem documents (5.1).

Every endpoint authorises the caller before it reads the body. Nothing a peer sends becomes an exception outside the
problem table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import Message, SessionId
from sdcp_mono.core.names import parse_session
from sdcp_mono.core.problems import Malformed, Refusal, TooLarge, Unavailable
from sdcp_mono.http_gateway import problems
from sdcp_mono.http_gateway.identity import Access, Identity, identity_of
from sdcp_mono.http_gateway.limits import GatewayLimits, Slots
from sdcp_mono.http_gateway.problems import (
    InternalError,
    MethodNotAllowed,
    NotAcceptable,
    NotFound,
    RequestTimeout,
    UnsupportedMediaType,
    VersionNotSupported,
)

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

CBOR: Final = "application/sdcp+cbor"
OCTETS: Final = "application/octet-stream"
PIECE: Final = 2**16  # octets of a response handed to the server at once, so that other streams get their turn
# For one piece of a response: a client that doesn't read holds memory, and anycorn never finishes a response whose
# connection has ended meanwhile.
WRITE_SECONDS: Final = 10.0


class ClientGone(Exception):
    """The client left before its request was complete; there is nobody to answer."""


class Gate(Struct):
    """What all endpoints of one gateway share. ``bodies`` counts octets being read; ``stopping`` ends polls."""

    access: Access
    limits: GatewayLimits
    stopping: asyncio.Event
    requests: Slots
    polls: Slots
    bodies: int = 0

    @classmethod
    def of(cls, access: Access, limits: GatewayLimits) -> Gate:
        return cls(
            access, limits, asyncio.Event(), Slots(limits.requests, "requests"), Slots(limits.polls, "open polls")
        )


class Call:
    """A request of an authenticated caller."""

    def __init__(self, gate: Gate, caller: Identity, scope: Scope, receive: Receive) -> None:
        self.gate = gate
        self.caller = caller
        self.headers = Headers(scope=scope)
        self.method: str = scope["method"]
        self.path: Mapping[str, Any] = scope.get("path_params", {})
        self.held = AsyncExitStack()  # what the response needs until it has left
        self._scope = scope
        self._receive = receive

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def session(self) -> SessionId:
        """The {id} of the path."""
        return parse_session(self.path["id"])

    def must_accept(self, media_type: str = CBOR) -> None:
        """Raises ``NotAcceptable`` if the caller excludes the only type there is (AMB-009)."""
        accept = self.headers.get("accept")
        if accept is not None and not _accepts(accept, media_type):
            raise NotAcceptable(f"accept: the response is {media_type}")

    async def message(self, type: type[M], limit: int | None = None) -> M:
        """The body as a message; raises ``UnsupportedMediaType``, ``TooLarge``, ``RequestTimeout``, ``Malformed``."""
        self.must_accept()
        return cbor.decode(await self.cbor_body(limit), type)

    async def cbor_body(self, limit: int | None = None) -> bytes:
        given = self.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != CBOR:
            raise UnsupportedMediaType(f"content-type: expected {CBOR}")
        return await self.body(limit or self.gate.limits.body, self.gate.limits.body_seconds)

    async def body(self, limit: int, seconds: float) -> bytes:
        """The body, refused while it is read once it is longer than ``limit``."""
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMediaType("content-encoding: not supported")
        length = self.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > limit:
            raise TooLarge(f"body: more than {limit} octets")
        parts: list[bytes] = []
        taken = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    part, more = await self._part()
                    if taken + len(part) > limit:
                        raise TooLarge(f"body: more than {limit} octets")
                    if self.gate.bodies + len(part) > self.gate.limits.bodies:
                        raise Unavailable("body: too many octets are being received", retry_after_ms=1000)
                    taken += len(part)
                    self.gate.bodies += len(part)
                    parts.append(part)
                    if not more:
                        return b"".join(parts)
        except TimeoutError:
            raise RequestTimeout(f"body: not complete after {seconds:g} seconds") from None
        finally:
            self.gate.bodies -= taken

    async def gone(self) -> None:
        """Return when the client has left. A body it sends meanwhile is thrown away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _part(self) -> tuple[bytes, bool]:
        event = await self._receive()
        if event["type"] == "http.disconnect":
            raise ClientGone
        return event.get("body", b""), event.get("more_body", False)


Handler = Callable[[Call], Awaitable[Response]]


def reply(message: Message, status: int = 200, **headers: str) -> Response:
    """A message as the response."""
    return octets(cbor.encode(message), CBOR, status, **headers)


def octets(body: bytes, media_type: str, status: int = 200, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(body, status, {"content-type": media_type, "cache-control": "no-store", **named})


def empty(status: int = 204, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(b"", status, {"cache-control": "no-store", **named})


def problem(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response:
    body, own = problems.render(refusal)
    return Response(body, refusal.status, {**(headers or {}), **own})


class Endpoint:
    """The ASGI application of one path: its methods, behind authentication."""

    def __init__(self, gate: Gate, methods: Mapping[str, Handler]) -> None:
        self._gate = gate
        self._methods = methods
        self._allow = ", ".join(sorted(methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = identity_of(scope, self._gate.access)
            if self._gate.stopping.is_set():
                raise Unavailable("the server is stopping", retry_after_ms=1000)
            with self._gate.requests.hold(caller.uri):  # until the response has left: it holds memory too
                call = Call(self._gate, caller, scope, receive)
                async with call.held:
                    response = await self._answer(call)
                    await _send(response, scope, receive, send)
        except Refusal as refusal:
            await _send(problem(refusal), scope, receive, send)
        except ClientGone:
            return

    async def _answer(self, call: Call) -> Response:
        handler = self._methods.get(call.method)
        if handler is None:
            return problem(MethodNotAllowed(f"method: allowed are {self._allow}"), {"allow": self._allow})
        try:
            return await handler(call)
        except Refusal as refusal:
            return problem(refusal)
        except ClientGone:
            raise
        except Exception:
            log.exception("a request failed")
            return problem(InternalError("the server failed; nothing is known about the request's effect"))


class Front:
    """Around the whole application: HTTP/2 only (SDCP-042), and problem documents for what no endpoint answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["http_version"] != "2":
            refusal = VersionNotSupported("SDCP needs HTTP/2 (5.1)")
            await _send(problem(refusal, {"connection": "close"}), scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def unknown_resource(_: Any, error: Exception) -> Response:
    """Starlette's own errors: a path that names nothing."""
    assert isinstance(error, HTTPException)
    return problem(NotFound("path: no such resource"))


async def _send(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises ``ClientGone`` for a client that doesn't take its response."""
    body = bytes(response.body)
    try:
        async with asyncio.timeout(WRITE_SECONDS) as limit:
            if len(body) <= PIECE:
                await response(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
            for at in range(0, len(body), PIECE):
                limit.reschedule(asyncio.get_running_loop().time() + WRITE_SECONDS)
                more = at + PIECE < len(body)
                await send({"type": "http.response.body", "body": body[at : at + PIECE], "more_body": more})
                await asyncio.sleep(0)
    except TimeoutError:
        raise ClientGone from None


def _accepts(accept: str, media_type: str) -> bool:
    """Whether an Accept header lets ``media_type`` through (RFC 9110, 12.5.1)."""
    best, weight = -1, 0.0
    for part in accept.split(","):
        kind, *parameters = (text.strip().lower() for text in part.split(";"))
        rank = {media_type: 2, media_type.split("/")[0] + "/*": 1, "*/*": 0}.get(kind, -1)
        if rank > best:
            q = next((text[2:] for text in parameters if text.startswith("q=")), "1")
            try:
                best, weight = rank, float(q)
            except ValueError:
                raise Malformed("accept: q is not a number") from None
    return best >= 0 and weight > 0
