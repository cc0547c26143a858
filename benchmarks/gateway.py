"""SDCP over HTTP/2, mTLS and CBOR on loopback, without model time.

    python benchmarks/gateway.py [--json] [--seconds S]

The gateway runs in a process of its own before a verifier that answers at once; this process is the client (our own).
``round trip``: one session, one proposal after the other. ``rounds per second``: 32 sessions at once over one client,
which is at most two connections. ``beside``: the round trip of one session while 4 MiB bodies are being put and 64 long
polls are open, as a ratio to the undisturbed one; the cases take turns, so that the ratio compares like with like.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sdcp_mono import certs
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.core.messages import Assignment, Output, Proposal, SessionState, Status, Verdict
from sdcp_mono.core.ports import ModelCard
from sdcp_mono.core.problems import Conflict
from sdcp_mono.http_gateway.client import VerifierClient
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.limits import GatewayLimits
from sdcp_mono.http_gateway.mlc import MlcResources
from sdcp_mono.http_gateway.mlc_client import MlcClient
from sdcp_mono.http_gateway.peer import Peer
from sdcp_mono.http_gateway.server import serve_gateway
from sdcp_mono.http_gateway.verifier import VerifierResources

BASES = certs.base_uris()
LIMITS = GatewayLimits(session_rate=1e6, drafter_rate=1e6)
SESSIONS = 32
POLLS = 64
BODY = bytes(4 * 2**20)
DIGEST = bytes(32)


class Instant:
    """A verifier that accepts everything at once; only what the benchmark calls."""

    async def propose(self, proposal: Proposal, caller: str) -> Verdict:
        return Verdict(
            session=proposal.session, epoch=1, round=proposal.round, accepted=8, emitted=(*proposal.tokens, 1),
            committed=proposal.base + 9, digest=DIGEST, action=0, m_cap=8, low=0, load=0,
        )  # fmt: skip

    async def output(self, session: bytes, from_: int, wait_ms: int | None = None) -> Output:
        await asyncio.sleep((wait_ms or 0) / 1000)
        return Output(session=session, epoch=1, from_=from_, tokens=(), final=False)

    async def assign(self, assignment: Assignment) -> SessionState:
        raise NotImplementedError


def serve(directory: Path, pipe: Connection) -> None:
    """The gateway's process, until the pipe is closed."""

    async def run() -> None:
        verifier: Any = Instant()
        card = ModelCard("none", DIGEST, DIGEST, 50_000, 4096)
        resources = VerifierResources(verifier, card, lambda session: BASES["drafter"], LIMITS).resources
        with SqliteCommitLog(directory / "log.sqlite") as log:
            mlc = MlcResources(MemoryObjects(2**30), log, "local").resources
            async with serve_gateway(
                port=0, files=certs.files(directory, "gateway"), access=Access.of(), limits=LIMITS,
                roles={"/verifier/": resources, "/mlc/": mlc},
            ) as gateway:  # fmt: skip
                pipe.send(gateway.port)
                try:
                    await asyncio.to_thread(pipe.recv)
                except EOFError:
                    return

    asyncio.run(run())


def proposal(session: int, round: int) -> Proposal:
    status = Status(instance="bench", role=1, load=10, queue=0, accept_milli=700, ttl_ms=3000, base=BASES["drafter"])
    return Proposal(
        session=session.to_bytes(16, "big"), epoch=1, round=round, drafter=BASES["drafter"], base=9 * round,
        base_digest=DIGEST, tokens=tuple(range(40_000, 40_008)), status=status,
    )  # fmt: skip


async def rounds(verifier: VerifierClient, session: int, seconds: float) -> list[float]:
    """Milliseconds of each round trip of one session."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        await verifier.propose(proposal(session, len(times) + 1), "")
        times.append(1000 * (time.perf_counter() - started))
    return times


async def throughput(verifier: VerifierClient, seconds: float) -> tuple[float, float]:
    """Rounds a second with all sessions at once, and the median round trip in milliseconds."""
    started = time.perf_counter()
    times = await asyncio.gather(*(rounds(verifier, session, seconds) for session in range(SESSIONS)))
    flat = [t for of_session in times for t in of_session]
    return len(flat) / (time.perf_counter() - started), statistics.median(flat)


async def beside(disturb: Callable[[], Awaitable[Any]], measure: Callable[[], Awaitable[list[float]]]) -> list[float]:
    """Round trips while ``disturb`` is repeated."""

    async def again() -> None:
        while True:
            await disturb()

    task = asyncio.ensure_future(again())
    try:
        return await measure()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure(port: int, directory: Path, seconds: float) -> dict[str, float]:
    origin = f"https://127.0.0.1:{port}"
    files = certs.files(directory, "drafter")
    async with (
        Peer(BASES["verifier"], files, address=f"{origin}/verifier/") as peer,
        Peer(BASES["mlc"], files, address=f"{origin}/mlc/") as mlc_peer,
    ):
        verifier, mlc = VerifierClient(peer), MlcClient(mlc_peer)
        count = 0

        async def put() -> None:
            nonlocal count
            count += 1
            uri = mlc.uri(None, "q_rows", str(count))
            try:
                await mlc.put(uri, BODY)
                await mlc.delete(uri)
            except Conflict:
                pass

        async def polls() -> None:
            await asyncio.gather(*(verifier.output(s.to_bytes(16, "big"), 0, 20_000) for s in range(POLLS)))

        async def one() -> list[float]:
            return await rounds(verifier, 1000, seconds / 3)

        await rounds(verifier, 1000, 0.3)
        alone: list[float] = []
        with_bodies: list[float] = []
        with_polls: list[float] = []
        with_both: list[float] = []
        for _ in range(3):
            alone += await one()
            with_bodies += await beside(put, one)
            with_polls += await beside(polls, one)
            with_both += await beside(put, lambda: beside(polls, one))
        per_second, busy = await throughput(verifier, seconds)
    median = statistics.median(alone)
    return {
        "round_trip_p50_ms": median,
        "round_trip_p99_ms": statistics.quantiles(alone, n=100)[98],
        "rounds_per_second_32_sessions": per_second,
        "round_trip_p50_ms_32_sessions": busy,
        "beside_4_mib_bodies_ratio": statistics.median(with_bodies) / median,
        "beside_64_polls_ratio": statistics.median(with_polls) / median,
        "beside_both_ratio": statistics.median(with_both) / median,
        "cores": float(len(os.sched_getaffinity(0))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        certs.init(directory)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=serve, args=(directory, theirs), daemon=True)
        server.start()
        theirs.close()
        figures = asyncio.run(measure(ours.recv(), directory, arguments.seconds))
        ours.close()
        server.join(10)
    if arguments.json:
        print(json.dumps(figures))
        return
    for label, value in figures.items():
        print(f"{label:32} {value:10.2f}")


if __name__ == "__main__":
    main()
