"""Who calls over gRPC: the client certificate's one URI SAN (AMB-039), by the rules of the HTTP gateway.

Instances of a pool share a certificate, whose URI SAN is the pool's identity. Which of them calls is in the metadata of
the call, and holds if it is the identity itself or one label below it: members of a pool are trusted alike.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any, Final, Protocol

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from msgspec import Struct, structs

from sdcp_mono.core.messages import Assignment
from sdcp_mono.core.names import is_member, normalise_base
from sdcp_mono.core.problems import Forbidden, Malformed

CACHED: Final = 1024  # certificates parsed and remembered: more than a server has peers
TLS_VERSION: Final = (b"TLSv1.3",)
INSTANCE: Final = "sdcp-instance"  # metadata: the caller's base URI


class Access(Protocol):
    """Which identities act as what; ``http_gateway.identity.Access`` is one. ``caller`` has a ``uri``.

    ``router``, ``verifier`` and ``proposer`` raise ``Forbidden`` or ``NotAssigned`` for who isn't one.
    """

    @property
    def routers(self) -> Container[str]: ...
    @property
    def verifiers(self) -> Container[str]: ...
    @property
    def instances(self) -> Mapping[str, str]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    def router(self, caller: Any) -> None: ...
    def verifier(self, caller: Any) -> None: ...
    def proposer(self, caller: Any) -> None: ...
    def is_reader(self, caller: Any) -> bool: ...
    def drafts(self, caller: Any) -> bool: ...


class Caller(Struct, frozen=True):
    """An authenticated caller; ``uri`` is normalised."""

    uri: str


def caller_of(context: grpc.aio.ServicerContext[Any, Any], access: Access) -> Caller:
    """The identity behind a call; raises ``Forbidden``."""
    told = context.auth_context()
    if tuple(told.get("ssl_tls_version", ())) != TLS_VERSION:  # gRPC for Python can't refuse older ones by itself
        raise Forbidden("TLS 1.3 is required")
    leaf = next(iter(told.get("x509_pem_cert", ())), b"")
    uris, fingerprint, expires = _read(leaf)
    if expires <= time.time():  # a connection can outlive its certificate
        raise Forbidden("the client certificate has expired")
    identity = access.aliases.get(fingerprint)
    if identity is None:
        if len(uris) != 1:
            raise Forbidden(f"the client certificate names {len(uris)} URIs; its identity is exactly one URI SAN")
        identity = access.aliases.get(uris[0], uris[0])
    return Caller(_instance(context, identity))


def _instance(context: grpc.aio.ServicerContext[Any, Any], identity: str) -> str:
    """Who of ``identity`` calls: what the metadata says, if it may."""
    told = [value for key, value in context.invocation_metadata() or () if key == INSTANCE]
    if not told:
        return identity
    instance = normalise(told[0]) if len(told) == 1 and isinstance(told[0], str) else ""
    if instance != identity and not is_member(instance, identity):
        raise Forbidden(f"{INSTANCE}: neither this certificate's identity nor an instance one label below it")
    return instance


def normalise(uri: str) -> str:
    """A base URI in its one spelling (AMB-040); any other URI, such as a URN, as it is."""
    try:
        return normalise_base(uri)
    except Malformed:
        return uri


def normalised(assignment: Assignment) -> Assignment:
    """With its base URIs in their one spelling, so that roles may compare them as they are."""
    return structs.replace(assignment, drafter=normalise(assignment.drafter), verifier=normalise(assignment.verifier))


@lru_cache(CACHED)
def _read(leaf: bytes) -> tuple[tuple[str, ...], str, float]:
    """URI SANs, SHA-256 fingerprint and end (seconds since 1970) of a certificate; a broken one names nobody."""
    try:
        cert = x509.load_pem_x509_certificate(leaf)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = tuple(normalise(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        uris = ()
    except ValueError:
        return (), "", 0.0
    return uris, f"sha256:{cert.fingerprint(hashes.SHA256()).hex()}", cert.not_valid_after_utc.timestamp()
