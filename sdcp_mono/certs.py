"""A development CA and role certificates, so that mutual TLS works from the first start (5.1, 9).

Every certificate's identity is one URI SAN, the role's base URI (AMB-039); a role both serves and calls, so each has
serverAuth and clientAuth. Production uses the platform's CA instead (docs/interop.md).
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS: Final = 3650  # it lives on a developer's disk; replacing it means telling every peer
LEAF_DAYS: Final = 90  # short, so that renewal is exercised long before it matters
RENEW_DAYS: Final = 30  # a leaf with less left is made anew
SKEW: Final = dt.timedelta(minutes=5)  # peers' clocks differ
HOSTS: Final = ("localhost", "127.0.0.1", "::1")
# verifier-b and drafter-b are for tests, which need two of a kind.
ROLES: Final = ("router", "verifier", "verifier-b", "drafter", "drafter-b", "frontend", "mlc", "operator")
KIT: Final = "kit"  # folder below the node's: the same CA, other identities, which the conformance kit plays
GATEWAY: Final = "gateway"  # serves all roles on one port, so it names all of them; it is no client's identity


@dataclass(frozen=True, slots=True)
class Certificates:
    """Where one party's PEM files are: the CA it trusts, its certificate and its private key (0600)."""

    ca: Path
    cert: Path
    key: Path


def files(directory: Path, name: str) -> Certificates:
    """``ca.pem``, ``<name>.pem`` and ``<name>-key.pem`` in ``directory``."""
    return Certificates(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}-key.pem")


def base_uris(port: int = 8443, host: str = "127.0.0.1") -> dict[str, str]:
    """The default base URI of every role on one gateway port: ``https://127.0.0.1:8443/verifier/`` and so on."""
    authority = f"[{host}]" if ":" in host else host
    return {role: f"https://{authority}:{port}/{role}/" for role in ROLES}


def init(
    directory: Path,
    *,
    hosts: Sequence[str] = HOSTS,
    roles: Mapping[str, str] | None = None,
    pools: Mapping[str, str] | None = None,
    ca: Path | None = None,
    now: dt.datetime | None = None,
) -> tuple[str, ...]:
    """Make the CA and one certificate a role, and ``gateway``, which carries the URIs of all of them.

    ``roles`` maps a file name to its identity, by default ``base_uris()``; ``hosts`` are DNS names and IP addresses.
    ``pools`` are further ones whose certificate all instances share: it names the identity's host and ``*.`` below it.
    ``ca`` is the folder of the CA that signs, by default ``directory`` itself, where one is made if there is none. What
    is there stays unless it expires within 30 days, names other hosts or URIs, or is not of this CA. Answers the names
    it wrote. Raises ``ValueError`` for a CA whose key is missing, rather than replacing what peers trust.
    """
    roles = dict(base_uris() if roles is None else roles)
    now = now or dt.datetime.now(dt.UTC)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    issuer, issuer_key, made = _authority(ca or directory, now)
    written = ["ca"] if made else []
    if ca is not None:
        _write(directory / "ca.pem", issuer.public_bytes(serialization.Encoding.PEM), 0o644)
    wanted: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        name: ((uri,), tuple(hosts)) for name, uri in roles.items()
    }
    wanted[GATEWAY] = tuple(roles.values()), tuple(hosts)
    for name, uri in (pools or {}).items():
        host = str(urlsplit(uri).hostname)
        wanted[name] = (uri,), (host, f"*.{host}")
    for name, (uris, names) in wanted.items():
        target = files(directory, name)
        if not _is_good(target, issuer, names, uris, now):
            cert, key = issue(issuer, issuer_key, name, hosts=names, uris=uris, now=now)
            _write(target.key, _key_pem(key), 0o600)
            _write(target.cert, cert.public_bytes(serialization.Encoding.PEM), 0o644)
            written.append(name)
    return tuple(written)


def _authority(directory: Path, now: dt.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, bool]:
    """The CA in ``directory``, and whether it had to be made."""
    ca_files = files(directory, "ca")
    if ca_files.ca.exists():
        if not ca_files.key.exists():
            raise ValueError(f"{ca_files.key} is missing: this CA can make no certificates; remove {ca_files.ca} first")
        return *load_ca(directory), False
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca, key = make_ca(now)
    _write(ca_files.key, _key_pem(key), 0o600)
    _write(ca_files.ca, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    return ca, key, True


def issue(
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    name: str,
    *,
    hosts: Sequence[str] = HOSTS,
    uris: Sequence[str] = (),
    now: dt.datetime,
    life: dt.timedelta = dt.timedelta(days=LEAF_DAYS),
    usages: Sequence[x509.ObjectIdentifier] = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A leaf certificate with ``uris``, DNS and IP names from ``hosts``; P-256."""
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    names += [_host_name(host) for host in hosts]
    builder = (
        _builder(name, ca.subject, key, now, life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
        .add_extension(_issuer_key(ca), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(ca_key, hashes.SHA256()), key


def load_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The CA that ``init`` made in ``directory``."""
    return x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes()), _load_key(directory / "ca-key.pem")


def save(
    directory: Path, name: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> Certificates:
    """Write one party's files to ``directory``, the CA among them."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = files(directory, name)
    _write(target.ca, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(target.key, _key_pem(key), 0o600)
    _write(target.cert, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return target


def days_left(cert: Path, now: dt.datetime | None = None) -> float:
    """Days until the first certificate in a PEM file expires, for a gauge."""
    now = now or dt.datetime.now(dt.UTC)
    return (x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc - now) / dt.timedelta(days=1)


def make_ca(now: dt.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A self-signed CA that may sign leaves only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"sdcp-mono development CA {now:%Y-%m-%d}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(name, subject, key, now, dt.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
    )
    return builder.sign(key, hashes.SHA256()), key


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: dt.datetime, life: dt.timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=ca, crl_sign=ca, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _issuer_key(ca: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _is_good(
    target: Certificates, ca: x509.Certificate, hosts: Sequence[str], uris: Sequence[str], now: dt.datetime
) -> bool:
    try:
        cert = x509.load_pem_x509_certificate(target.cert.read_bytes())
        cert.verify_directly_issued_by(ca)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        wanted = [*(x509.UniformResourceIdentifier(uri) for uri in uris), *map(_host_name, hosts)]
        fits = set(names) == set(wanted) and cert.public_key() == _load_key(target.key).public_key()
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return fits and cert.not_valid_after_utc - now > dt.timedelta(days=RENEW_DAYS)


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is not an EC private key")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file at once and never with wider permissions than ``mode``; readers see the old one or the new."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
