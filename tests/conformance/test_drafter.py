"""The kit against a reference drafter that does everything right, and against ones that do one thing wrong."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
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
