"""Instances that come and go: one certificate a pool, connections made for whom a pattern admits, routers by DNS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from sdcp_mono import certs
from sdcp_mono.compose.links import Channels, Links, Members
from sdcp_mono.core.names import Bases
from sdcp_mono.core.problems import Forbidden
from sdcp_mono.grpc.channel import dialled, label_of
from sdcp_mono.grpc.client import RouterClient
from sdcp_mono.grpc.services import RouterService
from sdcp_mono.grpc.tls import Pems
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.settings import VerifierSettings

POOL = "https://drafter.sdcp.test:9443/"
ONE = "https://one.drafter.sdcp.test:9443/"
PATTERN = "https://*.drafter.sdcp.test:9443/"


@pytest.fixture
def pool(kit: Any) -> Any:
    """The files of a pool of drafters, signed by everybody's CA."""
    certs.init(kit.work / "pool", roles={}, pools={"drafter": POOL}, ca=kit.directory)
    return certs.files(kit.work / "pool", "drafter")


@asynccontextmanager
async def reporting(kit: Any, files: Any, instance: str, **listed: Any) -> AsyncIterator[tuple[RouterClient, Any]]:
    """A router that lists ``PATTERN``, and a client that says it is ``instance``."""
    port = kit.Heard()
    access = Access.of(**{"drafters": (PATTERN,), **listed})
    async with (
        kit.server(RouterService(port), role="router", access=access) as server,
        kit.channel(server, "", files=files, instance=instance) as channel,
    ):
        yield RouterClient(channel), port


def test_the_router_learns_a_members_base_from_its_report(kit: Any, pool: Any) -> None:
    async def test() -> None:
        async with reporting(kit, pool, ONE) as (router, port):
            await router.status(structs.replace(kit.STATUS, instance=ONE))
            await router.status(structs.replace(kit.STATUS, instance="drafter-one"))
        assert [status.base for _, status in port.calls] == [ONE, ONE]

    kit.run(test())


@pytest.mark.parametrize(
    ("instance", "why"),
    [
        ("", "only a drafter or a verifier"),  # the pool itself is admitted by no pattern
        (POOL, "only a drafter or a verifier"),
        ("https://a.one.drafter.sdcp.test:9443/", "sdcp-instance"),
        ("https://one.drafter.sdcp.test:9444/", "sdcp-instance"),
        ("https://one.verifier.sdcp.test:9443/", "sdcp-instance"),
        ("https://evil.example/", "sdcp-instance"),
        ("one", "sdcp-instance"),
    ],
)
def test_a_pools_certificate_speaks_for_its_members_only(kit: Any, pool: Any, instance: str, why: str) -> None:
    async def test() -> None:
        async with reporting(kit, pool, instance) as (router, port):
            with pytest.raises(Forbidden, match=why):
                await router.status(structs.replace(kit.STATUS, instance=instance or POOL))
        assert port.calls == []

    kit.run(test())


def test_a_member_reports_for_itself_only(kit: Any, pool: Any) -> None:
    async def test() -> None:
        async with reporting(kit, pool, ONE) as (router, _):
            for changes in ({"instance": ONE.replace("one", "two")}, {"instance": ONE, "base": POOL}):
                with pytest.raises(Forbidden):
                    await router.status(structs.replace(kit.STATUS, **changes))

    kit.run(test())


@pytest.mark.parametrize("told", [True, False])
def test_an_instance_with_a_certificate_of_its_own_needs_no_pool(kit: Any, told: bool) -> None:
    own = kit.BASES["drafter"]

    async def test() -> None:
        async with reporting(kit, kit.files("drafter"), own if told else "", drafters=(own,)) as (router, port):
            await router.status(kit.STATUS)
        assert port.calls[0][1].base == own

    kit.run(test())


def test_an_address_in_a_name_is_dialled_and_the_certificate_must_name_the_host() -> None:
    assert dialled("verifier-0.v.ns.svc:9443") == ("verifier-0.v.ns.svc:9443", ())
    assert dialled("127.0.0.1:9443") == ("127.0.0.1:9443", ())
    target, options = dialled("10-1-2-3.v.ns.svc:9443")
    assert (target, dict(options)["grpc.ssl_target_name_override"]) == ("ipv4:10.1.2.3:9443", "10-1-2-3.v.ns.svc")
    assert dialled(f"{label_of('2001:db8::7')}.v.ns.svc:1")[0] == "ipv6:[2001:db8::7]:1"


