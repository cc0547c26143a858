"""The kit against a reference router that does everything right, and against ones that do one thing wrong."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from mutants import ROUTER as MUTANTS
from reference_router import Router, front_end

from sdcp_mono.conformance import Finding, Options, examine
from sdcp_mono.conformance.http2 import Client, Server, context
from sdcp_mono.conformance.kit import Verdict
from sdcp_mono.conformance.main import CHECKS

BASE = "https://127.0.0.1:9/"
IDENTITIES = {BASE + "drafter/": 1, BASE + "drafter-b/": 1, BASE + "verifier/": 2, BASE + "verifier-b/": 2}


async def against(certificates: Path, bug: str = "", only: frozenset[str] = frozenset()) -> list[Finding]:
    client = Client(context(certificates, "router"))
    host = Router(bug, client, IDENTITIES)
    tls = context(certificates, "router", server=True)
    if bug == "TLS 1.2 served":
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
    if bug == "no certificate needed":
        tls.verify_mode = ssl.CERT_OPTIONAL
    server = Server(tls, host)
    port = await server.start()
    front, trigger = await front_end(host)
    try:
        options = Options(
            url=f"https://127.0.0.1:{port}/router",
            certs=certificates,
            listen="127.0.0.1:0",
            mlc=f"https://127.0.0.1:{port}/mlc",
            mlc_prefix="mlc://local/",
            trigger=trigger,
            only=only,
        )
        return await examine("router", options)
    finally:
        for line in host.sessions.values():
            line.over = True
        front.close()
        await front.wait_closed()
        await server.stop()
        client.close()


def test_the_reference_passes_every_check(certificates: Path) -> None:
    findings = asyncio.run(against(certificates))
    assert [(f.check.id, f.seen) for f in findings if f.verdict is not Verdict.PASS] == []
    assert len(findings) == len(CHECKS["router"])


@pytest.fixture(scope="module")
def findings(certificates: Path) -> dict[str, list[Finding]]:
    """Of every mutant, some at once: most of the time is silence that is waited for."""

    async def one(bug: str, slots: asyncio.Semaphore) -> tuple[str, list[Finding]]:
        async with slots:
            return bug, await against(certificates, bug, frozenset(MUTANTS[bug].split()))

    async def all_of_them() -> dict[str, list[Finding]]:
        slots = asyncio.Semaphore(8)
        return dict(await asyncio.gather(*(one(bug, slots) for bug in MUTANTS)))

    return asyncio.run(all_of_them())


def test_every_check_has_a_mutant() -> None:
    killed = {id_ for ids in MUTANTS.values() for id_ in ids.split()}
    assert killed == {check.id for check in CHECKS["router"]}


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_router_that_is_wrong_fails_its_check(findings: dict[str, list[Finding]], bug: str) -> None:
    seen = {f.check.id: f.verdict.value for f in findings[bug]}
    assert seen == dict.fromkeys(MUTANTS[bug].split(), "fail"), findings[bug]
