"""The whole engine on the default model: plain decoding, default drafting, many sessions, and what a round costs.

    python -m benchmarks.serving [--repeat 3] [--tokens 96] [--json FILE] [--markdown FILE]

Ratios are taken within one interleaved run: for each prompt every configuration runs once, then the next repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from msgspec import structs
from prometheus_client import CollectorRegistry
from rich.progress import track

from benchmarks import rounds as round_cost
from sdcp_mono import compose
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import GenerateRequest, RoundInfo, ScoreRequest
from sdcp_mono.models.identity import no_progress
from sdcp_mono.settings import Settings

PROMPTS = Path(__file__).with_name("prompts.json")


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: committed tokens, seconds after the first token, and its rounds."""

    tokens: int
    seconds: float
    first: float
    rounds: tuple[RoundInfo, ...]

    @property
    def rate(self) -> float:
        return (self.tokens - 1) / self.seconds if self.tokens > 1 else 0.0


async def generate(node: compose.Node, request: GenerateRequest) -> Run:
    started = time.perf_counter()
    generation = await node.serving.generate(request)
    first, last, tokens, rounds = 0.0, 0.0, 0, []
    async for chunk in generation.chunks():
        last = time.perf_counter()
        first = first or last
        tokens += len(chunk.tokens)
        rounds += chunk.rounds
    await generation.close()
    return Run(tokens, last - first, first - started, tuple(rounds))


