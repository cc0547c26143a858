"""Who gets no connection, and certificates that change under running servers and channels (C-46)."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from sdcp_mono import certs
from sdcp_mono.core.messages import Decline
from sdcp_mono.core.ports import Chunk
from sdcp_mono.core.problems import Forbidden, Unavailable
from sdcp_mono.grpc import tls
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.grpc.client import VerifierClient
from sdcp_mono.grpc.pb import sdcp_pb2 as pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc
from sdcp_mono.grpc.services import VerifierService
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.telemetry.certificates import CertificateMetrics

DAY = dt.timedelta(days=1)
DECLINE = Decline(session=bytes(16), epoch=1, round=1, drafter="https://old/")


@pytest.fixture
def strangers(kit: Any) -> Callable[..., certs.Certificates]:
    """Certificates that something may be wrong with, by name; the CA they trust is everybody's."""
    now = dt.datetime.now(dt.UTC)

    def make(name: str, *, rogue: bool = False, **changes: Any) -> certs.Certificates:
        ca, key = certs.make_ca(now) if rogue else certs.load_ca(kit.directory)
        settings: dict[str, Any] = {"uris": (kit.BASES["router"],), "now": now, **changes}
        cert, own = certs.issue(ca, key, name, **settings)
        return certs.save(kit.work / "strangers" / name, name, cert, own, certs.load_ca(kit.directory)[0])

    return make


def service(kit: Any, port: Any) -> VerifierService:
    return VerifierService(port, kit.CARD, lambda session: None)


def told_no_tracebacks(caplog: Any, capfd: Any) -> None:
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["wrong CA", "expired", "not yet valid"])
def test_c_46_a_wrong_client_certificate_gets_no_connection(
    kit: Any, strangers: Any, caplog: Any, capfd: Any, kind: str
) -> None:
    now = dt.datetime.now(dt.UTC)
    changes: dict[str, Any] = {
        "wrong CA": {"rogue": True},
        "expired": {"now": now - 3 * DAY, "life": DAY},
        "not yet valid": {"now": now + 3 * DAY},
    }[kind]

    async def test() -> None:
        port = kit.Heard(open=kit.STATE)
        async with kit.server(service(kit, port)) as server, kit.channel(server, "router") as good:
            async with kit.channel(server, "", files=strangers(kind.replace(" ", "-"), **changes)) as channel:
                with pytest.raises(Unavailable):
                    await channel.call(rpc.VerifierStub, "Card", pb.Nothing(), 10.0)
            await VerifierClient(good).card()  # others are unaffected
        assert port.calls == []

    kit.run(test())
    told_no_tracebacks(caplog, capfd)


def test_c_46_no_client_certificate_gets_no_connection(kit: Any, caplog: Any, capfd: Any) -> None:
    async def test() -> None:
        async with kit.server(service(kit, kit.Heard())) as server:
            credentials = grpc.ssl_channel_credentials(kit.files("router").ca.read_bytes())
            async with grpc.aio.secure_channel(server.address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rpc.VerifierStub(channel).Card(pb.Nothing(), timeout=10.0)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    kit.run(test())
    told_no_tracebacks(caplog, capfd)


@pytest.mark.parametrize("uris", [(), ("https://a.example/", "https://b.example/"), ("https://nobody.example/",)])
def test_c_46_a_wrong_san_may_do_nothing(kit: Any, strangers: Any, caplog: Any, capfd: Any, uris: Any) -> None:
    async def test() -> None:
        port = kit.Heard(open=kit.STATE)
        async with (
            kit.server(service(kit, port)) as server,
            kit.channel(server, "", files=strangers("stranger", uris=uris)) as channel,
        ):
            with pytest.raises(Forbidden):
                await VerifierClient(channel).open(kit.OPENING)
        assert port.calls == []

    kit.run(test())
    told_no_tracebacks(caplog, capfd)


def test_c_46_a_server_that_its_certificate_does_not_name_is_not_spoken_to(kit: Any, strangers: Any) -> None:
    async def test() -> None:
        port = kit.Heard(open=kit.STATE)
        files = strangers("elsewhere", hosts=("elsewhere.example",), uris=(kit.BASES["verifier"],))
        async with kit.server(service(kit, port), files=files) as server, kit.channel(server, "router") as channel:
            with pytest.raises(Unavailable):
                await VerifierClient(channel).open(kit.OPENING)
        assert port.calls == []

    kit.run(test())


def test_c_46_plaintext_to_the_tls_port_is_refused(kit: Any, caplog: Any, capfd: Any) -> None:
    async def test() -> None:
        async with kit.server(service(kit, kit.Heard())) as server, kit.channel(server, "router") as good:
            for hello in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 64):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(hello)
                try:
                    answer = await reader.read()
                except ConnectionResetError:
                    answer = b""
                assert b"HTTP/" not in answer
                writer.close()
            async with grpc.aio.insecure_channel(server.address) as plain:
                with pytest.raises(grpc.aio.AioRpcError):
                    await rpc.VerifierStub(plain).Card(pb.Nothing(), timeout=10.0)
            await VerifierClient(good).card()

    kit.run(test())
    told_no_tracebacks(caplog, capfd)


# ---- rotation ------------------------------------------------------------------------------------------


