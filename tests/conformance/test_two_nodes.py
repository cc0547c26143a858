"""Two nodes that know each other as peers: one's router, the other's verifier and drafter, over TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sdcp_mono import certs, compose
from sdcp_mono.core.messages import Event, Role, Rule, Sampling
from sdcp_mono.core.ports import GenerateRequest
from sdcp_mono.core.problems import Forbidden
from sdcp_mono.http_gateway.client import RouterClient
from sdcp_mono.http_gateway.peer import Peer
from sdcp_mono.models.identity import no_progress
from sdcp_mono.settings import Settings

PROMPT = (5, 9, 17, 33) * 4


async def text(node: compose.Node, **changes: Any) -> tuple[int, ...]:
    wish = {"prompt": PROMPT, "max_new": 40, "stop": (), "rule": Rule.GREEDY, "sampling": Sampling(), **changes}
    generation = await node.serving.generate(GenerateRequest(**wish))
    try:
        chunks = [chunk async for chunk in generation.chunks()]
    finally:
        await generation.close()
    assert (chunks[-1].finish, chunks[-1].error) == (4, "")
    return tuple(token for chunk in chunks for token in chunk.tokens)


def test_a_router_uses_another_nodes_verifier_and_drafter(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    there, here = sorted((bound.getsockname()[1] for bound in sockets), key=str)  # of equals a router takes the first
    for bound in sockets:
        bound.close()
    ours, theirs = certs.base_uris(here), certs.base_uris(there)
    common: dict[str, Any] = {
        "model": str(checkpoint("random_llama")), "dtype": "float32", "draft": ("ngram", "quantized"),
        "kv_memory_mb": 64, "threads": 1,
    }  # fmt: skip
    near = Settings(
        kept_logs=0, data_dir=tmp_path / "near", gateway_port=here, kit_port=0, verifiers=(theirs["verifier"],),
        drafters=(theirs["drafter"],), **common,
    )  # fmt: skip
    far = Settings(
        data_dir=tmp_path / "far", gateway_port=there, certs_dir=tmp_path / "far-certs", routers=(ours["router"],),
        verifiers=(ours["verifier"],), caches=(ours["mlc"],), **common,
    )  # fmt: skip
    certs.init(near.data_dir / "certs", roles=ours)
    certs.init(tmp_path / "far-certs", roles=theirs, ca=near.data_dir / "certs")

    async def use() -> None:
        alone = compose.Node(compose.load(near, no_progress), CollectorRegistry())
        async with alone:
            expected = await text(alone)
        router = compose.Node(compose.load(near, no_progress), CollectorRegistry(), gateway=True)
        other = compose.Node(compose.load(far, no_progress), CollectorRegistry(), gateway=True)
        async with router, other:
            known = router.serving.machine.instances
            while not {(theirs["verifier"], Role.VERIFIER), (theirs["drafter"], Role.DRAFTER)} <= known.keys():
                router.serving._reported.clear()
                await router.serving._reported.wait()
            generation = await router.serving.generate(
                GenerateRequest(PROMPT, 40, (), Rule.GREEDY, Sampling(), session=b"s" * 16)
            )
            routed = router.serving.machine.sessions[b"s" * 16]
            assert routed.verifier == theirs["verifier"]
            assert routed.opening.commit_log.startswith(ours["mlc"])  # it has been made here, and is appended to there
            lie = Event(session=b"s" * 16, epoch=1, kind=5, committed=0, digest=bytes(32))
            async with Peer(ours["router"], certs.files(near.data_dir / "certs", "verifier")) as not_its_verifier:
                with pytest.raises(Forbidden):
                    await RouterClient(not_its_verifier).event(lie)
            await generation.close()
            assert await text(router) == expected
            (done,) = (known for known in other._engine.sessions.values() if known.committed == 40)
            assert [info.accepted for info in done.rounds if info.drafter]
            assert not [i for i in known.values() if i.sessions]
            assert await router.storage.store.names() == []

    asyncio.run(asyncio.wait_for(use(), 60))