class Bench:
    def __init__(self, tokens: int, repeat: int) -> None:
        self.tokens = tokens
        self.repeat = repeat
        self.data = Path(tempfile.mkdtemp(prefix="sdcp-bench-"))
        settings = Settings(kv_memory_mb=512)
        self.loaded = compose.load(settings, no_progress)
        self.prompts = json.loads(PROMPTS.read_text())
        tokenizer = self.loaded.tokenizer
        for prompt in self.prompts:
            prompt["ids"] = tuple(tokenizer.apply_chat([{"role": "user", "content": prompt["text"]}]))

    def node(self, drafted: bool, **changes: Any) -> compose.Node:
        settings = self.loaded.settings.model_copy(update={"data_dir": self.data, **changes})
        drafts = self.loaded.drafts if drafted else ()
        return compose.Node(replace(self.loaded, settings=settings, drafts=drafts), CollectorRegistry())

    def request(self, ids: tuple[int, ...], **changes: Any) -> GenerateRequest:
        base = GenerateRequest(
            prompt=ids,
            max_new=self.tokens,
            stop=tuple(self.loaded.folder.eos_ids),
            rule=Rule.GREEDY,
            sampling=Sampling(),
        )
        return structs.replace(base, **changes)

    def speculation(self) -> dict[str, Any]:
        """Plain decoding and default drafting, prompt by prompt, at temperature 0 and 1."""
        runs: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
        modes = {
            "greedy": {},
            "sampled": {"rule": Rule.SPECULATIVE_SAMPLING, "sampling": Sampling(temperature_milli=1000)},
        }
        for repetition in range(self.repeat):
            for prompt in track(self.prompts, f"speculation, repetition {repetition + 1}"):
                for name, drafted in (("plain", False), ("default", True)):
                    for mode, changes in modes.items():
                        if mode == "sampled" and repetition:
                            continue
                        run = asyncio.run(self._one(drafted, self.request(prompt["ids"], **changes)))
                        runs[mode, name, prompt["id"]].append(run)
        rows = {}
        for mode in modes:
            groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for prompt in self.prompts:
                groups["all"].append(prompt)
                groups[prompt["class"]].append(prompt)
                if prompt.get("copy_heavy"):
                    groups["copy-heavy"].append(prompt)
            rows[mode] = {group: self._row(runs, mode, members) for group, members in groups.items()}
        return rows

    async def _one(self, drafted: bool, request: GenerateRequest) -> Run:
        async with self.node(drafted) as node:
            return await generate(node, request)

    def _row(self, runs: Any, mode: str, members: list[dict[str, Any]]) -> dict[str, float]:
        """Tokens over seconds of the median repetition, summed over prompts."""
        row = {}
        for name in ("plain", "default"):
            seconds = tokens = rounds = 0.0
            for prompt in members:
                chosen = sorted(runs[mode, name, prompt["id"]], key=lambda run: run.seconds)
                median = chosen[len(chosen) // 2]
                seconds, tokens, rounds = (
                    seconds + median.seconds,
                    tokens + median.tokens - 1,
                    rounds + len(median.rounds) - 1,
                )
            row[name] = tokens / seconds
            row[f"{name}_tokens_per_round"] = tokens / max(rounds, 1)
        row["ratio"] = row["default"] / row["plain"]
        return row

    def sessions(self) -> dict[str, Any]:
        """Committed tokens per second of 1, 4 and 16 concurrent sessions, default drafting and plain."""
        answer = {}
        for count in track((1, 4, 16), "sessions"):
            for name, drafted in (("default", True), ("plain", False)):
                rates = []
                for _ in range(self.repeat):
                    requests = [self.request(prompt["ids"]) for prompt in self.prompts[: max(count, 8)]]
                    rates.append(asyncio.run(self._many(drafted, requests, count)))
                answer[f"{name} {count}"] = statistics.median(rates)
        return answer

    async def _many(self, drafted: bool, requests: list[GenerateRequest], together: int) -> float:
        slots = asyncio.Semaphore(together)

        async def one(request: GenerateRequest) -> int:
            async with slots:
                return (await generate(node, request)).tokens

        async with self.node(drafted) as node:
            started = time.perf_counter()
            tokens = sum(await asyncio.gather(*(one(request) for request in requests)))
            return tokens / (time.perf_counter() - started)

    def verification(self) -> dict[str, float]:
        """A pass over M + 1 rows against one row, milliseconds, median of 40 interleaved, at context 128."""
        target = self.loaded.target
        prefix = list(range(100, 228))
        session = b"benchmark".ljust(16)
        self.loaded.thread.submit(target.admit, session, 256).result()
        times: dict[int, list[float]] = defaultdict(list)

        def step(m: int) -> float:
            request = ScoreRequest(session, prefix, len(prefix), tuple(range(m)), Rule.GREEDY, Sampling())
            started = time.perf_counter()
            target.step([request])
            return 1000 * (time.perf_counter() - started)

        for _ in range(40):
            for m in (0, 1, 3, 7, 15):
                times[m].append(self.loaded.thread.submit(step, m).result())
        self.loaded.thread.submit(target.release, session).result()
        return {f"M={m}": statistics.median(values[4:]) for m, values in times.items()}

    def weights_mb(self) -> float:
        """Packed weights of target and drafters, embedding table not counted: it stays in the file."""
        from sdcp_mono.kernels import native
        from sdcp_mono.runners.fused import FusedDecoder

        models = [self.loaded.target, *(model for model, _ in self.loaded.drafts)]
        decoders = [getattr(getattr(model, "_model", None), "decoder", None) for model in models]
        packed = [m for d in decoders if isinstance(d, FusedDecoder) for m in d.matrices]
        names = {number: name for name, number in native.FORMATS.items()}
        return sum(native.packed_bytes(names[w.format], w.n, w.k) for w in packed) / 2**20

    def transformers(self) -> dict[str, float]:
        """Our plain decoding against transformers' generate, same weights and dtype, interleaved prompt by prompt."""
        import torch
        from transformers import AutoModelForCausalLM

        threads = torch.get_num_threads()
        model: Any = AutoModelForCausalLM.from_pretrained(self.loaded.folder.path, dtype=torch.bfloat16)
        ours = theirs = 0.0
        count = 0
        for prompt in track(self.prompts[::6], "transformers"):
            run = asyncio.run(self._one(False, self.request(prompt["ids"])))
            torch.set_num_threads(2)
            ids = torch.tensor([prompt["ids"]])
            times = []
            for tokens in (1, run.tokens):
                started = time.perf_counter()
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                               do_sample=False, pad_token_id=0)  # fmt: skip
                times.append(time.perf_counter() - started)
            torch.set_num_threads(threads)
            ours, theirs, count = ours + run.seconds, theirs + times[1] - times[0], count + run.tokens - 1
        return {"ours": count / ours, "transformers": count / theirs, "ratio": theirs / ours}


