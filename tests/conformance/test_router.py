"""The kit against a reference router that does everything right, and against ones that do one thing wrong."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
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
            url=f"https://127.0.0.1:{port}/router", certs=certificates, listen="127.0.0.1:0", trigger=trigger, only=only
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
