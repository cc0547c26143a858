"""What tracing costs: committed tokens per second of 16 sessions with every session traced, with none, and without.

    python -m benchmarks.tracing [--repeat N] [--tokens N] [--json]

*off* is a sample of 0 with an exporter ready (only what is slow or fails would be kept), *on* a sample of 1.0 into the
trace file. Both are ratios to the same node without tracing, from interleaved runs: the median of them, by the wall
clock and by processor time, which other work on the machine disturbs less. A few tenths of a percent can't be seen in
either, so the parts are timed by themselves too: a round's notes on the event loop, its spans on the exporter's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

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
MODES: Final = {"none": None, "off": 0.0, "on": 1.0}


class Kept:
    """A queue that keeps the last note."""

    note: Note | None = None

    def put(self, note: Note) -> None:
        self.note = note


class Bench:
    def __init__(self, tokens: int, data: Path) -> None:
        self.data = data
        self.loaded = compose.load(Settings(kv_memory_mb=512), lambda *_: None)
        prompts = json.loads(PROMPTS.read_text())
        texts = [prompt["text"] for prompt in (prompts * SESSIONS)[:SESSIONS]]
        apply = self.loaded.tokenizer.apply_chat
        self.requests = [
            GenerateRequest(tuple(apply([{"role": "user", "content": text}])), tokens, (), Rule.GREEDY, Sampling())
            for text in texts
        ]
        self.spans = 0

    def run(self, sample: float | None) -> dict[str, float]:
        """Tokens and rounds per second of the wall clock, and tokens per second of the processor."""
        pipe = None
        if sample is not None:
            pipe = Pipe("file", TraceFile(self.data / "traces", "bench", 64 * 2**20, {"service.name": "bench"}), 16384)
        tracing = None if pipe is None or sample is None else Tracing([pipe], sample=sample, slow_seconds=1.0)
        facts = asyncio.run(self._all(tracing))
        if pipe is not None:
            pipe.close()
            assert not pipe.dropped
            self.spans += pipe.exported
        return facts

    async def _all(self, tracing: Tracing | None) -> dict[str, float]:
        settings = self.loaded.settings.model_copy(update={"data_dir": self.data})
        loaded = replace(self.loaded, settings=settings)
        async with compose.Node(loaded, CollectorRegistry(), tracing=tracing) as node:

            async def one(request: GenerateRequest) -> tuple[int, int]:
                generation = await node.serving.generate(request)
                chunks = [chunk async for chunk in generation.chunks()]
                await generation.close()
                return sum(len(chunk.tokens) for chunk in chunks), sum(len(chunk.rounds) for chunk in chunks)

            wall, processor = time.perf_counter(), time.process_time()
            done = await asyncio.gather(*(one(request) for request in self.requests))
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
        tokens, rounds = (sum(column) for column in zip(*done, strict=True))
        return {"wall": tokens / wall, "processor": tokens / processor, "round_seconds": wall / rounds}


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


def measure(repeat: int, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(tokens, Path(folder))
        for sample in MODES.values():  # caches fill, acceptance settles
            bench.run(sample)
        bench.spans = 0
        runs: dict[str, list[dict[str, float]]] = defaultdict(list)
        for repetition in range(repeat):
            order = list(MODES.items())
            for name, sample in order[repetition % 3 :] + order[: repetition % 3]:
                runs[name].append(bench.run(sample))
        bench.loaded.close()
    result: dict[str, Any] = {"sessions": SESSIONS, "tokens": tokens, "repeat": repeat, "spans": bench.spans}
    result["tokens_per_second"] = statistics.median(run["wall"] for run in runs["none"])
    for name in ("off", "on"):
        for clock in ("wall", "processor"):
            ratios = [run[clock] / none[clock] for run, none in zip(runs[name], runs["none"], strict=True)]
            result[f"{name}_{clock}_percent"] = 100 * (1 - statistics.median(ratios))
    of_parts = parts()
    round_us = 1e6 * statistics.median(run["round_seconds"] for run in runs["none"])
    result |= of_parts | {"round_us": round_us, "off_parts_percent": 100 * of_parts["notes_off_us"] / round_us}
    result["on_parts_percent"] = 100 * (of_parts["notes_on_us"] + of_parts["spans_us"]) / round_us
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.repeat, options.tokens)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{SESSIONS} sessions: {result['tokens_per_second']:.0f} tokens/s without tracing")
    for name in ("off", "on"):
        wall, processor, by_parts = (result[f"{name}_{kind}_percent"] for kind in ("wall", "processor", "parts"))
        print(f"{name:3}: {wall:+.2f} % by the clock, {processor:+.2f} % by processor time, {by_parts:.2f} % by parts")
    print(
        f"a round takes {result['round_us']:.0f} us of the node; its notes {result['notes_off_us']:.1f} (off) or "
        f"{result['notes_on_us']:.1f} us (on), its spans {result['spans_us']:.0f} us on the exporter's thread"
    )


if __name__ == "__main__":
    main()