def startup() -> dict[str, float]:
    """From ``sdcp-mono serve`` on a converted model to the first token, and the memory it then holds idle."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SDCP_GATEWAY": "false", "COLUMNS": "200", "SDCP_TEST": folder}
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "sdcp_mono", "serve", "--port", "0"], stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "answers at" in line)
            url = next(word for word in line.split() if word.startswith("http://"))
            body = json.dumps({"prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
            request = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
            urllib.request.urlopen(request).read()
            first = time.perf_counter() - started
            status = Path(f"/proc/{process.pid}/status").read_text()
            resident = {
                line.split()[0].rstrip(":"): int(line.split()[1])
                for line in status.splitlines()
                if line.startswith("Rss")
            }
        finally:
            process.terminate()
            process.wait(30)
    return {
        "first_token_s": first,
        "rss_anon_mb": resident["RssAnon"] / 1024,
        "rss_file_mb": resident["RssFile"] / 1024,
    }


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    flags = Path("/proc/cpuinfo").read_text()
    isa = next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags), "")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {isa}, Linux {platform.release().split('-')[0]}"


def markdown(result: dict[str, Any]) -> str:
    lines = [f"{result['machine']}, {result['date']}; `{result['command']}`", ""]
    greedy, sampled = result["speculation"]["greedy"], result["speculation"]["sampled"]
    lines += [
        "| prompts | plain tokens/s | default tokens/s | ratio | tokens per round | temperature 1: ratio |",
        "|---|---|---|---|---|---|",
    ]
    for group, row in greedy.items():
        lines.append(
            f"| {group} | {row['plain']:.1f} | {row['default']:.1f} | {row['ratio']:.2f} | "
            f"{row['default_tokens_per_round']:.2f} | {sampled[group]['ratio']:.2f} |"
        )
    verification = result["verification"]
    base = verification["M=0"]
    lines += ["", "| one target pass | ms | ratio to one row |", "|---|---|---|"]
    lines += [f"| {name} | {ms:.2f} | {ms / base:.2f} |" for name, ms in verification.items()]
    lines += ["", "| sessions | default tokens/s | plain tokens/s |", "|---|---|---|"]
    for count in (1, 4, 16):
        lines.append(
            f"| {count} | {result['sessions'][f'default {count}']:.0f} | {result['sessions'][f'plain {count}']:.0f} |"
        )
    hf, start, cost = result["transformers"], result["startup"], result["rounds"]
    sessions, proposed = result["sessions"], cost["proposed"]
    weights = result["weights_mb"]
    scale = sessions["default 16"] / sessions["default 1"]
    facts = {
        "plain decoding against transformers `generate`, bfloat16, tokens/s": (
            f"{hf['ours']:.1f} / {hf['transformers']:.1f} = {hf['ratio']:.2f}×"
        ),
        "16 sessions against one, default drafting": f"{scale:.2f}×",
        "of a round, neither model nor drafting, p50 (`python -m benchmarks.rounds`)": f"{proposed['round_ms']:.2f} ms",
        f"… of it the durable append (a bare fdatasync here: {cost['fdatasync_ms']:.2f} ms)": (
            f"{proposed['append_ms']:.2f} ms"
        ),
        "`serve` on a converted model to the first token": f"{start['first_token_s']:.1f} s",
        f"idle memory, anonymous + file-backed (weights in memory: {weights:.0f} MB)": (
            f"{start['rss_anon_mb']:.0f} + {start['rss_file_mb']:.0f} MB"
        ),
    }
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    bench = Bench(options.tokens, options.repeat)
    result = {
        "machine": machine(),
        "date": date.today().isoformat(),
        "command": f"python -m benchmarks.serving --repeat {options.repeat} --tokens {options.tokens}",
        "rounds": round_cost.run(bench.data), "weights_mb": bench.weights_mb(),
        "verification": bench.verification(), "speculation": bench.speculation(),
        "sessions": bench.sessions(), "transformers": bench.transformers(), "startup": startup(),
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    if options.markdown:
        options.markdown.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
