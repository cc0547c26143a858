"""What each drafter proposes, how much of it the target accepts, and what it costs.

    python benchmarks/drafters.py [--model M] [--data DIR] [--weights F] [--sampled] [--per-class N] [--json]

Target and drafters alone, one session, without the roles: a round is one call of the draft model and one verification
pass. For every prompt the drafters take turns, so that ratios compare like with like on a machine that is not quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sdcp_mono.core.accept import accept, uniforms
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import Draft, DraftModel, DraftRequest, ScoreRequest
from sdcp_mono.drafters.ngram import NgramDraft
from sdcp_mono.drafters.quantized import load_quantized
from sdcp_mono.models import Tokenizer, resolve
from sdcp_mono.runners.blocks import BLOCK_SIZE
from sdcp_mono.runners.loading import load_decoder
from sdcp_mono.runners.paged import PagedModel
from sdcp_mono.runners.target import TargetRunner

KV_BYTES = 256 << 20
TOKEN_BUDGET = 256
SAMPLING = Sampling(seed=1)
WARM_UP = 2  # rounds in which target and drafter see the prompt: not counted

Sources = tuple[tuple[DraftModel, int], ...]  # asked in order, each with its M; the first proposal is used


@dataclass(slots=True)
class Tally:
    """One way of drafting on all prompts."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    judged: int = 0  # accepted, and the first rejected one of a round
    equal: int = 0  # prompts whose output is that of plain decoding
    seconds: float = 0.0
    draft_seconds: list[float] = field(default_factory=list)  # a step
    by_class: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # tokens a pass

    def result(self, plain: Tally, prompts: int) -> dict[str, Any]:
        step = statistics.median(self.draft_seconds) if self.draft_seconds else 0.0
        return {
            "tokens_per_pass": self.tokens / self.passes,
            "acceptance": self.accepted / self.judged if self.judged else 0.0,
            "drafted_per_pass": self.drafted / self.passes,
            "draft_step_ms": 1000 * step,
            "draft_step_of_plain_pass": step / (plain.seconds / plain.passes),
            "tokens_per_second": self.tokens / self.seconds,
            "speed_up": (self.tokens / self.seconds) / (plain.tokens / plain.seconds),
            "equal_to_plain": self.equal / prompts,
            "by_class": {kind: statistics.mean(values) for kind, values in self.by_class.items()},
        }


