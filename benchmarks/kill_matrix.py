"""The kill matrix: roles are killed, paused and cut off at each phase of a round, and no token may be lost.

    python -m benchmarks.kill_matrix [--runs 200] [--seed 0] [--out FILE] [--json] [--write]

Every run is a stream through a cluster of processes with TLS between them. At a chosen call of a chosen phase one
role gets SIGKILL (and is started again), SIGSTOP (SIGCONT after its status has expired), or loses its network for as
long (where namespaces may be made). The client goes on with Last-Event-ID where it has to. Its tokens must be those of
the same request undisturbed, the commit log must be one line, and an append below a fence must be refused.

FILE gets a line a run; a run that is in it is not done again. ``--write`` puts the table into docs/split.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.kill_run import PHASES, WORKLOADS, Bench, Plan, Result
from benchmarks.namespaces import Namespaces, why_not
from benchmarks.serving import machine
from sdcp_mono.compose.demo import told_to_stop
from sdcp_mono.roles.verifier import STATUS_TTL_MS

ROLES = ("router", "verifier", "drafter", "cache")
FAULTS = ("kill", "pause", "cut")
SHOWN = {"kill": "SIGKILL", "pause": "SIGSTOP, SIGCONT", "cut": "cut off, healed"}
MEMBERS = ("cache", "router", "verifier-0", "verifier-1", "drafter-0", "drafter-1")
LAST_CALL = 6  # a run has a dozen rounds
DOCUMENT = Path(__file__).parents[1] / "docs" / "split.md"
START, END = "<!-- kill matrix: start -->\n", "<!-- kill matrix: end -->\n"


def plans(runs: int, seed: int) -> list[Plan]:
    """Each role, fault, phase and workload once in random order, then again, until there are ``runs``."""
    dice = random.Random(seed)
    cells = list(itertools.product(ROLES, FAULTS, PHASES, WORKLOADS))
    chosen: list[Plan] = []
    while len(chosen) < runs:
        dice.shuffle(cells)
        for role, fault, phase, workload in cells[: runs - len(chosen)]:
            call = 1 if phase == "prefill" else dice.randint(1, LAST_CALL)
            chosen.append(Plan(len(chosen), role, fault, phase, workload, call))
    return chosen


def table(results: Sequence[dict[str, Any]], skipped: int, why: str) -> str:
    """Markdown: a row for each role and fault."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["role"], result["fault"]].append(result)
    lines = [
        "| role | fault | runs | lost | duplicated | changed | log not linear | other | refused below a fence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for role, fault in itertools.product(ROLES, FAULTS):
        if members := groups.get((role, fault)):
            lines.append(_row(f"{role} | {SHOWN[fault]}", members))
    lines.append(_row("all | ", results))
    for fault, name in (("kill", "SIGKILL"), ("pause", "SIGSTOP"), ("cut", "a cut")):
        times = [r["resume_ms"] for r in groups.get(("verifier", fault), ()) if r["resume_ms"] is not None]
        if times:
            lines += ["", f"From {name} of a verifier to the next committed token at the client: median "
                      f"{statistics.median(times):.0f} ms, most {max(times):.0f} ms ({len(times)} runs; "
                      f"a status lasts {STATUS_TTL_MS} ms)."]  # fmt: skip
    if skipped:
        lines += ["", f"Left out: {skipped} runs with a cut network; {why}."]
    return "\n".join(lines) + "\n"


def _row(name: str, members: Sequence[dict[str, Any]]) -> str:
    def count(kind: str) -> int:
        return sum(any(problem.startswith(kind) for problem in r["problems"]) for r in members)

    kinds = ("lost", "duplicated", "changed", "log")
    counted = [count(kind) for kind in kinds]
    other = sum(any(not problem.startswith(kinds) for problem in r["problems"]) for r in members)
    forged, refused = (sum(r[key] for r in members) for key in ("forged", "refused"))
    return f"| {name} | {len(members)} | {' | '.join(map(str, counted))} | {other} | {refused} of {forged} |"


def carry_out(chosen: Sequence[Plan], out: Path, seed: int, spaces: bool) -> None:
    """Do what ``out`` doesn't have yet; a bench that broke is replaced by a fresh one for the next run."""
    console = Console(stderr=True)
    done = {result["run"] for result in read(out)}
    left = iter(track([plan for plan in chosen if plan.run not in done], "runs", console=console))
    with tempfile.TemporaryDirectory(prefix="sdcp-kill-") as folder, ExitStack() as stack:
        network = stack.enter_context(Namespaces(MEMBERS)) if spaces else None
        while (plan := next(left, None)) is not None:
            with Bench(Path(folder), network, seed=seed) as bench:
                while plan is not None:
                    result = attempt(bench, plan)
                    with out.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
                    if result.problems:
                        console.print(f"run {plan.run} {plan}: {result.problems}", markup=False)
                    plan = None if any("bench" in problem for problem in result.problems) else next(left, None)


def attempt(bench: Bench, plan: Plan) -> Result:
    """A run; a cluster that doesn't come up again is a problem of the run that broke it."""
    try:
        return bench.run(plan)
    except Exception as error:
        problem = f"bench: {type(error).__name__}: {error}"
        return Result(plan.run, plan.role, plan.fault, plan.phase, plan.workload, problems=[problem])


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("kill-matrix.jsonl"))
    parser.add_argument("--json", action="store_true", help="print the runs instead of the table")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args()
    why = why_not()
    wanted = plans(options.runs, options.seed)
    chosen = [plan for plan in wanted if not (why and plan.fault == "cut")]
    carry_out(chosen, options.out, options.seed, spaces=not why)
    numbers = {plan.run for plan in chosen}
    results = [result for result in read(options.out) if result["run"] in numbers]
    if options.json:
        print(json.dumps(results))
        return
    command = f"python -m benchmarks.kill_matrix --runs {options.runs} --seed {options.seed}"
    text = f"{machine()}, {date.today().isoformat()}; `{command}`\n\n" + table(results, len(wanted) - len(chosen), why)
    print(text)
    if options.write:
        before, rest = DOCUMENT.read_text().split(START)
        DOCUMENT.write_text(before + START + text + END + rest.split(END)[1])


if __name__ == "__main__":
    with told_to_stop():
        main()
