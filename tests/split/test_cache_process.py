"""``cache serve`` as a process of its own: one store behind gRPC and HTTP, and what it tells of itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono import certs
from sdcp_mono.cache.blob import Blob, pack
from sdcp_mono.core.messages import CommitRecord
from sdcp_mono.core.ports import Got, LogAppend
from sdcp_mono.grpc.cache_client import CommitLogClient, ObjectStoreClient
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.http_gateway.mlc_client import MlcClient
from sdcp_mono.http_gateway.peer import Peer

KV = "mlc://local/-/target_kv/" + "ab" * 32
ROWS = "mlc://local/-/q_rows/a"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Cache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("grpc", "http", "status")}
        roles = ("mlc", "router", "verifier", "drafter")
        self.bases = {role: f"https://127.0.0.1:{self.ports['grpc']}/{role}/" for role in roles}
        certs.init(folder / "certs", roles=self.bases)

    def start(self) -> None:
        peers = [f"--{role}s={self.bases[role]}" for role in ("router", "verifier", "drafter")]
        environment = {
            **os.environ, "SDCP_STATUS_PORT": str(self.ports["status"]),
            "SDCP_KV_HOST_MB": "16", "SDCP_KV_DISK_MB": "32", "SDCP_KV_DISK_FLOOR_MB": "0",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "sdcp_mono", "cache", "serve", "--base", self.bases["mlc"], "--tls-dir",
                str(self.folder / "certs"), "--data", str(self.folder / "data"), "--http-port",
                str(self.ports["http"]), *peers,
            ],
            stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if "answers at" in line:
                return
        raise AssertionError("".join(lines))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0
        assert self.process.stderr is not None
        self.process.stderr.close()

    def told(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['status']}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def command(self, *arguments: str) -> Any:
        """What ``sdcp-mono cache`` prints as JSON."""
        command = [sys.executable, "-m", "sdcp_mono", "cache", *arguments, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    made = Cache(tmp_path)
    made.start()
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.stop()


async def use(cache: Cache) -> None:
    """A verifier over gRPC and one over HTTP see the same objects and logs."""
    files = certs.files(cache.folder / "certs", "verifier")
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(Channel(f"127.0.0.1:{cache.ports['grpc']}", files))
        address = f"https://127.0.0.1:{cache.ports['http']}/mlc/"
        peer = await stack.enter_async_context(Peer(cache.bases["mlc"], files, address=address))
        inside, outside = ObjectStoreClient(channel), MlcClient(peer)
        block = pack(Blob(KV, 8192, "bfloat16", (8192,)), bytes(8192))
        await inside.put(KV, block)
        await outside.put(ROWS, b"rows")
        for store in (inside, outside):
            assert await store.get(KV, None) == block
            assert await store.get(ROWS, None) == b"rows"
            assert await store.get_range(KV, None, 4000, 4200) == block[4000:4200]
            assert list(await store.get_many((ROWS, KV), None)) == [Got("ok", b"rows"), Got("ok", block)]
            assert await store.head(KV, None) == await inside.head(KV, None)
        log = "mlc://local/-/log/a"
        record = CommitRecord(epoch=1, round=1, emitted=(7,), committed=1, digest=b"d" * 32)
        await CommitLogClient(channel).create(log)
        assert list(await CommitLogClient(channel).append([LogAppend(log, 0, record)])) == ["ok"]
        assert list(await outside.read(log)) == [record]


async def found_again(cache: Cache) -> None:
    files = certs.files(cache.folder / "certs", "verifier")
    async with Channel(f"127.0.0.1:{cache.ports['grpc']}", files) as channel:
        store = ObjectStoreClient(channel)
        assert await store.get(KV, None) == pack(Blob(KV, 8192, "bfloat16", (8192,)), bytes(8192))
        assert await store.get(ROWS, None) is None  # never on a disk (section 8)


def test_one_store_behind_grpc_and_http_tells_of_itself_and_keeps_kv(cache: Cache) -> None:
    asyncio.run(use(cache))
    report = json.loads(cache.told("/cache"))
    tiers = {tier["name"]: tier for tier in report["tiers"]}
    assert set(tiers) == {"host", "disk", "objects"}
    assert (tiers["host"]["objects"], tiers["objects"]["objects"]) == (1, 1)
    assert (report["objects"]["leases"], report["logs"]) == (0, {"logs": 1})
    metrics = cache.told("/metrics")
    assert 'sdcp_cache_tier_objects{tier="host"} 1.0' in metrics
    assert "sdcp_cache_quota_refusals_total 0.0" in metrics
    assert cache.command("stat", "--url", f"http://127.0.0.1:{cache.ports['status']}")["tiers"]
    cache.stop()
    (entry,) = [e for e in cache.command("ls", "--data", str(cache.folder / "data")) if e["state"] == "ok"]
    assert (entry["kind"], entry["name"]) == ("target_kv", "ab" * 32)
    cache.start()
    asyncio.run(found_again(cache))