def generate(
    target: TargetRunner,
    sources: Sources,
    prompt: list[int],
    stop: Sequence[int],
    rule: Rule,
    limit: int,
    session: bytes,
) -> tuple[list[int], Tally]:
    """Output of at most ``limit`` tokens, and the rounds after the first two."""
    tally, prefix, end = Tally(), list(prompt), len(prompt) + limit
    target.admit(session, end)
    started = time.perf_counter()
    round = 0
    while len(prefix) < end and not (round and prefix[-1] in stop):
        round += 1
        draft = Draft(())
        if round >= WARM_UP:
            for drafter, m in sources:
                request = DraftRequest(session, prefix, len(prefix), m, rule, SAMPLING, round)
                while (answer := drafter.draft([request])[0]) is None:
                    pass
                if (draft := answer).tokens:
                    break
        draws = uniforms(1, session, round, len(draft.tokens))
        request_ = ScoreRequest(session, prefix, len(prefix), draft.tokens, rule, SAMPLING, draws, draft.rows)
        while (scored := target.step([request_])[0]) is None:
            pass
        assert isinstance(scored, Sequence)
        outcome = accept(rule, draft.tokens, scored, draws)
        prefix += [*draft.tokens[: outcome.accepted], outcome.extra]
        if round == WARM_UP:
            started = time.perf_counter()
        elif round > WARM_UP:
            tally.passes += 1
            tally.tokens += outcome.accepted + 1
            tally.drafted += len(draft.tokens)
            tally.accepted += outcome.accepted
            tally.judged += outcome.accepted + (outcome.accepted < len(draft.tokens))
            if draft.seconds_per_token:
                tally.draft_seconds.append(draft.seconds_per_token)
    tally.seconds = time.perf_counter() - started
    target.release(session)
    for drafter, _ in sources:
        drafter.release(session)
    return prefix[len(prompt) : end], tally


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    folder = resolve(args.model, args.data)
    tokenizer = Tokenizer(folder.path)
    decoder = load_decoder(folder.path, args.weights)
    blocks = KV_BYTES // (BLOCK_SIZE * decoder.kv_bytes_per_token)
    model = PagedModel(decoder, folder.card.target, blocks=blocks, token_budget=TOKEN_BUDGET)
    target = TargetRunner(folder.card, model)
    quantized = load_quantized(folder.path, folder.card.target, kv_bytes=KV_BYTES, token_budget=TOKEN_BUDGET)
    width = folder.card.vocab_size
    ways: dict[str, Sources] = {"none": ()}
    ways |= {f"ngram from {n}, M=8": ((NgramDraft(width, min_match=n), 8),) for n in (1, 2, 3)}
    ways |= {f"quantized, M={m}": ((quantized, m),) for m in (3, 5)}
    ways |= {f"ngram from {n}, else quantized": ((NgramDraft(width, min_match=n), 8), (quantized, 5)) for n in (2, 3)}

    rule = Rule.SPECULATIVE_SAMPLING if args.sampled else Rule.GREEDY
    tallies = {name: Tally() for name in ways}
    taken: dict[str, int] = defaultdict(int)
    prompts = 0
    for prompt in json.loads(Path(__file__).with_name("prompts.json").read_text()):
        kind = prompt["class"]
        taken[kind] += 1
        if taken[kind] > args.per_class:
            continue
        ids = tokenizer.apply_chat([{"role": "user", "content": prompt["text"]}])
        plain: list[int] = []
        for index, (name, sources) in enumerate(ways.items()):
            session = bytes((prompts, index)).ljust(16, b"\0")
            output, one = generate(target, sources, ids, folder.eos_ids, rule, args.max_tokens, session)
            plain = plain or output
            total = tallies[name]
            for count in ("tokens", "passes", "drafted", "accepted", "judged", "seconds", "draft_seconds"):
                setattr(total, count, getattr(total, count) + getattr(one, count))
            total.equal += output == plain
            if one.passes:
                total.by_class[kind].append(one.tokens / one.passes)
        prompts += 1
    return {name: tally.result(tallies["none"], prompts) for name, tally in tallies.items()}


def show(results: dict[str, dict[str, Any]]) -> None:
    columns = {"drafter": "", "a pass": "tokens_per_pass", "accepted": "acceptance", "step ms": "draft_step_ms",
               "of a pass": "draft_step_of_plain_pass", "tokens/s": "tokens_per_second", "speed-up": "speed_up",
               "equal": "equal_to_plain"}  # fmt: skip
    table = Table(*columns)
    for name, result in results.items():
        table.add_row(name, *(f"{result[key]:.2f}" for key in columns.values() if key))
    classes = Table("committed tokens a pass", *results["none"]["by_class"])
    for name, result in results.items():
        classes.add_row(name, *(f"{value:.2f}" for value in result["by_class"].values()))
    Console().print(table, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as for sdcp-mono serve")
    parser.add_argument("--data", type=Path, default=Path.home() / ".local/share/sdcp-mono")
    parser.add_argument("--weights", default="bfloat16", choices=("float32", "bfloat16", "int8", "int4"))
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--per-class", type=int, default=2, help="prompts of each class")
    parser.add_argument("--sampled", action="store_true", help="rule 2 at temperature 1 instead of greedy")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = measure(args)
    if args.json:
        print(json.dumps({"weights": args.weights, "sampled": args.sampled, "drafters": results}))
    else:
        show(results)


if __name__ == "__main__":
    main()
