"""A response of server-sent events whose status stays open until the first of them."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Receive, Scope, Send

from sdcp_mono.frontend.errors import ApiError
from sdcp_mono.frontend.responses import DONE, event

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
]


class EventStream:
    """Writes in order, one at a time; a client that doesn't read holds its writers, nothing is queued for it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._opening = b""
        self.started = False

    def open_with(self, events: bytes) -> None:
        """What precedes the first event that is written."""
        self._opening = events

    async def write(self, events: bytes) -> None:
        async with self._turn:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                events = self._opening + events
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": events + DONE, "more_body": False})

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """An HTTP error while that is possible, an event afterwards."""
        if self.started:
            await self.end(event(error.body()))
        else:
            await error.response()(scope, receive, self._send)
