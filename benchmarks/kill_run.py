"""One run of the kill matrix: a stream, a fault at a chosen moment, and what became of the tokens and the log."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.namespaces import Namespaces
from benchmarks.sse_client import GIVE_UP_SECONDS, Stream
from benchmarks.tiny_models import SPECIAL, VOCAB, write_models
from sdcp_mono import certs
from sdcp_mono.compose.cluster import LOOPBACK, POLL_SECONDS, Cluster, Member, health
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.ports import LogAppend
from sdcp_mono.grpc.cache_client import CommitLogClient
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.roles.router import SCOPE
from sdcp_mono.roles.verifier import STATUS_TTL_MS

PHASES: Final = ("prefill", "drafting", "proposed", "appended", "idle")  # as ``tripwire`` knows them
PROMPT_TOKENS: Final = 300  # three passes of prefill with the budget below
NEW_TOKENS: Final = 64
WATCH_SECONDS: Final = 0.002
AWAY_SECONDS: Final = STATUS_TTL_MS / 1000 + 0.7  # of a paused or cut off role: its status has expired by then
SETTINGS: Final = {
    "SDCP_DTYPE": "float32", "SDCP_THREADS": "1", "SDCP_KV_MEMORY_MB": "16", "SDCP_KV_HOST_MB": "16",
    "SDCP_KV_DISK_MB": "0", "SDCP_LOG_LEVEL": "warning", "SDCP_M_FIXED": "4", "SDCP_TOKEN_BUDGET": "128",
    "SDCP_DRAIN_SECONDS": "1",
}  # fmt: skip
WORKLOADS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": True},
    "n=2": {"temperature": 1, "seed": True, "n": 2},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done in a run. ``fault``: kill, pause (SIGSTOP, later SIGCONT) or cut (off the network, then back)."""

    run: int
    role: str
    fault: str
    phase: str
    workload: str
    call: int  # of the phase


@dataclass(slots=True)
class Result:
    """What came of it. ``problems`` is empty if all is well."""

    run: int
    role: str
    fault: str
    phase: str
    workload: str
    fired: bool = False
    victim: str = ""
    problems: list[str] = field(default_factory=list)
    reconnected: int = 0
    epoch: int = 1
    forged: int = 0  # appends below a fence that were tried with the victim's certificate
    refused: int = 0  # of them
    resume_ms: float | None = None  # from the fault to the next token under a higher epoch
    seconds: float = 0.0