def test_connections_are_bounded_and_the_least_used_closes(kit: Any) -> None:
    async def test() -> None:
        pems = Pems(kit.files("router"))
        few = Channels(pems, "", most=2)
        first = few.to("https://a/")
        few.to("https://b/")
        assert few.to("https://a/") is first
        few.to("https://c/")
        assert [base in few for base in ("https://a/", "https://b/", "https://c/")] == [True, False, True]
        await few.close()
        idle = Channels(pems, "", idle_seconds=0.0)
        idle.to("https://a/")
        idle.to("https://b/")
        assert len(idle) == 1
        await idle.close()

    kit.run(test())


class Dns:
    """A resolver whose answers the test gives."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | None = addresses
        self.asked: list[str] = []

    async def __call__(self, host: str) -> tuple[str, ...]:
        self.asked.append(host)
        if self.addresses is None:
            raise OSError("no such host")
        return self.addresses


def test_the_members_of_a_pool_are_the_addresses_of_its_service(kit: Any, caplog: Any) -> None:
    listed = ("https://r.example/", "https://*.router.ns.svc:9443/")
    dns = Dns("10.0.0.2", "10.0.0.1", "10.0.0.2")

    async def test() -> None:
        members = Members(Bases.of(listed), listed, dns)
        assert list(members) == ["https://r.example/"]
        await members.look()
        two = ["https://r.example/", *(f"https://10-0-0-{n}.router.ns.svc:9443/" for n in (1, 2))]
        assert (list(members), dns.asked) == (two, ["router.ns.svc"])
        dns.addresses = None
        await members.look()
        await members.look()
        assert list(members) == two
        assert len(caplog.records) == 1
        dns.addresses = ("10.0.0.3",)
        await members.look()
        assert list(members) == ["https://r.example/", "https://10-0-0-3.router.ns.svc:9443/"]

    kit.run(test())


def test_a_role_finds_its_routers_and_reports_to_all_of_them(kit: Any, unused_port: int, tmp_path: Path) -> None:
    """Two real routers at addresses of their own, with one certificate; only DNS is not real."""
    folder, pools = tmp_path / "tls", {
        "router": f"https://router.sdcp.test:{unused_port}/", "verifier": f"https://verifier.sdcp.test:{unused_port}/",
    }  # fmt: skip
    certs.init(folder, roles={}, pools=pools)
    base = pools["verifier"].replace("://", "://10-0-0-9.")
    settings = VerifierSettings(
        base=base, tls_dir=folder, routers=(pools["router"].replace("://", "://*."),), data_dir=tmp_path
    )
    access = Access.of(verifiers=(pools["verifier"].replace("://", "://*."),))
    dns, ports, registry = Dns("127.0.0.2"), [kit.Heard(), kit.Heard()], CollectorRegistry()
    report = structs.replace(kit.STATUS, instance=base, role=2)

    async def test() -> None:
        async with AsyncExitStack() as stack:
            for port, host in zip(ports, ("127.0.0.2", "127.0.0.3"), strict=True):
                await stack.enter_async_context(
                    kit.server(
                        RouterService(port), host=host, port=unused_port, files=certs.files(folder, "router"),
                        access=access,
                    )
                )  # fmt: skip
            looked = asyncio.Event()

            async def resolve(host: str) -> tuple[str, ...]:
                looked.set()
                return await dns(host)

            routers = Links(settings, "verifier", stack, registry, resolve).routers()
            await looked.wait()
            await routers.status(structs.replace(report, ttl_ms=0))  # which is waited for
            assert [len(port.calls) for port in ports] == [1, 0]
            dns.addresses = ("127.0.0.2", "127.0.0.3")
            members: Any = routers._others._known  # type: ignore[attr-defined]
            await members.look()
            await routers.status(structs.replace(report, ttl_ms=0))
            assert [len(port.calls) for port in ports] == [2, 1]
        assert {status.base for port in ports for _, status in port.calls} == {base}

    kit.run(test())
    assert b"sdcp_certificate_days_left 89." in generate_latest(registry)
