"""What the cache is worth: restoring KV against computing it, the log's cost per append, and a churn under hard caps.

    python -m benchmarks.cache [restore|log|churn] [--repeat 7] [--minutes 10] [--dtype bfloat16] [--log URL]
                               [--plot FILE] [--json FILE] [--markdown FILE]

Without a name all three. Ratios are taken within one interleaved run. ``churn`` needs matplotlib for ``--plot``
(``pip install 'sdcp-mono[bench]'``). ``--log`` measures another store than SQLite, such as postgresql://user@host/db.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from rich.progress import track

from benchmarks.rounds import fdatasync
from benchmarks.serving import machine
from sdcp_mono import compose
from sdcp_mono.compose.logs import open_log
from sdcp_mono.core.messages import CommitRecord, Rule, Sampling
from sdcp_mono.core.ports import GenerateRequest, LogAppend
from sdcp_mono.models.identity import no_progress
from sdcp_mono.roles.router import SCOPE
from sdcp_mono.settings import Settings

PREFIX: Final = 1024  # tokens
SESSIONS: Final = 32
MIB: Final = 2**20


def prompt(source: random.Random, length: int = PREFIX) -> tuple[int, ...]:
    """Token ids that nobody has asked for before."""
    return tuple(source.randrange(100, 49_000) for _ in range(length))


def request(tokens: Sequence[int], max_new: int = 1) -> GenerateRequest:
    return GenerateRequest(tuple(tokens), max_new, (), Rule.GREEDY, Sampling())


async def first_token(node: compose.Node, tokens: Sequence[int]) -> float:
    """Seconds from asking to the first token."""
    started = time.perf_counter()
    generation = await node.serving.generate(request(tokens))
    async for _ in generation.chunks():
        seconds = time.perf_counter() - started
    await generation.close()
    return seconds


class Levels:
    """A node whose upper tiers can be emptied, so that the next lower one has to answer."""

    def __init__(self, node: compose.Node, loaded: compose.Loaded) -> None:
        self.node = node
        self.kv: Any = loaded.kv["target"]
        self.thread = loaded.thread
        self.restorer = node.storage.restorers["target"]

    @property
    def tiers(self) -> Any:
        assert self.node.storage.tiers is not None
        return self.node.storage.tiers

    async def forget_device(self) -> None:
        await asyncio.wrap_future(self.thread.submit(self.kv.pool.forget))

    async def settle(self) -> None:
        """Until everything that was offered is in host memory."""
        await asyncio.to_thread(self.tiers.settle)

    async def to_disk(self) -> None:
        """Everything from host memory to disk, and only there."""
        await asyncio.to_thread(self.tiers.flush)
        await self.forget_device()

    async def restore(self, tokens: Sequence[int]) -> tuple[float, int]:
        """Seconds and blocks of bringing a prefix back, without the pass that follows."""
        session = os.urandom(16)
        started = time.perf_counter()
        blocks = await self.restorer(session, tokens, SCOPE)
        seconds = time.perf_counter() - started
        await asyncio.wrap_future(self.thread.submit(self.kv.release, session))
        return seconds, blocks


async def measure_restore(loaded: compose.Loaded, repeat: int) -> dict[str, Any]:
    """First-token seconds from each tier, and the restore alone; medians over ``repeat`` prefixes."""
    source = random.Random(1)
    taken: dict[str, list[float]] = {name: [] for name in ("cold", "device", "host", "disk", "load_host", "load_disk")}
    declined = 0
    async with compose.Node(loaded, CollectorRegistry()) as node:
        levels = Levels(node, loaded)
        await first_token(node, prompt(source, 64))
        for _ in track(range(repeat), "Restoring prefixes"):
            tokens = prompt(source)
            taken["cold"].append(await first_token(node, tokens))
            taken["device"].append(await first_token(node, tokens))
            await levels.settle()
            await levels.forget_device()
            taken["host"].append(await first_token(node, tokens))
            await levels.forget_device()
            seconds, blocks = await levels.restore(tokens)
            taken["load_host"].append(seconds)
            assert blocks == PREFIX // 16, blocks
            await levels.to_disk()
            taken["disk"].append(await first_token(node, tokens))
            await levels.to_disk()
            seconds, blocks = await levels.restore(tokens)
            taken["load_disk"].append(seconds)
            declined += blocks == 0
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "prefix_tokens": PREFIX,
        "mib": PREFIX * loaded.kv["target"].block_bytes / loaded.kv["target"].block_tokens / MIB,
        "seconds": medians,
        "first_token_of_cold": {name: medians[name] / medians["cold"] for name in ("device", "host", "disk")},
        "restore_of_cold": {name: medians[f"load_{name}"] / medians["cold"] for name in ("host", "disk")},
        "declined": declined,
    }


def record(round_: int) -> CommitRecord:
    return CommitRecord(round=round_, epoch=1, committed=2 * round_, digest=bytes(32), emitted=(7, 8))


async def measure_log(folder: Path, url: str = "") -> dict[str, Any]:
    """Milliseconds of an append, 32 sessions in a transaction, by the length of the logs; and of an fdatasync."""
    with ExitStack() as stack:
        log = open_log(url, folder, stack)
        names = [f"mlc://benchmark-{os.getpid()}/-/log/{number}" for number in range(SESSIONS)]
        for name in names:
            await log.create(name)
        by_length: dict[int, list[float]] = {100: [], 1000: [], 4000: []}
        syncs = []
        for round_ in track(range(1, 4001), "Appending"):
            started = time.perf_counter()
            outcomes = await log.append([LogAppend(name, round_ - 1, record(round_)) for name in names])
            seconds = time.perf_counter() - started
            assert set(outcomes) == {"ok"}
            for length in by_length:
                if length - 100 < round_ <= length:
                    by_length[length].append(1000 * seconds / SESSIONS)
            if round_ % 400 == 0:
                syncs.append(fdatasync(folder))
        for name in names:
            await log.drop(name)
    sync = statistics.median(syncs)
    medians = {length: statistics.median(values) for length, values in by_length.items()}
    return {"fdatasync_ms": sync, "append_ms": medians, "append_of_fdatasync": medians[4000] / sync}


async def measure_churn(loaded: compose.Loaded, minutes: float) -> dict[str, Any]:
    """Prefixes come and go for minutes; what each tier holds, its cap, and the resident memory, once a second."""
    source, samples = random.Random(2), []
    known: list[tuple[int, ...]] = []
    started, served, stop = time.perf_counter(), 0, False

    async with compose.Node(loaded, CollectorRegistry()) as node:
        tiers = node.storage.tiers
        assert tiers is not None

        async def clients() -> None:
            nonlocal served
            while not stop:
                if known and source.random() < 0.5:
                    tokens = source.choice(known) + prompt(source, 16)
                else:
                    tokens = prompt(source, source.randrange(64, 513))
                    known.append(tokens)
                    del known[:-60]
                await first_token(node, tokens)
                served += 1

        running = [asyncio.create_task(clients()) for _ in range(4)]
        while (now := time.perf_counter() - started) < 60 * minutes:
            usage = {tier.name: tier.used_bytes / MIB for tier in tiers.stats()}
            samples.append({"second": now, **usage, "rss": rss_mib()})
            print(f"\r{now:5.0f} s  {served} requests  {usage}", end="", file=sys.stderr)
            await asyncio.sleep(1)
        stop = True
        await asyncio.gather(*running)
        final = tiers.stats()
    caps = {tier.name: tier.capacity_bytes / MIB for tier in final}
    most = {name: max(sample[name] for sample in samples) for name in caps}
    half = [sample["rss"] for sample in samples[len(samples) // 2 :]]
    return {
        "minutes": minutes, "requests": served, "cap_mib": caps, "most_mib": most,
        "under_cap": all(most[name] <= caps[name] for name in caps),
        "rss_mib": {"median of the second half": statistics.median(half), "most": max(s["rss"] for s in samples)},
        "tiers": {tier.name: {"hits": tier.hits, "stored": tier.stored, "evicted": tier.evicted} for tier in final},
        "samples": samples,
    }  # fmt: skip


def rss_mib() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plot(result: dict[str, Any], file: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'sdcp-mono[bench]'") from None
    samples, caps = result["samples"], result["cap_mib"]
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    seconds = [sample["second"] for sample in samples]
    for number, name in enumerate(caps):
        axis.plot(seconds, [sample[name] for sample in samples], color=f"C{number}", label=f"{name} tier")
        axis.axhline(caps[name], color=f"C{number}", linestyle=":", linewidth=1)
    axis.plot(seconds, [sample["rss"] for sample in samples], color="0.5", label="resident memory")
    axis.set(xlabel="seconds", ylabel="MiB", title="Tiers under a churn of prefixes (dotted: their caps)")
    axis.set_ylim(bottom=0)
    axis.legend(loc="lower right")
    figure.savefig(file)


def markdown(result: dict[str, Any], command: str) -> str:
    """Tables for people; a ratio's goal stands beside it."""
    lines = [f"{result['machine']}, {result['date']}; `{command}`"]
    if restore := result.get("restore"):
        seconds, first, alone = restore["seconds"], restore["first_token_of_cold"], restore["restore_of_cold"]
        lines += [
            "", f"| {restore['prefix_tokens']:,}-token prefix, {restore['mib']:.1f} MiB of KV | ms | of cold | goal |",
            "|---|---|---|---|", f"| first token, cold | {1000 * seconds['cold']:.0f} | 1 | |",
        ]  # fmt: skip
        for name, goal in (("device", "≤ 0.25"), ("host", ""), ("disk", "")):
            lines.append(f"| first token, from {name} | {1000 * seconds[name]:.0f} | {first[name]:.3f} | {goal} |")
        for name, goal in (("host", "≤ 0.15"), ("disk", "≤ 0.3")):
            took = 1000 * seconds[f"load_{name}"]
            lines.append(f"| restored from {name} | {took:.0f} | {alone[name]:.3f} | {goal} |")
        lines.append(f"| loads that the predictor declined | {restore['declined']} | | |")
    if log := result.get("log"):
        lines += ["", "| append, 32 sessions a transaction | ms | of an fdatasync | goal |", "|---|---|---|---|"]
        lines.append(f"| a bare fdatasync | {log['fdatasync_ms']:.3f} | 1 | |")
        for length, took in log["append_ms"].items():
            goal = "≤ 0.1" if length == max(log["append_ms"]) else ""
            lines.append(f"| logs of {length:,} records | {took:.4f} | {took / log['fdatasync_ms']:.3f} | {goal} |")
    if churn := result.get("churn"):
        lines += ["", f"| churn, {churn['minutes']:g} min, {churn['requests']:,} requests | most MiB | cap MiB |"]
        lines += ["|---|---|---|"]
        lines += [f"| {name} | {churn['most_mib'][name]:.1f} | {cap:.1f} |" for name, cap in churn["cap_mib"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["restore", "log", "churn", []], default=[])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--data", type=Path, help="where log and disk tier go; its disk decides")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--log", default="", help="the log's URL; empty: SQLite")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    wanted = options.what or ["restore", "log", "churn"]
    result: dict[str, Any] = {"machine": machine(), "date": date.today().isoformat()}
    with tempfile.TemporaryDirectory(dir=options.data) as folder:
        model = str(pulled(options.dtype))
        base = {"draft": ("none",), "dtype": options.dtype, "model": model, "data_dir": Path(folder)}
        if "restore" in wanted:
            loaded = compose.load(Settings(**base), no_progress)
            result["restore"] = asyncio.run(measure_restore(loaded, options.repeat))
            loaded.thread.shutdown()
        if "log" in wanted:
            result["log"] = asyncio.run(measure_log(Path(folder), options.log))
        if "churn" in wanted:
            small = Settings(**base, kv_memory_mb=64, kv_host_mb=96, kv_disk_mb=192)
            loaded = compose.load(small, no_progress)
            result["churn"] = asyncio.run(measure_churn(loaded, options.minutes))
            loaded.thread.shutdown()
            if options.plot:
                plot(result["churn"], options.plot)
            samples = result["churn"].pop("samples")
            result["churn"]["samples_taken"] = len(samples)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))
    text = markdown(result, " ".join(["python -m benchmarks.cache", *sys.argv[1:]]))
    if options.markdown:
        options.markdown.write_text(text)
    print(text)


def pulled(dtype: str) -> Path:
    """The default model, from the ordinary data folder, so that it is fetched once."""
    from sdcp_mono.models.source import resolve

    return resolve(None, Settings().data_dir, no_progress, dtype=dtype).path  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
