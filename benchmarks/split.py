"""What it costs that roles are processes: one round over gRPC, and 16 sessions' throughput.

    python -m benchmarks.split [--repeat 5] [--tokens 96] [--json FILE] [--write]

Both ways answer over HTTP and are asked in turn within one run. The round has no model in it (``benchmarks.no_model``);
the throughput is the default model's, with two drafters and one verifier beside ``serve``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.serving import PROMPTS, machine
from benchmarks.sse_client import Stream
from benchmarks.tiny_models import CONTEXT, write_models
from sdcp_mono.compose.cluster import POLL_SECONDS, Cluster, free_ports, health
from sdcp_mono.compose.demo import told_to_stop
from sdcp_mono.models.identity import no_progress
from sdcp_mono.models.source import resolve
from sdcp_mono.settings import Settings

SESSIONS = 16
M = 4
PROMPT = [1, 2, 3, 4]
DOCUMENT = Path(__file__).parents[1] / "docs" / "split.md"
START, END = "<!-- split: start -->\n", "<!-- split: end -->\n"


@contextmanager
def serving(module: str, folder: Path, settings: dict[str, str]) -> Iterator[str]:
    """``serve`` as a process; its URL."""
    (port,) = free_ports(1)
    own = {"SDCP_PORT": str(port), "SDCP_GATEWAY": "false", "SDCP_DATA_DIR": str(folder / "serve")}
    with (folder / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "serve"], env={**os.environ, **settings, **own}, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while not (health(url) or {}).get("ready"):
            if process.poll() is not None:
                raise RuntimeError(f"serve ended; see {folder / 'serve.log'}")
            time.sleep(POLL_SECONDS)
        yield f"{url}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def split(module: str, folder: Path, settings: dict[str, str], drafters: int) -> Iterator[str]:
    """The roles as processes; the router's URL."""
    cluster = Cluster(
        folder, settings, verifiers=1, drafters=drafters, command=lambda name: (sys.executable, "-m", module)
    )
    try:
        cluster.start()
        cluster.wait()
        yield cluster.url
    finally:
        cluster.stop()


def rounds(repeat: int) -> dict[str, float]:
    """Milliseconds between two rounds' events at the client, p50 and p90."""
    gaps: dict[str, list[float]] = {"serve": [], "split": []}
    with tempfile.TemporaryDirectory(prefix="sdcp-split-") as name, ExitStack() as stack:
        folder = Path(name)
        target, _ = write_models(folder / "models")
        settings = {"SDCP_MODEL": str(target), "SDCP_DTYPE": "float32", "SDCP_M_FIXED": str(M), "SDCP_KV_HOST_MB": "0"}
        ways = {
            "serve": stack.enter_context(serving("benchmarks.no_model", folder, settings)),
            "split": stack.enter_context(split("benchmarks.no_model", folder / "split", settings, drafters=1)),
        }
        for number in track(range(4 * repeat + 1), "rounds", console=Console(stderr=True)):
            for way, url in ways.items():
                body = {"prompt": PROMPT, "max_tokens": CONTEXT - len(PROMPT), "temperature": 0}
                stream = read(url, body)
                times = [at for at, _ in stream.arrivals[2:]]  # the first token, then a round that waited for a drafter
                if number:  # the first one finds caches cold
                    gaps[way] += [1000 * (b - a) for a, b in pairwise(times)]
    found: dict[str, float] = {}
    for way, values in gaps.items():
        found[f"{way}_p50_ms"] = statistics.median(values)
        found[f"{way}_p90_ms"] = statistics.quantiles(values, n=10)[8]
    return {**found, "more_p50_ms": found["split_p50_ms"] - found["serve_p50_ms"]}


def throughput(repeat: int, tokens: int) -> dict[str, Any]:
    """Committed tokens per second of 16 sessions, by repetition."""
    model = str(resolve(None, Settings().data_dir, no_progress).path)
    prompts = [entry["text"] for entry in json.loads(PROMPTS.read_text())][: 2 * SESSIONS]
    rates: dict[str, list[float]] = {"serve": [], "split": []}
    with tempfile.TemporaryDirectory(prefix="sdcp-split-") as name, ExitStack() as stack:
        folder = Path(name)
        settings = {"SDCP_MODEL": model, "SDCP_KV_MEMORY_MB": "512"}
        ways = {
            "serve": stack.enter_context(serving("sdcp_mono", folder, settings)),
            "split": stack.enter_context(split("sdcp_mono", folder / "split", settings, drafters=2)),
        }
        for number in track(range(repeat + 1), "throughput", console=Console(stderr=True)):
            for way, url in ways.items():
                rate = together(url, prompts, tokens)
                if number:
                    rates[way].append(rate)
    ratios = [b / a for a, b in zip(rates["serve"], rates["split"], strict=True)]
    return {**{way: statistics.median(found) for way, found in rates.items()}, "ratio": statistics.median(ratios)}


def together(url: str, prompts: Sequence[str], tokens: int) -> float:
    def one(prompt: str) -> int:
        stream = read(url, {"model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0})
        return len(stream.tokens[0])

    started = time.perf_counter()
    with ThreadPoolExecutor(SESSIONS) as pool:
        done = sum(pool.map(one, prompts))
    return done / (time.perf_counter() - started)


def read(url: str, body: dict[str, Any]) -> Stream:
    stream = Stream(url, body)
    stream.run()
    if stream.error:
        raise RuntimeError(stream.error)
    return stream


def table(result: dict[str, Any]) -> str:
    cost, rate = result["rounds"], result["throughput"]
    lines = [
        f"{result['machine']}, {result['date']}; `{result['command']}`",
        "",
        "| | `serve` | split | |",
        "|---|---|---|---|",
        f"| a round without any model, at the client, p50 | {cost['serve_p50_ms']:.2f} ms | {cost['split_p50_ms']:.2f} "
        f"ms | {cost['more_p50_ms']:+.2f} ms |",
        f"| … p90 | {cost['serve_p90_ms']:.2f} ms | {cost['split_p90_ms']:.2f} ms | |",
        f"| {SESSIONS} sessions, 1 verifier, 2 drafters, tokens/s | {rate['serve']:.0f} | {rate['split']:.0f} | "
        f"{rate['ratio']:.2f}× |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args()
    result = {
        "machine": machine(), "date": date.today().isoformat(),
        "command": f"python -m benchmarks.split --repeat {options.repeat} --tokens {options.tokens}",
        "rounds": rounds(options.repeat), "throughput": throughput(options.repeat, options.tokens),
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if options.write:
        before, rest = DOCUMENT.read_text().split(START)
        DOCUMENT.write_text(before + START + table(result) + END + rest.split(END)[1])


if __name__ == "__main__":
    with told_to_stop():
        main()
