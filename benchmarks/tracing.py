"""What tracing costs 16 sessions: with every one traced into the file, and with none in the sample.

    python -m benchmarks.tracing [--pairs N] [--seconds S] [--json]

One node serves 16 sessions without a pause while its spans go to the file or to nobody in turns of S seconds; what
counts is the ratio of rounds per second in neighbouring turns, whose median other work on the machine disturbs least
(M is fixed, so that rounds are alike). Not being in the sample costs too little to be seen so; it is timed by itself,
as are the parts of being in it: a round's notes on the event loop, its spans on the exporter's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry

from sdcp_mono import compose
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import GenerateRequest, RoundInfo
from sdcp_mono.core.traces import DraftPhases, ModelPass, RoundPhases
from sdcp_mono.settings import Settings
from sdcp_mono.telemetry.export import Pipe, TraceFile
from sdcp_mono.telemetry.tracing import Note, Tracing, spans_of

SESSIONS: Final = 16
PROMPTS: Final = Path(__file__).with_name("prompts.json")
TOKENS: Final = 96
WARM_SECONDS: Final = 5.0  # until prefixes are cached and costs are known


class Switch:
    """Hands notes on or drops them."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.on = False

    def put(self, note: Note) -> None:
        if self.on:
            self.pipe.put(note)


class Turn(NamedTuple):
    on: bool
    by_clock: float  # rounds per second
    by_processor: float  # rounds per second of processor time


async def turns(data: Path, pairs: int, seconds: float) -> tuple[list[Turn], int]:
    """Neighbours are off and on, in an order drawn anew; and how many spans were made."""
    loaded = compose.load(Settings(kv_memory_mb=512), lambda *_: None)
    loaded = replace(loaded, settings=loaded.settings.model_copy(update={"data_dir": data, "m_fixed": 4}))
    texts = [prompt["text"] for prompt in (json.loads(PROMPTS.read_text()) * SESSIONS)[:SESSIONS]]
    prompts = [tuple(loaded.tokenizer.apply_chat([{"role": "user", "content": text}])) for text in texts]
    switch = Switch(Pipe("file", TraceFile(data / "traces", "bench", 64 * 2**20, {"service.name": "bench"}), 16384))
    rounds = 0

    async def without_end(prompt: tuple[int, ...], tokens: int) -> None:
        nonlocal rounds
        while True:
            request = GenerateRequest(prompt, tokens, (), Rule.GREEDY, Sampling())
            generation = await node.serving.generate(request)
            async for chunk in generation.chunks():
                rounds += len(chunk.rounds)
            await generation.close()

    done = []
    draw = random.Random(0)
    async with compose.Node(loaded, CollectorRegistry(), tracing=Tracing([switch])) as node:
        # Of different lengths, so that they don't end together.
        working = [asyncio.create_task(without_end(prompt, TOKENS + 7 * i)) for i, prompt in enumerate(prompts)]
        await asyncio.sleep(WARM_SECONDS)
        for _ in range(pairs):
            first = draw.random() < 0.5
            for switch.on in (first, not first):
                before, wall, processor = rounds, time.perf_counter(), time.process_time()
                await asyncio.sleep(seconds)
                made, wall = rounds - before, time.perf_counter() - wall
                done.append(Turn(switch.on, made / wall, made / (time.process_time() - processor)))
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    await asyncio.to_thread(switch.pipe.close)
    loaded.close()
    assert not switch.pipe.dropped
    return done, switch.pipe.exported


class Kept:
    """A queue that keeps the last note."""

    note: Note | None = None

    def put(self, note: Note) -> None:
        self.note = note


def parts() -> dict[str, float]:
    """Microseconds of a round: its notes in a session that is not in the sample and in one that is, and its spans."""
    session = bytes(16)
    at = time.perf_counter()
    scored = ModelPass(at, at + 0.02, 0.02, 40, 8)
    info = RoundInfo(2, 1, 4, (1, 2, 3, 4), 3, (1, 2, 3, 9), (), 0, 8, "quantized")

    def noted(tracing: Tracing) -> None:
        # What the roles do beside it, the clock and the structs, is part of it.
        began = time.perf_counter()
        scored_ = ModelPass(began, time.perf_counter(), 0.02, 40, 8, 0)
        verifier.round(session, info, RoundPhases(began, scored_, began, time.perf_counter(), 8))
        drafter.draft(session, DraftPhases(1, 2, "quantized", 4, began, began, time.perf_counter(), scored, 3))

    answer = {}
    for name, sample in (("off", 0.0), ("on", 1.0)):
        tracing = Tracing([Kept()], sample=sample, slow_seconds=1.0)
        verifier, drafter = tracing.role("verifier"), tracing.role("drafter")
        for role in (verifier, drafter):
            role.opened(session)
        answer[f"notes_{name}_us"] = _microseconds(lambda tracing=tracing: noted(tracing))  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        file = TraceFile(Path(folder), "bench", 64 * 2**20, {"service.name": "bench"})
        notes: list[Note] = []
        tracing = Tracing([_Into(notes)], sample=1.0)
        verifier, drafter = tracing.role("verifier"), tracing.role("drafter")
        for role in (verifier, drafter):
            role.opened(session)
        for _ in range(64):
            noted(tracing)
        answer["spans_us"] = _microseconds(lambda: _export(file, notes), times=50) / 64
        file.close()
    return answer


class _Into:
    def __init__(self, notes: list[Note]) -> None:
        self.put = notes.append


def _export(file: TraceFile, notes: list[Note]) -> None:
    file.export([span for note in notes for span in spans_of(note, 0)], 0)


def _microseconds(work: Any, times: int = 20_000) -> float:
    """The best of five, so that other work on the machine doesn't count."""
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, (time.perf_counter() - started) / times)
    return 1e6 * best


def measure(pairs: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        done, spans = asyncio.run(turns(Path(folder), pairs, seconds))
    costs: dict[str, list[float]] = {"by_clock": [], "by_processor": []}
    for first, second in zip(done[::2], done[1::2], strict=True):
        on, off = (first, second) if first.on else (second, first)
        for name, of in costs.items():
            of.append(100 * (1 - getattr(on, name) / getattr(off, name)))
    found = parts()
    per_second = statistics.median(turn.by_clock for turn in done)
    round_us = 1e6 / per_second
    return {
        "sessions": SESSIONS, "pairs": pairs, "spans": spans, "rounds_per_second": per_second,
        **{f"on_percent_{name}": statistics.median(of) for name, of in costs.items()},
        **{f"on_quartiles_{name}": statistics.quantiles(of, n=4)[::2] for name, of in costs.items()}, **found,
        "off_parts_percent": 100 * found["notes_off_us"] / round_us,
        "on_parts_percent": 100 * (found["notes_on_us"] + found["spans_us"]) / round_us,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.pairs, options.seconds)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{SESSIONS} sessions, {result['rounds_per_second']:.0f} rounds a second, {result['spans']} spans")
    for name in ("by_clock", "by_processor"):
        low, high = result[f"on_quartiles_{name}"]
        said = f"{result[f'on_percent_{name}']:+.2f} % (quartiles of the pairs {low:+.2f}, {high:+.2f})"
        print(f"on:  {name.replace('_', ' ')} {said}")
    print(
        f"     by parts {result['on_parts_percent']:.2f} %: of a round's time its notes take "
        f"{result['notes_on_us']:.1f} us, its spans {result['spans_us']:.1f} us on the exporter's thread"
    )
    print(f"off: by parts {result['off_parts_percent']:.2f} %: {result['notes_off_us']:.1f} us a round")


if __name__ == "__main__":
    main()
