"""A connection to one peer: who it is, deadlines, retries of what may be repeated, certificates that reload (5.1).

pyqwest verifies the chain and the host name of every connection, but can't check a URI SAN. So before a transport is
used, after any failure and once a minute, a handshake of our own looks at the certificate at that address: its URI SANs
must name the expected identity (SDCP-199). Between two looks, another certificate of the same CA *and* the same host
name would pass; docs/interop.md says what follows from that.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Self
from urllib.parse import urlsplit

import pyqwest
from msgspec import Struct

from sdcp_mono.core.names import normalise_base
from sdcp_mono.core.problems import TooLarge, Unavailable
from sdcp_mono.http_gateway import problems
from sdcp_mono.http_gateway.exchange import CBOR
from sdcp_mono.http_gateway.identity import normalise, uris_of
from sdcp_mono.http_gateway.tls import PemFiles, Stamp, client_context

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 3.0
# Without it, requests that start at once open one connection each before the first has said that it speaks HTTP/2.
CONNECTIONS: Final = 2
CALL_SECONDS: Final = 10.0  # of a call that computes nothing
MAX_RESPONSE: Final = 4 * 2**20  # octets: an output message of 64 Ki tokens is 0.3 MiB, a prompt is never returned
MAX_PROBLEM: Final = 64 * 2**10
TRIES: Final = 4  # of a request that never got an answer
BACKOFF_SECONDS: Final = (0.02, 0.1, 0.5)
IDENTITY_SECONDS: Final = 60.0  # how long a look at the peer's certificate is good for
CLOSE_SECONDS: Final = 30.0  # what an old transport has under way may take after its certificate was replaced
# Any explicit proxy turns the environment's off, and this one is for plain http, which is never used.
NO_PROXY: Final = pyqwest.Proxy("http://127.0.0.1:9", scheme="http")

_LOST: Final = (OSError, TimeoutError, pyqwest.RemoteProtocolError, pyqwest.ReadError, pyqwest.WriteError)


class Answer(Struct, frozen=True):
    """A response of class 2xx."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Peer:
    """Requests to one base URI. Usable from one event loop; close it (``async with``) before the loop ends.

    ``identity`` is the URI SAN the peer's certificate must carry, by default its base URI; ``address`` is where to
    connect if that isn't what the base URI says.
    """

    def __init__(self, base: str, files: PemFiles, *, identity: str | None = None, address: str | None = None) -> None:
        self.base = normalise_base(base)
        self._url = normalise_base(address or base)
        if urlsplit(self._url).scheme != "https":
            raise ValueError(f"{self._url}: a peer is reached over https")
        self._identity = normalise(identity or base)
        self._files = files
        self._stamp = Stamp(files)
        self._transport: pyqwest.HTTPTransport | None = None
        self._client: pyqwest.Client | None = None
        self._checked = float("-inf")
        self._checking = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._transport is not None:
            await self._transport.aclose()
        self._transport = self._client = None

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = CALL_SECONDS,
        limit: int = MAX_RESPONSE,
        content_type: str = CBOR,
    ) -> Answer:
        """One exchange, at most ``seconds`` with all its tries; ``limit`` octets of response.

        Every request of this protocol may be repeated (its answer is the same, or says what has become of it), so one
        that got no answer is. Raises the ``Refusal`` that was answered, ``Unavailable`` where there was none.
        """
        sent = {"accept": f"{CBOR}, */*;q=0.1", **(headers or {})}
        if body is not None:
            sent["content-type"] = content_type
        deadline = time.monotonic() + seconds
        attempt = 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    client = await self._ready()
                    return await self._exchange(client, method, self._url + path, sent, body, limit)
            except _LOST as error:
                self._checked = float("-inf")  # look again before the next use: somebody else may live there now
                pause = BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS)) - 1] * random.uniform(0.5, 1.0)
                if attempt >= TRIES or time.monotonic() + pause >= deadline:
                    raise Unavailable(f"{self.base}: no answer: {_reason(error)}") from error
            await asyncio.sleep(pause)

    async def _exchange(
        self, client: pyqwest.Client, method: str, url: str, headers: Mapping[str, str], body: bytes | None, limit: int
    ) -> Answer:
        async with client.stream(method, url, headers, body) as response:
            told = {name.lower(): value for name, value in response.headers.items()}
            good = 200 <= response.status < 300
            content = await _content(response, limit if good else MAX_PROBLEM)
        if good:
            return Answer(response.status, told, content)
        raise problems.read(response.status, told.get("content-type", ""), content, told.get("retry-after", ""))

    async def _ready(self) -> pyqwest.Client:
        """A client whose peer has been looked at lately."""
        if self._client is None or self._changed():
            self._replace()
        if time.monotonic() - self._checked > IDENTITY_SECONDS:
            async with self._checking:
                if time.monotonic() - self._checked > IDENTITY_SECONDS:
                    await self._check_identity()
                    self._checked = time.monotonic()
        assert self._client is not None
        return self._client

    def _changed(self) -> bool:
        try:
            return self._stamp.changed()
        except OSError:
            return False  # between removal and creation

    def _replace(self) -> None:
        """A transport with the certificate that is in the files now; what the old one has under way may end."""
        try:
            client_context(self._files)  # certificate and key belong together
            transport = pyqwest.HTTPTransport(
                tls_ca_cert=self._files.ca.read_bytes(),
                tls_key=self._files.key.read_bytes(),
                tls_cert=self._files.cert.read_bytes(),
                proxy=NO_PROXY,
                connect_timeout=CONNECT_SECONDS,
                max_connections_per_address=CONNECTIONS,
                follow_redirects=False,
                enable_gzip=False,
                enable_brotli=False,
                enable_zstd=False,
                enable_otel=False,
            )
        except (OSError, ValueError) as error:
            if self._client is None:
                raise Unavailable(f"{self.base}: our own certificate can't be used: {error}") from error
            log.error("the certificate in %s can't be used, the old one stays: %s", self._files.cert, error)
            return
        if self._transport is not None:
            task = asyncio.get_running_loop().create_task(_close_later(self._transport))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._transport, self._client = transport, pyqwest.Client(transport)
        self._checked = float("-inf")

    async def _check_identity(self) -> None:
        parts = urlsplit(self._url)
        assert parts.hostname is not None
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(
                parts.hostname, parts.port or 443, ssl=client_context(self._files), server_hostname=parts.hostname
            )
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        names = uris_of(tls.getpeercert(True) or b"")
        writer.transport.abort()
        if self._identity not in names:
            raise Unavailable(f"{self.base}: the certificate there names {', '.join(names) or 'nobody'}")


async def _content(response: pyqwest.Response, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content:
        size += len(part)
        if size > limit:
            raise TooLarge(f"response: more than {limit} octets")
        parts.append(bytes(part))
    return b"".join(parts)


async def _close_later(transport: pyqwest.HTTPTransport) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(CLOSE_SECONDS)
    await transport.aclose()


def _reason(error: BaseException) -> str:
    """What went wrong, for a person. A refused client certificate shows itself as a connection that just ends."""
    text = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ConnectionResetError | ssl.SSLError) or "closed" in text:
        return f"{text} (our certificate was probably rejected)"
    return text
