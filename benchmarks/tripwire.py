"""A role process that stops itself at a chosen moment of a round; otherwise it is ``python -m sdcp_mono``.

    TRIPWIRE=DIR python -m benchmarks.tripwire ROLE …

``DIR/order.json`` says at which call of which phase. The first process to get there takes the order away, writes
``DIR/tripped.json`` (who serves the session) and sends itself SIGSTOP; the harness then does what it wants to whom it
wants and lets this process go on. Each append that a verifier was refused is a line of ``DIR/fenced``. The product
knows nothing of it: methods are wrapped from outside.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from sdcp_mono.cli import main
from sdcp_mono.compose import roles
from sdcp_mono.core.engine import Engine
from sdcp_mono.roles.drafter import Drafter
from sdcp_mono.roles.verifier import Verifier

DIRECTORY = Path(os.environ["TRIPWIRE"])
ORDER, TRIPPED, FENCED = DIRECTORY / "order.json", DIRECTORY / "tripped.json", DIRECTORY / "fenced"
BASE = os.environ.get("SDCP_BASE", "")

_calls: Counter[tuple[int, str]] = Counter()


def passed(phase: str, *, verifier: str = BASE, drafter: str = BASE) -> None:
    """A call has reached ``phase``; stop here if that is what was ordered."""
    try:
        order = json.loads(ORDER.read_text())
    except (OSError, ValueError):
        return
    if order["phase"] != phase:
        return
    key = (order["run"], phase)
    _calls[key] += 1
    if _calls[key] < order["call"]:
        return
    try:
        os.rename(ORDER, DIRECTORY / "order.taken")
    except OSError:
        return  # another process was first
    found = {"run": order["run"], "pid": os.getpid(), "verifier": verifier, "drafter": drafter}
    partial = TRIPPED.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(TRIPPED)
    os.kill(os.getpid(), signal.SIGSTOP)


def refused(append: Any) -> None:
    with FENCED.open("a") as file:
        file.write(f"{BASE} {append.append.record.epoch}\n")


def watch_drafter() -> None:
    draft, learn = Drafter._draft, Drafter._learn

    @functools.wraps(draft)
    async def drafting(self: Drafter, work: Any) -> Any:
        passed("drafting", verifier=work.rules.assignment.verifier)
        return await draft(self, work)

    @functools.wraps(learn)
    def learning(self: Drafter, work: Any, m: int, verdict: Any) -> None:
        learn(self, work, m, verdict)
        passed("idle", verifier=work.rules.assignment.verifier)  # the verdict is here, nothing is in flight

    Drafter._draft, Drafter._learn = drafting, learning  # type: ignore[method-assign]


def watch_verifier() -> None:
    score, appended, reread, load = Verifier._score, Engine.appended, Engine.log_read, roles.load_target

    @functools.wraps(score)
    async def scoring(self: Verifier, effect: Any) -> None:
        if effect.request.tokens:
            passed("proposed", drafter=self.engine.drafter_of(effect.request.session) or "")
        await score(self, effect)

    @functools.wraps(appended)
    def appending(self: Engine, done: Any, outcome: str, *rest: Any) -> Any:
        """Durable, and nobody has been told yet."""
        if outcome == "fenced":
            refused(done)
        elif outcome == "ok":
            passed("appended", drafter=self.drafter_of(done.session) or "")
        return appended(self, done, outcome, *rest)

    @functools.wraps(reread)
    def rereading(self: Engine, pending: Any, records: Any, *rest: Any) -> Any:
        """An append whose answer was lost: the log tells."""
        effects = reread(self, pending, records, *rest)
        known = self.sessions.get(pending.session)
        if records is not None and known is not None and known.fenced:
            refused(pending)
        return effects

    @functools.wraps(load)
    def loading(*args: Any) -> Any:
        loaded = load(*args)
        step = loaded.target.step

        def stepping(requests: Any) -> Any:
            answers = step(requests)
            if any(answer is None for answer in answers):  # more of its prompt is to come
                passed("prefill", drafter="")
            return answers

        loaded.target.step = stepping  # type: ignore[method-assign]
        return loaded

    Verifier._score, Engine.appended, Engine.log_read = scoring, appending, rereading  # type: ignore[method-assign]
    roles.load_target = loading


if __name__ == "__main__":
    watch_drafter()
    watch_verifier()
    main()
