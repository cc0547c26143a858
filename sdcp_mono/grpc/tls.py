"""Mutual TLS from PEM files that may be replaced at any time, on both sides (C-46).

gRPC verifies the chain, the validity and, for a client, the host name. A new connection uses the pair that is in the
files now; a pair that doesn't fit leaves the old one in use and is logged once.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from cryptography import x509

log = logging.getLogger(__name__)

RELOAD_SECONDS: Final = 1.0  # how often the files are looked at; a new pair must be used within 10 s


class PemFiles(Protocol):
    """One party's PEM files: the CA it trusts, its certificate (chain) and its private key."""

    @property
    def ca(self) -> Path: ...
    @property
    def cert(self) -> Path: ...
    @property
    def key(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class Pem:
    """The octets of CA, certificate and key; they belong together."""

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)

    @property
    def days_left(self) -> float:
        """Until the certificate ends, for a gauge."""
        ends = x509.load_pem_x509_certificate(self.cert).not_valid_after_utc
        return (ends.timestamp() - time.time()) / 86_400


class Pems:
    """The contents of the files, whole and fitting; one for all connections of a process, and usable from any thread.

    ``failures`` counts the times that new ones could not be used.
    """

    def __init__(self, files: PemFiles) -> None:
        """Raises ``OSError`` (``ssl.SSLError`` is one) for files that are missing or don't belong together."""
        self._files = files
        self._lock = threading.Lock()
        self._seen = self._look()
        self._looked = time.monotonic()
        self._now = self._load()
        self.failures = 0

    def current(self) -> Pem:
        """What is in the files now, the same object until they change; looks once a second at most."""
        with self._lock:
            if time.monotonic() - self._looked >= RELOAD_SECONDS:
                self._looked = time.monotonic()
                self._refresh()
            return self._now

    def _refresh(self) -> None:
        try:
            if (seen := self._look()) == self._seen:
                return
            self._seen = seen
            self._now = self._load()
        except OSError as error:
            self.failures += 1
            log.error("the old certificate stays in use: %s: %s", self._files.cert, error.strerror or error)
        else:
            log.info("the certificate that is now in %s is used", self._files.cert)

    def _load(self) -> Pem:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # gRPC would only say "handshake failed", later
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
        return Pem(files.ca.read_bytes(), files.cert.read_bytes(), files.key.read_bytes())

    def _look(self) -> tuple[tuple[int, int, int, int], ...]:
        stats = (path.stat() for path in (self._files.ca, self._files.cert, self._files.key))
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def server_credentials(pems: Pems) -> grpc.ServerCredentials:
    """Clients need a certificate of the CA. gRPC asks for the configuration before each handshake."""
    used = pems.current()

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)

    def renewed() -> Any:  # None, the old one, is missing in the library's type
        nonlocal used
        before, used = used, pems.current()
        return None if used is before else configuration(used)

    return grpc.dynamic_ssl_server_credentials(configuration(used), renewed, require_client_authentication=True)


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