class Bench:
    """A long-living cluster whose processes are ``benchmarks.tripwire``; in namespaces if they are given."""

    def __init__(self, folder: Path, spaces: Namespaces | None = None, *, seed: int = 0) -> None:
        self.folder, self.spaces, self.seed = folder, spaces, seed
        self.trap = folder / "trap"
        self.trap.mkdir(parents=True, exist_ok=True)
        target, draft = write_models(folder / "models")
        settings = {**SETTINGS, "SDCP_MODEL": str(target), "SDCP_DRAFT": f"ngram,model:{draft}"}
        shutil.rmtree(folder / "cluster", ignore_errors=True)
        self.cluster = Cluster(
            folder / "cluster", {**settings, "TRIPWIRE": str(self.trap)}, command=self._command,
            host=lambda name: LOOPBACK if spaces is None else spaces.host(name),
        )  # fmt: skip

    def _command(self, name: str) -> Sequence[str]:
        inside = () if self.spaces is None else self.spaces.command(name)
        return (*inside, sys.executable, "-m", "benchmarks.tripwire")

    def __enter__(self) -> Bench:
        try:
            self.cluster.start()
            self.settle()
        except BaseException:
            self.cluster.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()

    def settle(self) -> None:
        """Until all is up and the router has heard of everyone."""
        self.cluster.wait()
        wanted = {m.base for m in self.cluster.members.values() if m.role in ("verifier", "drafter")}
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            told = health(self.cluster.members["router"].url) or {}
            if wanted <= {instance["base"] for instance in told.get("instances", ()) if instance["alive"]}:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the router hasn't heard of everyone: {told}")
            time.sleep(POLL_SECONDS)

    def fenced(self) -> int:
        """Appends of verifiers that the log has refused so far."""
        path = self.trap / "fenced"
        return len(path.read_text().splitlines()) if path.exists() else 0

    # ---- a run -----------------------------------------------------------------------------------

    def run(self, plan: Plan) -> Result:
        result = Result(plan.run, plan.role, plan.fault, plan.phase, plan.workload)
        started = time.monotonic()
        body = self._body(plan)
        for name in ("order.json", "order.taken", "tripped.json"):
            (self.trap / name).unlink(missing_ok=True)
        order = {"run": plan.run, "phase": plan.phase, "call": plan.call}
        (self.trap / "order.partial").write_text(json.dumps(order))
        (self.trap / "order.partial").rename(self.trap / "order.json")
        stream = Stream(self.cluster.url, body)
        stream.start()
        tripped = self._tripped(stream)
        if tripped is not None:
            result.fired = True
            self._strike(plan, tripped, stream, result)
        stream.join(GIVE_UP_SECONDS)
        (self.trap / "order.json").unlink(missing_ok=True)
        self.settle()
        again = Stream(self.cluster.url, body)
        again.start()
        again.join(GIVE_UP_SECONDS)
        result.reconnected = stream.reconnected
        result.epoch = max((epoch for *_, epoch in stream.logs), default=1)
        if not result.fired:
            result.problems.append(f"the phase did not come {plan.call} times")
        if stream.error or not stream.done:
            result.problems.append(f"the stream failed: {stream.error or 'it did not end'}")
        if again.error or not again.done or again.reconnected:
            result.problems.append(f"the second stream failed: {again.error or again.broken or 'it did not end'}")
        result.problems += compared(stream.tokens, again.tokens)
        asyncio.run(self._judge(plan, stream, result))
        result.seconds = time.monotonic() - started
        return result

    def _body(self, plan: Plan) -> dict[str, Any]:
        dice = random.Random(f"{self.seed}/{plan.run}")
        prompt = [dice.randrange(SPECIAL, VOCAB) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, **WORKLOADS[plan.workload]}
        return {**body, "seed": dice.randrange(2**31)} if "seed" in body else body

    def _tripped(self, stream: Stream) -> dict[str, Any] | None:
        """Where the order was carried out; None if the stream ended before."""
        path = self.trap / "tripped.json"
        while not path.exists():
            if not stream.is_alive():
                return None
            time.sleep(WATCH_SECONDS)
        found: dict[str, Any] = json.loads(path.read_text())
        while _state(found["pid"]) != "T":
            time.sleep(WATCH_SECONDS)
        return found

    def _strike(self, plan: Plan, tripped: dict[str, Any], stream: Stream, result: Result) -> None:
        victim = self._victim(plan.role, tripped)
        result.victim = victim.name
        before = len(stream.arrivals)
        epoch = stream.arrivals[-1][1] if before else 1
        struck = time.monotonic()
        if plan.fault == "kill":
            os.kill(victim.pid, signal.SIGKILL)
        elif plan.fault == "pause":
            os.kill(victim.pid, signal.SIGSTOP)
        elif self.spaces is not None:
            self.spaces.cut(victim.name)
        if tripped["pid"] != victim.pid or plan.fault == "cut":
            os.kill(tripped["pid"], signal.SIGCONT)
        if plan.fault == "kill":
            assert victim.process is not None
            victim.process.wait()
            stream.wait_for(lambda: stream.arrivals[before:] and stream.arrivals[-1][1] > epoch, AWAY_SECONDS)
            self.cluster.start(victim.name)  # as whatever supervises it would
        else:
            time.sleep(max(0.0, struck + AWAY_SECONDS - time.monotonic()))
            if plan.fault == "pause":
                os.kill(victim.pid, signal.SIGCONT)
            elif self.spaces is not None:
                self.spaces.heal(victim.name)
        stream.join(GIVE_UP_SECONDS)
        moved = [at for at, found in stream.arrivals if found > epoch and at > struck]
        if plan.role == "verifier" and moved:
            result.resume_ms = 1000 * (moved[0] - struck)

    def _victim(self, role: str, tripped: dict[str, Any]) -> Member:
        members = self.cluster.of(role)
        named = tripped.get(role, "")
        return next((member for member in members if member.base == named), members[0])

    # ---- the log ---------------------------------------------------------------------------------

    async def _judge(self, plan: Plan, stream: Stream, result: Result) -> None:
        """Read each choice's log with the verifiers' own certificate; below a fence, try to append with it."""
        victim = result.victim if plan.role == "verifier" and result.victim else "verifier-0"
        cache = self.cluster.of("cache")[0]
        files = certs.files(self.cluster.folder / "certs", victim)
        async with Channel(cache.base.split("/")[2], files) as channel:
            log = CommitLogClient(channel)
            for choice, (_, name, _) in enumerate(stream.logs):
                uri = str(MlcUri("local", SCOPE, "log", name))
                records = await log.read(uri)
                result.problems += linear(records, stream.tokens[choice])
                fence = max((r.epoch for r in records if isinstance(r, FenceRecord)), default=0)
                if fence:
                    forged = _forged(records, fence - 1)
                    result.forged += 1
                    (outcome,) = await log.append([LogAppend(log=uri, sequence=len(records), record=forged)])
                    result.refused += outcome == "fenced"
                    if outcome != "fenced":
                        result.problems.append(f"an append of epoch {fence - 1} below fence {fence}: {outcome}")


def _forged(records: Sequence[CommitRecord | FenceRecord], epoch: int) -> CommitRecord:
    """The next record as a verifier would write it that doesn't know of the fence."""
    last = next((r for r in reversed(records) if isinstance(r, CommitRecord)), None)
    round_, committed = (0, 0) if last is None else (last.round, last.committed)
    return CommitRecord(epoch=epoch, round=round_ + 1, emitted=(5,), committed=committed + 1, digest=bytes(32))


def linear(records: Sequence[CommitRecord | FenceRecord], tokens: Sequence[int]) -> list[str]:
    """What is wrong with a log that should be one line of rounds, below no fence, with exactly ``tokens``."""
    problems, written, fence, round_ = [], list[int](), 0, 0
    for place, record in enumerate(records):
        if record.epoch < fence:
            problems.append(f"log: record {place} of epoch {record.epoch} lies behind fence {fence}")
        if isinstance(record, FenceRecord):
            fence = record.epoch
            continue
        written += record.emitted
        if (record.round, record.committed) != (round_ + 1, len(written)):
            problems.append(f"log: record {place} is round {record.round} to {record.committed}, not {round_ + 1}")
        round_ = record.round
    if written != list(tokens):
        problems.append(f"log: it has {len(written)} tokens, and not those that were read")
    return problems


def compared(got: dict[int, list[int]], wanted: dict[int, list[int]]) -> list[str]:
    """Lost, duplicated or changed tokens, by choice."""
    problems = []
    for choice, expected in wanted.items():
        found = got[choice]
        same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        if same is not None:
            problems.append(f"changed: choice {choice} differs from token {same} on")
        elif len(found) < len(expected):
            problems.append(f"lost: choice {choice} has {len(found)} of {len(expected)} tokens")
        elif len(found) > len(expected):
            problems.append(f"duplicated: choice {choice} has {len(found)} of {len(expected)} tokens")
    return problems


def _state(pid: int) -> str:
    """Of a process, as in ``ps``; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
