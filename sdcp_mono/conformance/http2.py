"""HTTP/2 over TLS 1.3 with certificates both ways, client and server, small on purpose (5.1)."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 30.0  # longer than any long poll that a server may choose by default
CONNECT_SECONDS: Final = 10.0
MAX_BODY: Final = 64 * 2**20  # octets; rows of 64 positions and a vocabulary of 200,000 are 49 MiB
WINDOW: Final = 2**24  # octets in flight per stream, so that one body of rows needs no waiting


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str  # with the query
    headers: Mapping[str, str]
    body: bytes
    names: frozenset[str] = frozenset()  # URI names in the client's verified certificate


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "")


Handler: TypeAlias = Callable[[Request], Awaitable[Response | None]]
"""Answers a request; None resets the stream, as a response that got lost."""


class NoAnswer(Exception):
    """The peer refused the connection, closed it, reset the stream or said nothing in time."""


@dataclass(slots=True)
class _Stream:
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: asyncio.Future[None] | None = None


class _Connection(asyncio.Protocol):
    """One connection, either side. ``serve`` is called with each complete request at a server."""

    def __init__(self, *, client: bool, serve: Callable[[_Connection, int, _Stream], None] | None = None) -> None:
        config = h2.config.H2Configuration(client_side=client, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.streams: dict[int, _Stream] = {}
        self.names: frozenset[str] = frozenset()
        self.closed = False
        self.running: dict[int, asyncio.Task[None]] = {}  # answers under way at a server, by stream
        self._serve = serve
        self._room = asyncio.Event()  # a flow-control window has grown

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        secure = transport.get_extra_info("ssl_object")
        if secure.selected_alpn_protocol() != "h2":
            self.closed = True
            transport.abort()
            return
        certificate = secure.getpeercert() or {}
        names = certificate.get("subjectAltName", ())
        self.names = frozenset(value for kind, value in names if kind == "URI")
        self.h2.initiate_connection()
        settings = h2.settings.SettingCodes
        self.h2.update_settings({settings.INITIAL_WINDOW_SIZE: WINDOW, settings.MAX_CONCURRENT_STREAMS: 1024})
        self.h2.increment_flow_control_window(WINDOW)
        self.flush()

    def flush(self) -> None:
        data = self.h2.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        try:
            events = self.h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            self.flush()
            self.transport.close()
            return
        for event in events:
            self._handle(event)
        self.flush()

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived() | h2.events.ResponseReceived():
                assert event.stream_id is not None
                stream = self.streams.setdefault(event.stream_id, _Stream())
                stream.headers = {str(name): str(value) for name, value in event.headers or ()}
            case h2.events.DataReceived():
                assert event.stream_id is not None
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                if (known := self.streams.get(event.stream_id)) is not None:
                    known.body += event.data or b""
                    if len(known.body) > MAX_BODY:
                        self.transport.abort()
            case h2.events.StreamEnded():
                if event.stream_id in self.streams:
                    self._ended(event.stream_id)
            case h2.events.StreamReset():
                self._room.set()
                if (answering := self.running.get(event.stream_id or 0)) is not None:
                    answering.cancel()
                reset = self.streams.pop(event.stream_id or 0, None)
                if reset is not None and reset.ended is not None and not reset.ended.done():
                    if reset.headers and event.error_code == 0:  # an early answer, then RST_STREAM(NO_ERROR)
                        reset.ended.set_result(None)
                    else:
                        reset.ended.set_exception(NoAnswer("the stream was reset"))
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._room.set()
            case h2.events.ConnectionTerminated():
                self.closed = True

    def _ended(self, stream_id: int) -> None:
        stream = self.streams[stream_id]
        if self._serve is not None:
            del self.streams[stream_id]
            self._serve(self, stream_id, stream)
        elif stream.ended is not None and not stream.ended.done():
            stream.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._room.set()
        for stream in self.streams.values():
            if stream.ended is not None and not stream.ended.done():
                stream.ended.set_exception(NoAnswer(f"the connection was closed ({error or 'no reason given'})"))
        self.streams.clear()

    def begin(self, stream_id: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.h2.send_headers(stream_id, headers, end_stream=not body)
        self.flush()

    async def send(self, stream_id: int, body: bytes) -> None:
        """The body, as the peer's windows allow; a stream that the peer has reset is left."""
        view = memoryview(body)
        while view and not self.closed:
            try:
                room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(view))
                if room > 0:
                    self.h2.send_data(stream_id, bytes(view[:room]), end_stream=room == len(view))
                    view = view[room:]
                    self.flush()
                    continue
            except h2.exceptions.ProtocolError:
                return
            self._room.clear()
            await self._room.wait()