class Mounted:
    """A certificate folder as Kubernetes mounts it: ``name`` -> ``..data/name``, ``..data`` -> a dated folder."""

    def __init__(self, root: Path, files: certs.Certificates) -> None:
        self.root, self.count = root, 0
        self.files = certs.files(root, "tls")
        self.publish(files)

    def publish(self, files: certs.Certificates, *, ca: bytes | None = None, key: Path | None = None) -> None:
        self.count += 1
        folder = self.root / f"..{self.count}"
        folder.mkdir(parents=True)
        (folder / self.files.ca.name).write_bytes(files.ca.read_bytes() if ca is None else ca)
        shutil.copy(files.cert, folder / self.files.cert.name)
        shutil.copy(key or files.key, folder / self.files.key.name)
        new = self.root / "..new"
        new.symlink_to(folder.name)
        os.replace(new, self.root / "..data")
        for file in (self.files.ca, self.files.cert, self.files.key):
            if not file.exists():
                file.symlink_to(Path("..data") / file.name)


def der(files: certs.Certificates) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.cert.read_text())


async def shown(server: Any, files: certs.Certificates) -> bytes:
    """The certificate that a new connection to ``server`` is shown."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="localhost")
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.transport.abort()
    return found


class Slow:
    """A verifier whose output comes when the test says so, and that remembers who proposed."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.asked, self.free = asyncio.Event(), asyncio.Event()
        self.callers: list[str] = []

    async def chunk(self, session: bytes, from_: int, wait_ms: int | None = None) -> Chunk:
        if from_ == 0:
            return Chunk(0, 1, (7,), (), False)
        self.asked.set()
        await self.free.wait()
        return Chunk(from_, 1, (8,), (), True, 4)

    async def decline(self, decline: Any, caller: str) -> Any:
        self.callers.append(caller)
        return self.state


def test_c_46_both_sides_use_a_new_pair_and_a_running_stream_survives(
    kit: Any, strangers: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tls, "RELOAD_SECONDS", 0.0)
    old_client, new_client = strangers("old", uris=("https://old/",)), strangers("new", uris=("https://new/",))
    renewed = strangers("renewed", uris=(kit.BASES["verifier"],))
    server_files = Mounted(kit.work / "server", kit.files("verifier"))
    client_files = Mounted(kit.work / "client", old_client)
    both = ("https://old/", "https://new/")
    access = Access.of(drafters=both, frontends=both)

    async def test() -> None:
        port = Slow(kit.STATE)
        async with (
            kit.server(service(kit, port), files=server_files.files, access=access) as server,
            kit.channel(server, "", files=client_files.files) as channel,
        ):
            client = VerifierClient(channel)
            decline = structs.replace(DECLINE, session=kit.SESSION)
            await client.decline(decline, "")
            stream = client.follow(kit.SESSION)
            assert (await anext(stream)).tokens == (7,)
            await port.asked.wait()
            server_files.publish(renewed)
            client_files.publish(new_client)
            assert await shown(server, old_client) == der(renewed)
            await client.decline(decline, "")
            assert port.callers == ["https://old/", "https://new/"]
            port.free.set()
            rest = [chunk async for chunk in stream]
            assert [(chunk.tokens, chunk.final) for chunk in rest] == [((8,), True)]
            assert server.pems.failures == 0

    kit.run(test())


def test_c_46_a_mismatch_keeps_the_old_pair_and_is_counted(
    kit: Any, strangers: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(tls, "RELOAD_SECONDS", 0.0)
    old, new = kit.files("verifier"), strangers("new", life=7 * DAY)
    mounted, registry = Mounted(kit.work / "server", old), CollectorRegistry()
    port = kit.Heard(open=kit.STATE)

    async def test() -> None:
        async with kit.server(service(kit, port), files=mounted.files) as server:
            CertificateMetrics(registry, lambda: (server.pems.current().days_left, server.pems.failures))

            def metrics() -> dict[str, float]:
                lines = generate_latest(registry).decode().splitlines()
                return {name: float(value) for name, value in (x.split() for x in lines if x[0] != "#")}

            assert metrics()["sdcp_certificate_failures_total"] == 0
            assert 89 < metrics()["sdcp_certificate_days_left"] < 90
            mounted.publish(new, key=old.key)
            assert await shown(server, old) == der(old)
            assert metrics()["sdcp_certificate_failures_total"] == 1
            assert 89 < metrics()["sdcp_certificate_days_left"] < 90
            async with Channel(server.address, kit.files("router")) as channel:
                await VerifierClient(channel).open(kit.OPENING)
            mounted.publish(new)
            assert await shown(server, old) == der(new)
            assert metrics()["sdcp_certificate_failures_total"] == 1
            assert 6.9 < metrics()["sdcp_certificate_days_left"] < 7

    kit.run(test())
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["the old certificate stays in use"]


def test_c_46_a_new_ca_overlaps_and_then_the_old_one_is_gone(kit: Any, strangers: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tls, "RELOAD_SECONDS", 0.0)
    ca, key = certs.make_ca(dt.datetime.now(dt.UTC))
    cert, own = certs.issue(ca, key, "router", uris=(kit.BASES["router"],), now=dt.datetime.now(dt.UTC))
    of_new = certs.save(kit.work / "new-ca", "router", cert, own, ca)
    old = kit.files("verifier")
    both = old.ca.read_bytes() + of_new.ca.read_bytes()
    server_files = Mounted(kit.work / "server", old)
    client_files = Mounted(kit.work / "client", of_new)

    async def reaches(server: Any, files: certs.Certificates) -> bool:
        async with Channel(server.address, files) as channel:
            try:
                await VerifierClient(channel).card()
            except Unavailable:
                return False
        return True

    async def test() -> None:
        async with kit.server(service(kit, kit.Heard()), files=server_files.files) as server:
            client_files.publish(of_new, ca=both)
            assert not await reaches(server, client_files.files)
            server_files.publish(old, ca=both)
            assert await reaches(server, client_files.files)
            assert await reaches(server, kit.files("router"))
            server_files.publish(old, ca=of_new.ca.read_bytes())
            assert await reaches(server, client_files.files)
            assert not await reaches(server, kit.files("router"))

    kit.run(test())
