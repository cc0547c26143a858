"""Roles as processes of their own, with TLS between them: the same tokens, also when one is killed under a stream.

At which moments, and what a pause or a cut network does, is ``test_kill_matrix.py``.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sse_client import Stream
from sdcp_mono.compose.cluster import Cluster, health

WAIT_SECONDS = 120  # far above what a failover takes; a stream that doesn't go on should say so
SETTINGS = {"SDCP_DTYPE": "float32", "SDCP_THREADS": "1", "SDCP_KV_MEMORY_MB": "16", "SDCP_DRAFT": "ngram"}
PROMPT = [10, 11, 12]


@pytest.fixture
def cluster(tmp_path: Path, cyc: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, {**SETTINGS, "SDCP_MODEL": str(cyc)})
    try:
        made.start()
        made.wait()
        yield made
    finally:
        made.stop()


def ask(cluster: Cluster, tokens: int) -> Stream:
    stream = Stream(cluster.url, {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0})
    stream.start()
    return stream


def ended(stream: Stream) -> list[int]:
    stream.join(WAIT_SECONDS)
    assert (stream.error, stream.done, stream.reconnected) == ("", True, 0)
    return stream.tokens[0]


def expected(tokens: int) -> list[int]:
    """``cyc``: 10 > 11 > ... > 19 > 10 for ever."""
    return [10 + (3 + i) % 10 for i in range(tokens)]


def test_the_split_answers_and_survives_the_death_of_either_kind(cluster: Cluster) -> None:
    assert ended(ask(cluster, 60)) == expected(60)
    for kind in ("verifier", "drafter"):
        stream = ask(cluster, 400)
        assert stream.wait_for(lambda stream=stream: len(stream.tokens[0]) >= 20, WAIT_SECONDS)
        told = health(cluster.members["router"].url)
        assert told is not None
        busy = {instance["base"] for instance in told["instances"] if instance["sessions"]}
        victim = next(member for member in cluster.of(kind) if member.base in busy)
        assert victim.process is not None
        victim.process.send_signal(signal.SIGKILL)
        assert ended(stream) == expected(400)
