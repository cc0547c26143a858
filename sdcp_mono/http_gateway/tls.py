"""TLS 1.3 with client certificates, HTTP/2 by ALPN or nothing, certificates that reload by themselves (5.1, C-46).

Law of this module: what a connection may not have is refused in its handshake, before a request exists.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from weakref import WeakSet

from sdcp_mono.http_gateway.identity import expiry_of, uris_of

log = logging.getLogger(__name__)

RELOAD_SECONDS: Final = 1.0  # how often new connections look at the files; a new pair must be used within 10 s


class PemFiles(Protocol):
    """One party's PEM files: the CA it trusts, its certificate (chain) and its private key."""

    @property
    def ca(self) -> Path: ...
    @property
    def cert(self) -> Path: ...
    @property
    def key(self) -> Path: ...


def server_context(files: PemFiles) -> ssl.SSLContext:
    """Raises ``OSError`` or ``ssl.SSLError`` (a kind of it) for files that are missing or don't belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # no resumption: a certificate is checked again at each connect
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    return context


def client_context(files: PemFiles) -> ssl.SSLContext:
    """The same for a caller; host names are checked, the identity is ``client.py``'s to check."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    return context


class Stamp:
    """Notices that files have changed, also when a symbolic link on their way now leads elsewhere."""

    def __init__(self, files: PemFiles) -> None:
        self._paths = (files.ca, files.cert, files.key)
        self._seen = self._look()
        self._looked = time.monotonic()

    def changed(self) -> bool:
        """Whether the files differ from when this last said so; looks once a second at most. May raise ``OSError``."""
        now = time.monotonic()
        if now - self._looked < RELOAD_SECONDS:
            return False
        self._looked = now
        seen = self._look()
        changed, self._seen = seen != self._seen, seen
        return changed

    def _look(self) -> tuple[tuple[int, int, int, int], ...]:
        stats = (path.stat() for path in self._paths)
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


class Connections:
    """The live connections of a listener, and how many there may be in all and of one identity."""

    def __init__(self, total: int, of_one: int) -> None:
        self._total = total
        self._of_one = of_one
        self._live: WeakSet[Connection] = WeakSet()
        self.refused = 0  # handshakes refused, for whatever reason

    def __len__(self) -> int:
        return len(self._live)

    def admit(self, connection: Connection) -> None:
        """After the handshake; raises ``ssl.SSLError``, which ends the connection."""
        if connection.selected_alpn_protocol() != "h2":
            raise ssl.SSLError(1, "the client does not offer h2 by ALPN")
        connection.uris = uris_of(connection.getpeercert(True) or b"")
        same = sum(other.uris == connection.uris for other in list(self._live))
        if same >= self._of_one:
            raise ssl.SSLError(1, f"the identity has {same} connections already")
        if len(self._live) >= self._total:
            raise ssl.SSLError(1, f"the listener has {self._total} connections already")
        self._live.add(connection)

    def release(self, connection: Connection) -> None:
        """It is over; one that ends without a word leaves when it is garbage."""
        self._live.discard(connection)


class Connection(ssl.SSLObject):
    """The server's side of one connection."""

    uris: Sequence[str] = ()
    connections: Connections | None = None
    _admitted = False

    def do_handshake(self) -> None:
        super().do_handshake()
        if not self._admitted and self.connections is not None:
            self.connections.admit(self)
            self._admitted = True

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """At the peer's end of the connection it no longer counts; the server keeps it until it has idled out."""
        try:
            data = super().read(len, buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            self._over()
            raise
        if not data:
            self._over()
        return data

    def unwrap(self) -> Any:
        """Send close_notify and don't wait for the peer's: a silent peer would hold the connection open."""
        self._over()
        try:
            return super().unwrap()
        except ssl.SSLWantReadError:
            return None

    def _over(self) -> None:
        if self.connections is not None:
            self.connections.release(self)


class ReloadingContext(ssl.SSLContext):
    """A server context that follows its files: a new connection uses the pair that is there now.

    A pair that doesn't fit, or a file that is missing, keeps the old one and is logged once; ``failures`` counts. Each
    reload makes a whole context, so a CA that was removed is no longer trusted. Open connections stay as they are.
    """

    _files: PemFiles
    _stamp: Stamp
    _current: ssl.SSLContext
    _lock: threading.Lock
    connections: Connections
    failures: int
    reloads: int
    expires: float  # the end of the certificate in use, seconds since 1970: for a gauge

    @classmethod
    def of(cls, files: PemFiles, connections: Connections) -> ReloadingContext:
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._files = files
        context._stamp = Stamp(files)
        context._current = server_context(files)
        context.expires = expiry_of(files.cert)
        context._lock = threading.Lock()
        context.connections = connections
        context.failures = context.reloads = 0
        return context

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Called for each new connection, on a worker thread."""
        with self._lock:
            self._follow()
            current = self._current
        current.sslobject_class = Connection
        made = current.wrap_bio(incoming, outgoing, server_side=server_side)
        assert isinstance(made, Connection)
        made.connections = self.connections
        return made

    def _follow(self) -> None:
        try:
            if self._stamp.changed():
                self._current = server_context(self._files)
                self.expires = expiry_of(self._files.cert)
                self.reloads += 1
                log.info("the gateway uses the certificate that is now in %s", self._files.cert)
        except OSError as error:
            self.failures += 1
            log.error("the gateway keeps its old certificate: %s: %s", self._files.cert, error.strerror or error)


class HandshakeLog(logging.Filter):
    """Failed handshakes as one line instead of a traceback (C-46)."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            cause = error.__cause__ or error
            record.msg, record.args = "TLS handshake refused: %s", (str(cause) or type(cause).__name__,)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def quiet_handshakes() -> None:
    """Make the server library log refused handshakes in one line; may be called again."""
    logger = logging.getLogger("anyio.streams.tls")
    if not any(isinstance(known, HandshakeLog) for known in logger.filters):
        logger.addFilter(HandshakeLog())
