"""What a round costs without any model: protocol, event loop, threads, and the durable append.

    python -m benchmarks.rounds [--data DIR] [--json]

Target and drafter answer at once, so all that is left of a round is everything else. The append is timed by itself;
its floor is what an fdatasync costs in that folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from sdcp_mono import compose
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import Draft, DraftRequest, GenerateRequest, ModelCard, Scored, ScoreRequest
from sdcp_mono.settings import Settings

CARD = ModelCard("none", b"t" * 32, b"k" * 32, 64, 4096)
TOKENS = 1500


class NoTarget:
    """Answers 7, whatever is asked."""

    card = CARD

    block_tokens, longest, free_tokens = 16, 2**20, 2**20

    def admit(self, session: bytes, tokens: int, *, scope: bytes | None = None) -> bool:
        return True

    def release(self, session: bytes) -> None: ...

    def step(self, requests: Sequence[ScoreRequest]) -> list[list[Scored]]:
        return [[Scored(7, 7)] * (len(request.tokens) + 1) for request in requests]


class NoDraft:
    """Proposes 7, whatever is asked."""

    name = "none"
    identity = b"d" * 32
    vocab_size = CARD.vocab_size

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft((7,) * request.m) for request in requests]

    def release(self, session: bytes) -> None: ...


async def measure(data: Path, m: int) -> dict[str, float]:
    """Milliseconds, medians over the rounds of one session; ``m`` 0 decodes without a drafter."""
    drafts: Any = ((NoDraft(), False),) if m else ()
    settings = Settings(data_dir=data, m_fixed=m or None)
    with ThreadPoolExecutor(1) as thread:
        loaded = compose.Loaded(settings, None, CARD, None, NoTarget(), drafts, thread, 0.0)  # type: ignore[arg-type]
        async with compose.Node(loaded, CollectorRegistry()) as node:
            request = GenerateRequest((1, 2), TOKENS, (), Rule.GREEDY, Sampling())
            generation = await node.serving.generate(request)
            times, rounds = [], []
            async for chunk in generation.chunks():
                times.append(time.perf_counter())
                rounds += chunk.rounds
            await generation.close()
    whole = statistics.median(1000 * (b - a) for a, b in pairwise(times))
    append = statistics.median(1000 * info.commit_seconds for info in rounds)
    return {"round_ms": whole, "append_ms": append, "else_ms": whole - append}


def fdatasync(data: Path) -> float:
    """Milliseconds of a 4 KiB append and fdatasync, median of 100."""
    times = []
    with tempfile.NamedTemporaryFile(dir=data) as file:
        for _ in range(100):
            started = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fdatasync(file.fileno())
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def run(data: Path) -> dict[str, Any]:
    sys.setswitchinterval(compose.SWITCH_SECONDS)
    return {
        "fdatasync_ms": fdatasync(data),
        "self-decoded": asyncio.run(measure(data, 0)),
        "proposed": asyncio.run(measure(data, 4)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where the commit log goes; its disk decides the append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.data) as folder:
        result = run(Path(folder))
    if options.json:
        print(json.dumps(result))
        return
    print(f"fdatasync {result['fdatasync_ms']:.2f} ms")
    for name in ("self-decoded", "proposed"):
        whole, append, rest = (result[name][part] for part in ("round_ms", "append_ms", "else_ms"))
        print(f"{name:13} round {whole:.2f} ms: append {append:.2f}, everything else {rest:.2f}")


if __name__ == "__main__":
    main()
