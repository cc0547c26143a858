"""The kit against a reference verifier that does everything right, and against ones that do one thing wrong."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from reference_verifier import Verifier
from verifier_mutants import MUTANTS

from sdcp_mono.conformance import Finding, Options, examine
from sdcp_mono.conformance.http2 import Server, context
from sdcp_mono.conformance.kit import Verdict
from sdcp_mono.conformance.main import CHECKS

BASE = "https://127.0.0.1:9/"


async def against(certificates: Path, bug: str = "", only: frozenset[str] = frozenset()) -> list[Finding]:
    """The findings on a reference verifier with this bug."""
    host = Verifier(
        bug,
        routers={BASE + "router/"},
        drafters={BASE + "drafter/", BASE + "drafter-b/"},
        trusted={BASE + "drafter/"},
    )
    tls = context(certificates, "verifier", server=True)
    if bug == "TLS 1.2 served":
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
    if bug == "no certificate needed":
        tls.verify_mode = ssl.CERT_OPTIONAL
    server = Server(tls, host)
    port = await server.start()
    options = Options(
        url=f"https://127.0.0.1:{port}/verifier",
        certs=certificates,
        mlc=f"https://127.0.0.1:{port}/mlc",
        mlc_prefix="mlc://local/",
        untrusted=True,
        only=only,
    )
    try:
        return await examine("verifier", options)
    finally:
        await server.stop()
        for session in host.sessions.values():
            if (idle := getattr(session, "idle", None)) is not None:
                idle.cancel()


def test_the_reference_passes_every_check(certificates: Path) -> None:
    findings = asyncio.run(against(certificates))
    assert [(f.check.id, f.seen) for f in findings if f.verdict is not Verdict.PASS] == []
    assert len(findings) == len(CHECKS["verifier"])


def test_every_check_has_a_mutant() -> None:
    killed = {id_ for ids in MUTANTS.values() for id_ in ids.split()}
    assert killed == {check.id for check in CHECKS["verifier"]}


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_verifier_that_is_wrong_fails_its_check(certificates: Path, bug: str) -> None:
    expected = MUTANTS[bug].split()
    findings = asyncio.run(against(certificates, bug, frozenset(expected)))
    assert {f.check.id: f.verdict.value for f in findings} == dict.fromkeys(expected, "fail"), findings
