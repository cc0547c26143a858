"""Who calls: the client certificate's one URI SAN, and what each identity may do (section 9, AMB-039 to 049).

Roles are allow lists of identities, so they are portable over CAs. An identity is compared after normalisation, whole.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from msgspec import Struct, field, structs

from sdcp_mono.core.messages import Assignment
from sdcp_mono.core.names import Bases, normalise_base
from sdcp_mono.core.problems import Forbidden, Malformed, NotAssigned

CACHED: Final = 1024  # certificates parsed and remembered: more than one server has connections


class Identity(Struct, frozen=True):
    """An authenticated caller. ``uri`` is normalised; ``expires`` is its certificate's end in seconds since 1970."""

    uri: str
    expires: float


def normalise(uri: str) -> str:
    """A base URI in its one spelling (AMB-040); any other URI, such as a URN, as it is."""
    try:
        return normalise_base(uri)
    except Malformed:
        return uri


def normalised(assignment: Assignment) -> Assignment:
    """With its base URIs in their one spelling, so that roles may compare them as they are."""
    return structs.replace(assignment, drafter=normalise(assignment.drafter), verifier=normalise(assignment.verifier))


class Access(Struct, frozen=True):
    """Which identities act as what; made by ``Access.of``, which normalises them and understands ``https://*.host/``.

    ``drafters`` None: every identity of the CA that is in no other list may draft where a router assigns it (AMB-076).
    ``instances`` maps names in status reports to base URIs (AMB-047), ``aliases`` a URI SAN or ``sha256:<hex>`` of a
    certificate to the identity it stands for (AMB-039; a SPIFFE id can't also carry a base URI).
    """

    routers: Container[str] = frozenset()
    verifiers: Container[str] = frozenset()
    frontends: Container[str] = frozenset()
    drafters: Container[str] | None = None
    instances: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        routers: Iterable[str] = (),
        verifiers: Iterable[str] = (),
        frontends: Iterable[str] = (),
        drafters: Iterable[str] | None = None,
        instances: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> Access:
        def all_of(uris: Iterable[str]) -> Bases:
            return Bases.of(map(normalise, uris))

        return cls(
            routers=all_of(routers),
            verifiers=all_of(verifiers),
            frontends=all_of(frontends),
            drafters=None if drafters is None else all_of(drafters),
            instances={name: normalise(base) for name, base in (instances or {}).items()},
            aliases={normalise(name): normalise(base) for name, base in (aliases or {}).items()},
        )

    def router(self, caller: Identity) -> None:
        """Only the router may; raises ``Forbidden``."""
        if caller.uri not in self.routers:
            raise Forbidden("only the router may do this")

    def verifier(self, caller: Identity) -> None:
        if caller.uri not in self.verifiers:
            raise Forbidden("only a verifier may do this")

    def is_reader(self, caller: Identity) -> bool:
        """Router and front ends read every session's output (AMB-049)."""
        return caller.uri in self.routers or caller.uri in self.frontends

    def drafts(self, caller: Identity) -> bool:
        if self.drafters is None:
            return not (self.is_reader(caller) or caller.uri in self.verifiers)
        return caller.uri in self.drafters

    def proposer(self, caller: Identity) -> None:
        """Who may propose at all; of which session is the verifier's to say (6.3 step 1). Raises ``NotAssigned``."""
        if not self.drafts(caller):
            raise NotAssigned("only the assigned drafter may do this")


def identity_of(scope: Mapping[str, Any], access: Access) -> Identity:
    """The identity behind a request, from the server's TLS extension; raises ``Forbidden``.

    Two shapes exist: PEM chain, leaf first (the ASGI extension), and the leaf's DER (uvicorn's proposal).
    """
    tls = (scope.get("extensions") or {}).get("tls") or {}
    chain = tls.get("client_cert_chain") or ()
    leaf: str | bytes | None = chain[0] if chain else tls.get("client_cert")
    if not leaf:
        raise Forbidden("a client certificate is required")
    uris, fingerprint, expires = _read(leaf)
    if expires <= time.time():  # a connection can outlive its certificate
        raise Forbidden("the client certificate has expired")
    if (alias := access.aliases.get(fingerprint)) is not None:
        return Identity(alias, expires)
    if len(uris) != 1:
        raise Forbidden(f"the client certificate names {len(uris)} URIs; its identity is exactly one URI SAN")
    return Identity(access.aliases.get(uris[0], uris[0]), expires)


def uris_of(der: bytes) -> tuple[str, ...]:
    """The normalised URI SANs of a certificate."""
    return _read(der)[0]


def expiry_of(cert: Path) -> float:
    """When the first certificate of a PEM file ends, in seconds since 1970; 0 where there is none."""
    return _read(cert.read_text())[2]


@lru_cache(CACHED)
def _read(leaf: str | bytes) -> tuple[tuple[str, ...], str, float]:
    """URI SANs, SHA-256 fingerprint and end of a certificate; one that can't be read names nobody."""
    try:
        cert = x509.load_der_x509_certificate(ssl.PEM_cert_to_DER_cert(leaf) if isinstance(leaf, str) else leaf)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = tuple(normalise(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        uris = ()
    except ValueError:
        return (), "", 0.0
    return uris, f"sha256:{cert.fingerprint(hashes.SHA256()).hex()}", cert.not_valid_after_utc.timestamp()
