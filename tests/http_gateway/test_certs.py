"""The development CA (issue: ``certs init``)."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from sdcp_mono import certs


def load(directory: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes())


def test_init_writes_every_role_and_is_idempotent(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    assert certs.init(directory) == ("ca", *certs.ROLES, "gateway")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert certs.init(directory) == ()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.glob("*-key.pem"))
    assert directory.stat().st_mode & 0o077 == 0


def test_certificates_say_what_they_are_for(certificates: Path) -> None:
    ca = load(certificates, "ca")
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).critical
    for name in certs.ROLES:
        cert = load(certificates, name)
        cert.verify_directly_issued_by(ca)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"https://127.0.0.1:8443/{name}/"]
        assert names.get_values_for_type(x509.DNSName) == ["localhost"]
        assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
        constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (constraints.critical, constraints.value.ca) == (True, False)
        usage = cert.extensions.get_extension_for_class(x509.KeyUsage)
        assert (usage.critical, usage.value.digital_signature, usage.value.key_cert_sign) == (True, True, False)
        usages = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert {usage.dotted_string for usage in usages} == {"1.3.6.1.5.5.7.3.1", "1.3.6.1.5.5.7.3.2"}
        own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        issuer = cert.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        assert issuer.key_identifier == own.digest


def test_what_expires_soon_or_names_others_is_made_anew(tmp_path: Path) -> None:
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    roles = {"a": "https://a/", "b": "https://b/"}
    certs.init(tmp_path, roles=roles, now=now)
    assert certs.init(tmp_path, roles=roles, now=now + dt.timedelta(days=59)) == ()
    assert certs.init(tmp_path, roles=roles, now=now + dt.timedelta(days=61)) == ("a", "b", "gateway")
    later = now + dt.timedelta(days=61)
    assert certs.init(tmp_path, roles=roles | {"b": "https://c/"}, now=later) == ("b", "gateway")
    assert certs.init(tmp_path, roles=roles | {"b": "https://c/"}, now=later, hosts=("h",)) == ("a", "b", "gateway")
    (tmp_path / "a-key.pem").unlink()
    assert certs.init(tmp_path, roles=roles | {"b": "https://c/"}, now=later, hosts=("h",)) == ("a",)
    assert round(certs.days_left(tmp_path / "a.pem", later)) == 90


def test_a_ca_without_its_key_is_left_alone(tmp_path: Path) -> None:
    certs.init(tmp_path)
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(ValueError, match=r"ca-key\.pem is missing"):
        certs.init(tmp_path)


def test_the_gateway_names_all_roles(certificates: Path) -> None:
    names: Any = load(certificates, "gateway").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.UniformResourceIdentifier)) == set(certs.base_uris().values())
