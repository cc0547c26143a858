"""What is refused before there is a request, and certificates that change under a running gateway (SDCP-042, 043)."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from sdcp_mono.http_gateway import tls as gateway_tls
from sdcp_mono.http_gateway.limits import GatewayLimits


async def refused(kit: Any, port: int, context: ssl.SSLContext) -> bool:
    """Whether a client gets no response. With TLS 1.3 it may learn only after its own handshake."""
    try:
        async with kit.Wire.connect(port, None, context) as wire:
            await wire.request("GET", "/verifier/")
    except (OSError, ssl.SSLError):
        return True
    return False


@pytest.mark.parametrize("kind", ["none", "rogue", "expired", "future", "server-only", "tls-1.2"])
def test_sdcp_043_wrong_certificates(kit: Any, strangers: Any, caplog: Any, kind: str) -> None:
    now = dt.datetime.now(dt.UTC)
    files = {
        "none": lambda: None,
        "rogue": lambda: strangers("rogue", rogue=True),
        "expired": lambda: strangers("expired", now=now - dt.timedelta(days=3), life=dt.timedelta(days=1)),
        "future": lambda: strangers("future", now=now + dt.timedelta(days=3)),
        "server-only": lambda: strangers("server-only", usages=(ExtendedKeyUsageOID.SERVER_AUTH,)),
        "tls-1.2": lambda: kit_files,
    }
    kit_files = None

    async def test(site: Any) -> None:
        nonlocal kit_files
        kit_files = site.files("router")
        context = kit.tls(files[kind](), kit.directory / "ca.pem")
        if kind == "tls-1.2":
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await refused(kit, site.gateway.port, context)
        assert (await site.curl("router", "GET", "/verifier/")).status == 200  # others are unaffected

    with caplog.at_level(logging.WARNING):
        kit.run(test)
    lines = [record for record in caplog.records if record.name.startswith(("anyio", "sdcp_mono", "asyncio"))]
    assert all(record.exc_info is None for record in lines)
    assert any(record.getMessage().startswith("TLS handshake refused: ") for record in lines)


@pytest.mark.parametrize("alpn", [None, ["http/1.1"]])
def test_sdcp_042_no_h2_no_connection(kit: Any, alpn: list[str] | None) -> None:
    async def test(site: Any) -> None:
        context = ssl.create_default_context(cafile=site.files("router").ca)
        context.load_cert_chain(site.files("router").cert, site.files("router").key)
        if alpn:
            context.set_alpn_protocols(alpn)

        async def answer() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port, ssl=context)
            writer.write(b"GET /verifier/ HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return await reader.readexactly(1)

        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await answer()

    kit.run(test)


def test_plaintext_on_the_tls_port(kit: Any) -> None:
    async def test(site: Any) -> None:
        for hello in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 64):
            reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
            writer.write(hello)
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
            assert b"HTTP/" not in answer  # at most a TLS alert
            writer.close()
        assert (await site.curl("router", "GET", "/verifier/")).status == 200

    kit.run(test)


def test_http_1_is_refused_by_the_application_too(kit: Any) -> None:
    """ALPN already refuses it; the application doesn't rely on that."""
    from sdcp_mono.http_gateway.exchange import Front

    async def never(*_: Any) -> None:
        raise AssertionError

    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    asyncio.run(Front(never)(scope, never, send))
    assert sent[0]["status"] == 505


def test_an_expired_certificate_ends_an_open_connection(kit: Any, strangers: Any, monkeypatch: Any) -> None:
    import time

    async def test(site: Any) -> None:
        async with kit.Wire.connect(site.gateway.port, site.files("router")) as wire:
            assert (await wire.request("GET", "/verifier/")).status == 200
            now = time.time()
            monkeypatch.setattr("sdcp_mono.http_gateway.identity.time.time", lambda: now + 10 * 365 * 86400)
            assert (await wire.request("GET", "/verifier/")).kind == (403, "")

    kit.run(test)


def test_connection_limits(kit: Any) -> None:
    async def test(site: Any) -> None:
        context = kit.tls(site.files("router"))
        async with (
            kit.Wire.connect(site.gateway.port, None, context) as first,
            kit.Wire.connect(site.gateway.port, None, context) as second,
        ):
            assert (await first.request("GET", "/verifier/")).status == 200
            assert (await second.request("GET", "/verifier/")).status == 200
            assert await refused(kit, site.gateway.port, context)
            assert (await site.curl("drafter", "GET", "/verifier/")).status == 200
            assert (await first.request("GET", "/verifier/")).status == 200

    kit.run(test, limits=GatewayLimits(caller_connections=2))


class Mounted:
    """A certificate folder as Kubernetes mounts it: ``name`` -> ``..data/name``, ``..data`` -> a dated folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0

    def publish(self, *sources: tuple[str, Path]) -> None:
        self.count += 1
        folder = self.root / f"..{self.count}"
        folder.mkdir(parents=True)
        for name, path in sources:
            shutil.copy(path, folder / name)
        new = self.root / "..new"
        new.symlink_to(folder.name)
        os.replace(new, self.root / "..data")
        for name, _ in sources:
            if not (self.root / name).exists():
                (self.root / name).symlink_to(Path("..data") / name)


def test_c_46_certificates_reload_without_restart(kit: Any, strangers: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from sdcp_mono import certs

    monkeypatch.setattr(gateway_tls, "RELOAD_SECONDS", 0.0)
    old, new = certs.files(kit.directory, "gateway"), strangers("new", uris=tuple(kit.BASES.values()))
    mounted = Mounted(tmp_path / "mounted")
    mounted.publish(("ca.pem", old.ca), ("gateway.pem", old.cert), ("gateway-key.pem", old.key))
    files = certs.files(tmp_path / "mounted", "gateway")

    async def serial(site: Any) -> bytes:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", site.gateway.port, ssl=kit.tls(site.files("router")), server_hostname="localhost"
        )
        der: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
        writer.transport.abort()
        return der

    async def test(site: Any) -> None:
        def der(path: Path) -> bytes:
            return ssl.PEM_cert_to_DER_cert(path.read_text())

        async with kit.Wire.connect(site.gateway.port, site.files("router")) as running:
            assert await serial(site) == der(old.cert)
            mounted.publish(("ca.pem", old.ca), ("gateway.pem", new.cert), ("gateway-key.pem", old.key))
            assert await serial(site) == der(old.cert)  # a mismatch keeps the old pair
            assert site.gateway.context.failures == 1
            mounted.publish(("ca.pem", old.ca), ("gateway.pem", new.cert), ("gateway-key.pem", new.key))
            assert await serial(site) == der(new.cert)
            assert (site.gateway.context.failures, site.gateway.context.reloads) == (1, 1)
            end = x509.load_pem_x509_certificate(new.cert.read_bytes()).not_valid_after_utc
            assert site.gateway.context.expires == end.timestamp()
            rogue = strangers("rogue", rogue=True)
            ca, key = certs.make_ca(dt.datetime.now(dt.UTC))
            other = certs.save(
                tmp_path / "other", "gateway", *certs.issue(ca, key, "g", now=dt.datetime.now(dt.UTC)), ca
            )
            mounted.publish(("ca.pem", other.ca), ("gateway.pem", new.cert), ("gateway-key.pem", new.key))
            assert await refused(kit, site.gateway.port, kit.tls(site.files("router")))  # its CA is no longer trusted
            assert rogue.cert.exists()
            assert (await running.request("GET", "/verifier/")).status == 200  # an open connection survives it all

    kit.run(test, files=files)
