"""Mutual TLS from PEM files that may be replaced at any time, on both sides (C-46).

gRPC verifies the chain, the validity and, for a client, the host name. A new connection uses the pair that is in the
files now; a pair that doesn't fit leaves the old one in use and is logged once.
"""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

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


class Pems:
    """The contents of the files, whole and fitting. ``failures`` counts the times that new ones could not be used."""

    def __init__(self, files: PemFiles) -> None:
        """Raises ``OSError`` (``ssl.SSLError`` is one) for files that are missing or don't belong together."""
        self._files = files
        self._seen = self._look()
        self._looked = time.monotonic()
        self.ca, self.cert, self.key = self._load()
        self.failures = 0

    def renewed(self) -> bool:
        """Whether they have changed since this was last asked; looks once a second at most."""
        now = time.monotonic()
        if now - self._looked < RELOAD_SECONDS:
            return False
        self._looked = now
        try:
            if (seen := self._look()) == self._seen:
                return False
            self._seen = seen
            self.ca, self.cert, self.key = self._load()
        except OSError as error:
            self.failures += 1
            log.error("the old certificate stays in use: %s: %s", self._files.cert, error.strerror or error)
            return False
        log.info("the certificate that is now in %s is used", self._files.cert)
        return True

    def _load(self) -> tuple[bytes, bytes, bytes]:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # gRPC would only say "handshake failed", later
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
        return files.ca.read_bytes(), files.cert.read_bytes(), files.key.read_bytes()

    def _look(self) -> tuple[tuple[int, int, int, int], ...]:
        stats = (path.stat() for path in (self._files.ca, self._files.cert, self._files.key))
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def server_credentials(pems: Pems) -> grpc.ServerCredentials:
    """Clients need a certificate of the CA. gRPC asks for the configuration before each handshake."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

    def renewed() -> Any:  # None, the old one, is missing in the library's type
        return configuration() if pems.renewed() else None

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_authentication=True)


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
