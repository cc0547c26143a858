"""An HTTP/2 client and server on plain sockets and h2, which know nothing of this project's."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import cbor2
import h2.config
import h2.connection
import h2.events
import h2.exceptions

from sdcp_mono.core import cbor

WAIT_S = 20.0  # for something that must happen; reached only by a failure


class Files(Protocol):
    ca: Path
    cert: Path
    key: Path


class Reply:
    """A response as it came."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def cbor(self) -> Any:
        assert self.headers["content-type"] == "application/sdcp+cbor", (self.status, self.headers, self.body)
        return cbor2.loads(self.body)

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json", (self.status, self.headers, self.body)
        document: dict[str, Any] = json.loads(self.body)
        assert document["status"] == self.status
        assert document["title"]
        assert self.headers["cache-control"] == "no-store"
        return document

    @property
    def kind(self) -> tuple[int, str]:
        """Status and the problem type's suffix, empty for about:blank."""
        type_ = self.problem["type"]
        return self.status, "" if type_ == "about:blank" else type_.removeprefix("https://iana.org/assignments/sdcp#")


class Wire:
    """An HTTP/2 client on asyncio streams and h2, which knows nothing of our client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str) -> None:
        self.reader = reader
        self.writer = writer
        self.authority = authority
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.replies: dict[int, asyncio.Future[Reply]] = {}
        self.parts: dict[int, tuple[dict[str, str], bytearray]] = {}
        self.window = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def connect(cls, port: int, files: Files, context: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context or tls(files), server_hostname="localhost"
        )
        wire = cls(reader, writer, f"127.0.0.1:{port}")
        wire.h2.initiate_connection()
        wire.h2.increment_flow_control_window(2**24)
        await wire.flush()
        wire.task = asyncio.ensure_future(wire.read())
        try:
            yield wire
        finally:
            wire.task.cancel()
            await asyncio.gather(wire.task, return_exceptions=True)
            writer.transport.abort()

    async def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def read(self) -> None:
        try:
            while data := await self.reader.read(65536):
                for event in self.h2.receive_data(data):
                    self.handle(event)
                await self.flush()
        except (OSError, h2.exceptions.ProtocolError):
            pass
        finally:
            self.ended.set()
            for reply in self.replies.values():
                if not reply.done():
                    reply.set_exception(ConnectionResetError("the connection ended"))
                    reply.exception()

    def handle(self, event: Any) -> None:
        match event:
            case h2.events.ResponseReceived():
                self.parts[event.stream_id] = (dict(event.headers), bytearray())
            case h2.events.DataReceived():
                self.parts[event.stream_id][1].extend(event.data)
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                headers, body = self.parts.pop(event.stream_id)
                reply = self.replies[event.stream_id]
                if not reply.done():
                    reply.set_result(Reply(int(headers[":status"]), headers, bytes(body)))
            case h2.events.StreamReset():
                reply = self.replies[event.stream_id]
                if not reply.done():
                    reply.set_exception(ConnectionResetError(f"reset {event.error_code}"))
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self.window.set()

    async def start(self, method: str, path: str, *, end: bool, **headers: str) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.replies[stream] = asyncio.get_running_loop().create_future()
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        pseudo = [(":method", method), (":scheme", "https"), (":authority", self.authority), (":path", path)]
        self.h2.send_headers(stream, [*pseudo, *named], end_stream=end)
        await self.flush()
        return stream

    async def send(self, stream: int, body: bytes, *, end: bool = True) -> None:
        while True:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            part, body = body[:room], body[room:]
            if part or not body:
                self.h2.send_data(stream, part, end_stream=end and not body)
                await self.flush()
            if not body:
                return
            if not room:
                self.window.clear()
                await asyncio.wait_for(self.window.wait(), WAIT_S)

    async def answer(self, stream: int) -> Reply:
        return await asyncio.wait_for(asyncio.shield(self.replies[stream]), WAIT_S)

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """``body``: octets, or a value or message that becomes CBOR."""
        if body is None:
            return await self.answer(await self.start(method, path, end=True, **headers))
        if not isinstance(body, bytes):
            body = cbor2.dumps(body, canonical=True) if isinstance(body, dict | list) else cbor.encode(body)
        headers.setdefault("content_type", "application/sdcp+cbor")
        stream = await self.start(method, path, end=False, **headers)
        with suppress(h2.exceptions.StreamClosedError):  # answered before the body was complete
            await self.send(stream, body)
        return await self.answer(stream)


def tls(files: Files | None, ca: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca or (files.ca if files else None))
    context.set_alpn_protocols(["h2"])
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


Answer = Callable[[str, str, bytes, int], "tuple[int, dict[str, str], bytes] | None"]


@asynccontextmanager
async def stub(files: Files, answer: Answer) -> AsyncIterator[str]:
    """A foreign peer on plain h2, at ``/verifier/``. ``answer(method, path, body, nth)``; None drops the connection."""
    seen = 0
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        writers.append(writer)
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        asked: dict[int, tuple[str, str, bytearray]] = {}
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    headers = dict(event.headers)
                    asked[event.stream_id] = (headers[":method"], headers[":path"], bytearray())
                elif isinstance(event, h2.events.DataReceived):
                    asked[event.stream_id][2].extend(event.data)
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    seen += 1
                    method, path, body = asked.pop(event.stream_id)
                    response = answer(method, path, bytes(body), seen)
                    if response is None:
                        writer.transport.abort()
                        return
                    status, named, content = response
                    connection.send_headers(event.stream_id, [(":status", str(status)), *named.items()])
                    connection.send_data(event.stream_id, content, end_stream=True)
            writer.write(connection.data_to_send())

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_tls(files))
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/verifier/"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


def server_tls(files: Files) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(files.cert, files.key)
    return context
