"""What the kit prints, writes and exits with; run as the command runs it."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reference_verifier import Verifier

from sdcp_mono.conformance import Check, Finding, conformance
from sdcp_mono.conformance.http2 import Server, context
from sdcp_mono.conformance.kit import Level, Skipped, Verdict, run
from sdcp_mono.conformance.report import exit_code

BASE = "https://127.0.0.1:9/"
ONLY = ("SDCP-047", "SDCP-096", "AMB-081", "SDCP-132")


def command(certificates: Path, bug: str, **options: object) -> int:
    """``conformance`` in this thread, the verifier in another."""
    started, url = threading.Event(), [""]
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        host = Verifier(bug, routers={BASE + "router/"}, drafters={BASE + "drafter/"}, trusted={BASE + "drafter/"})
        server = Server(context(certificates, "verifier", server=True), host)
        url[0] = f"https://127.0.0.1:{await server.start()}/verifier"
        started.set()
        await stopping.wait()
        await server.stop()

    stopping = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(10)
        return conformance(url[0], "verifier", certificates, only=ONLY, **options)  # type: ignore[arg-type]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()


def test_json_says_what_was_seen_and_the_exit_code_counts_musts(
    certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(certificates, "verdicts change", as_json=True, junit=tmp_path / "kit.xml") == 1
    said = json.loads(capsys.readouterr().out)
    checks = {check["id"]: check for check in said["checks"]}
    assert {id_: check["verdict"] for id_, check in checks.items()} == {
        "SDCP-047": "pass", "SDCP-096": "fail", "AMB-081": "fail", "SDCP-132": "skip",
    }  # fmt: skip
    assert checks["SDCP-096"]["level"] == "MUST"
    assert "another verdict" in checks["SDCP-096"]["seen"]
    assert "--mlc" in checks["SDCP-132"]["seen"]
    suite = ElementTree.parse(tmp_path / "kit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")


def test_a_failed_decision_is_shown_but_does_not_count(certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(certificates, "limit before replay") == 0
    said = capsys.readouterr().out
    assert "AMB-081" in said
    assert "1 failed (0 MUST)" in said


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance("https://127.0.0.1:9/verifier", "verifier", tmp_path) == 2
    assert "router.pem and drafter.pem are needed" in " ".join(capsys.readouterr().err.split())
    assert conformance("https://127.0.0.1:9/verifier", "cache", tmp_path) == 2


def test_a_check_that_cannot_be_run_is_never_a_pass() -> None:
    async def cannot(_: object) -> str:
        raise Skipped("why")

    async def stumbles(_: object) -> str:
        return {}["no such member"]

    findings = [asyncio.run(run(Check("SDCP-000", Level.MUST, "0", "", f), None)) for f in (cannot, stumbles)]
    assert [f.verdict for f in findings] == [Verdict.SKIP, Verdict.FAIL]
    assert exit_code(findings[:1]) == 1  # nothing was seen to be right
    assert exit_code([Finding(findings[0].check, Verdict.PASS, "")]) == 0
