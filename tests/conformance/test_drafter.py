"""The kit against a reference drafter that does everything right, and against ones that do one thing wrong."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from mutants import DRAFTER as MUTANTS
from reference_drafter import Drafter

from sdcp_mono.conformance import Finding, Options, examine
from sdcp_mono.conformance.http2 import Client, Server, context
from sdcp_mono.conformance.kit import Verdict
from sdcp_mono.conformance.main import CHECKS

ROUTER = "https://127.0.0.1:9/router/"


async def against(certificates: Path, bug: str = "", only: frozenset[str] = frozenset()) -> list[Finding]:
    client = Client(context(certificates, "drafter"))
    host = Drafter(bug, client, ROUTER)
    tls = context(certificates, "drafter", server=True)
    if bug == "TLS 1.2 served":
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
    if bug == "no certificate needed":
        tls.verify_mode = ssl.CERT_OPTIONAL
    server = Server(tls, host)
    host.base = f"https://127.0.0.1:{await server.start()}/drafter/"
    try:
        options = Options(url=host.base, certs=certificates, listen="127.0.0.1:0", only=only)
        return await examine("drafter", options, at_once=64)  # silence is what takes the time: all at once
    finally:
        for _, task in host.work.values():
            task.cancel()
        await server.stop()
        client.close()


def test_the_reference_passes_every_check(certificates: Path) -> None:
    findings = asyncio.run(against(certificates))
    assert [(f.check.id, f.seen) for f in findings if f.verdict is not Verdict.PASS] == []
    assert len(findings) == len(CHECKS["drafter"])


@pytest.fixture(scope="module")
def findings(certificates: Path) -> dict[str, list[Finding]]:
    """Of every mutant, some at once: most of the time is silence that is waited for."""

    async def one(bug: str, slots: asyncio.Semaphore) -> tuple[str, list[Finding]]:
        async with slots:
            return bug, await against(certificates, bug, frozenset(MUTANTS[bug].split()))

    async def all_of_them() -> dict[str, list[Finding]]:
        slots = asyncio.Semaphore(6)
        return dict(await asyncio.gather(*(one(bug, slots) for bug in MUTANTS)))

    return asyncio.run(all_of_them())


def test_every_check_has_a_mutant() -> None:
    killed = {id_ for ids in MUTANTS.values() for id_ in ids.split()}
    assert killed == {check.id for check in CHECKS["drafter"]}


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_drafter_that_is_wrong_fails_its_check(findings: dict[str, list[Finding]], bug: str) -> None:
    seen = {f.check.id: f.verdict.value for f in findings[bug]}
    assert seen == dict.fromkeys(MUTANTS[bug].split(), "fail"), findings[bug]