class Client:
    """Speaks as one role, named by the certificate in ``context``; one connection per origin, many streams."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._connections: dict[str, _Connection] = {}
        self._connecting = asyncio.Lock()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        seconds: float = REQUEST_SECONDS,
    ) -> Response:
        """One exchange; raises ``NoAnswer``."""
        try:
            async with asyncio.timeout(seconds):
                return await self._request(method, url, body, headers or {})
        except TimeoutError:
            raise NoAnswer(f"no answer within {seconds:g} s") from None
        except (OSError, h2.exceptions.H2Error) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from None

    async def _request(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Response:
        parts = urlsplit(url)
        connection = await self._connection(parts.netloc, parts.hostname or "", parts.port or 443)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = [(":method", method), (":scheme", "https"), (":authority", parts.netloc), (":path", target)]
        if body:
            fields.append(("content-length", str(len(body))))
        stream_id = connection.h2.get_next_available_stream_id()
        ended = asyncio.get_running_loop().create_future()
        stream = connection.streams[stream_id] = _Stream(ended=ended)
        connection.begin(stream_id, [*fields, *headers.items()], body)  # takes the id before anybody else can
        sending = asyncio.create_task(connection.send(stream_id, body))
        try:
            await asyncio.wait((ended, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            await ended
        finally:
            sending.cancel()
            ended.cancel()
            if connection.streams.pop(stream_id, None) is not None and not stream.headers and not connection.closed:
                connection.h2.reset_stream(stream_id, 8)  # CANCEL
                connection.flush()
        status = int(stream.headers.pop(":status"))
        return Response(status, stream.headers, bytes(stream.body))

    async def _connection(self, origin: str, host: str, port: int) -> _Connection:
        async with self._connecting:
            known = self._connections.get(origin)
            if known is not None and not known.closed:
                return known
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(client=True),
                host,
                port,
                ssl=self._context,
                ssl_handshake_timeout=CONNECT_SECONDS,
            )
            if connection.closed:
                raise NoAnswer("the server did not choose h2")
            self._connections[origin] = connection
            return connection

    def close(self) -> None:
        for connection in self._connections.values():
            if not connection.closed:
                connection.transport.abort()
        self._connections.clear()


class Server:
    """Serves one handler; every certificate is asked for and checked."""

    def __init__(self, context: ssl.SSLContext, handler: Handler) -> None:
        self.handler = handler
        self._context = context
        self._listener: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port."""
        self._listener = await asyncio.get_running_loop().create_server(self._accept, host, port, ssl=self._context)
        return int(self._listener.sockets[0].getsockname()[1])

    def _accept(self) -> _Connection:
        connection = _Connection(client=False, serve=self._begin)
        self._connections.add(connection)
        return connection

    def _begin(self, connection: _Connection, stream_id: int, stream: _Stream) -> None:
        task = asyncio.create_task(self._answer(connection, stream_id, stream))
        connection.running[stream_id] = task
        task.add_done_callback(lambda _: connection.running.pop(stream_id, None))

    async def _answer(self, connection: _Connection, stream_id: int, stream: _Stream) -> None:
        fields = stream.headers
        request = Request(fields[":method"], fields[":path"], fields, bytes(stream.body), connection.names)
        try:
            response = await self.handler(request)
        except Exception:
            log.exception("a role of the kit failed: %s %s", request.method, request.path)
            response = None
        if connection.closed:
            return
        try:
            if response is None:
                connection.h2.reset_stream(stream_id, 2)  # INTERNAL_ERROR
                connection.flush()
                return
            headers = [(":status", str(response.status)), *response.headers.items()]
            connection.begin(stream_id, headers, response.body)
            await connection.send(stream_id, response.body)
        except h2.exceptions.ProtocolError:
            return  # the client has given the request up

    async def stop(self) -> None:
        tasks = [task for connection in self._connections for task in connection.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections:
            if hasattr(connection, "transport"):
                connection.transport.abort()
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()


def context(folder: Path, role: str | None, *, server: bool = False) -> ssl.SSLContext:
    """TLS 1.3, h2, and the certificate of ``role`` in ``folder``; None: a client without a certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.load_verify_locations(folder / "ca.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    made.set_alpn_protocols(["h2"])
    if role is not None:
        made.load_cert_chain(folder / f"{role}.pem", folder / f"{role}-key.pem")
    return made
