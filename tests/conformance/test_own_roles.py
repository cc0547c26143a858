"""The kit against our own roles: ``serve`` as it starts, on a tiny real model, over TLS; only ports are given."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono import certs
from sdcp_mono.compose import serving
from sdcp_mono.conformance import Finding, Options, examine
from sdcp_mono.conformance.kit import Verdict
from sdcp_mono.conformance.main import CHECKS
from sdcp_mono.models.identity import no_progress
from sdcp_mono.settings import Settings

ROOT = Path(__file__).parents[1]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


@asynccontextmanager
async def started(settings: Settings) -> AsyncIterator[str]:
    """``sdcp-mono serve`` in this process; answers the URL of its OpenAI API."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serving.run(settings, no_progress, ready.set_result))
    await asyncio.wait((server, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        if server.done():
            await server
        yield ready.result()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await server


def over_grpc() -> Any:
    """The node whose roles meet over internal gRPC; tests can't import each other by name."""
    spec = importlib.util.spec_from_file_location("kit_over_grpc", ROOT / "split" / "over_grpc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GrpcNode


@pytest.fixture(scope="module", params=["one process", "gRPC"])
def findings(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[Finding]]]:
    """Of all checks of each role, and of a few by somebody who is not who they need to be."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gRPC":
            patch.setattr(serving, "Node", over_grpc())
        yield examined(checkpoint, tmp_path_factory)


def examined(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    data = tmp_path_factory.mktemp("data")
    ours, kit, stranger = data / "certs", data / "certs" / certs.KIT, data / "stranger"
    gateway_port, kit_port, other_port = free_ports(3)
    settings = Settings(
        model=str(checkpoint("random_llama")), data_dir=data, port=0, gateway_port=gateway_port, kit_port=kit_port,
        dtype="float32", draft=("ngram", "quantized"), kv_memory_mb=64, threads=1,
    )  # fmt: skip

    async def all_of_them() -> dict[str, list[Finding]]:
        async with started(settings) as api:

            async def run(role: str, folder: Path, *only: str) -> list[Finding]:
                url = f"https://127.0.0.1:{gateway_port}/{role}"
                return await examine(role, Options(url, folder, trigger=f"{api}/v1/completions", only=frozenset(only)))

            certs.init(stranger, roles=certs.base_uris(other_port), ca=ours)
            return {
                "verifier": await run("verifier", ours),
                "drafter": await run("drafter", kit),
                "router": await run("router", kit),
                "untrusted": await run("verifier", kit, "SDCP-126"),
                "strange router": await run("drafter", stranger, "SDCP-052"),
                "strange verifier": await run("router", stranger, "SDCP-074"),
            }

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("role", ["verifier", "drafter", "router"])
def test_our_own_role_passes_every_check(findings: dict[str, list[Finding]], role: str) -> None:
    assert [(f.check.id, f.seen) for f in findings[role] if f.verdict is not Verdict.PASS] == []
    assert len(findings[role]) == len(CHECKS[role])


@pytest.mark.parametrize(
    ("who", "verdict", "seen"),
    [
        ("untrusted", Verdict.SKIP, "422 sdcp-bad-contract"),  # section 9: the kit is a peer, no more
        ("strange router", Verdict.FAIL, "403"),
        ("strange verifier", Verdict.SKIP, "403"),
    ],
)
def test_a_certificate_of_our_ca_alone_opens_nothing(
    findings: dict[str, list[Finding]], who: str, verdict: Verdict, seen: str
) -> None:
    (finding,) = findings[who]
    assert (finding.verdict, seen in finding.seen) == (verdict, True), finding.seen
