"""The front end of ``sdcp-mono generate``: one request, shown in a terminal as it is committed.

A prompt goes through the same checks, template and sampling rules as an HTTP request (``plan.py``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdcp_mono.core.ports import RoundInfo, Serving
from sdcp_mono.frontend.choices import Choice, OutToken
from sdcp_mono.frontend.plan import Planner
from sdcp_mono.frontend.requests import parse_chat, parse_completion
from sdcp_mono.frontend.settings import FrontendSettings
from sdcp_mono.frontend.tokenizer import Tokenizer, TokenizerThreads

STYLES = {"accepted": "green", "correction": "red", "bonus": "cyan", "self": "default"}
LEGEND = {
    "accepted": "proposed and accepted",
    "correction": "the target's own, after a rejection",
    "bonus": "the target's own, after full acceptance",
    "self": "decoded without a proposal",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What ``sdcp-mono generate`` was asked for."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None
    chat: bool

    def body(self) -> bytes:
        """The same as an API request."""
        text = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        limits = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        seed = {} if self.seed is None else {"seed": self.seed}
        return msgspec.json.encode({"model": "default", **text, **limits, **seed})


@dataclass(slots=True)
class Result:
    """What came of it. ``seconds`` has ``load``, ``prefill`` (to the first token) and ``decode`` (the rest)."""

    prompt_tokens: int
    seconds: dict[str, float]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    speculation: dict[str, Any] = field(default_factory=dict)
    rounds: list[RoundInfo] = field(default_factory=list)

    def as_json(self, *, rounds: bool) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
                "total_tokens": self.prompt_tokens + len(self.token_ids),
            },
            "seconds": self.seconds,
            "metrics": {"speculative_decoding": self.speculation},
        }
        if self.error:
            answer["error"] = self.error
        if rounds:
            answer["rounds"] = [msgspec.to_builtins(info) for info in self.rounds]
        return answer


class View(Protocol):
    """Where the text goes while it is committed."""

    def tokens(self, text: str, tokens: tuple[OutToken, ...], text_start: int) -> None: ...
    def summary(self, result: Result) -> None: ...


class Quiet:
    """Shows nothing: the caller prints the result."""

    def tokens(self, text: str, tokens: tuple[OutToken, ...], text_start: int) -> None: ...
    def summary(self, result: Result) -> None: ...


class Terminal:
    """Text on stdout; with ``rounds`` coloured by origin and followed by a summary."""

    def __init__(self, out: Console, err: Console, rounds: bool) -> None:
        self._out = out
        self._err = err
        self._rounds = rounds

    def tokens(self, text: str, tokens: tuple[OutToken, ...], text_start: int) -> None:
        if not self._rounds:
            self._out.out(text, end="", highlight=False)
            return
        line = Text()
        for token in tokens:
            origin = token.info.origin if token.info is not None else "self"
            line.append(text[token.start - text_start : token.end - text_start], style=STYLES[origin])
        self._out.print(line, end="", soft_wrap=True, highlight=False)

    def summary(self, result: Result) -> None:
        self._out.print()
        if result.error:
            self._err.print(f"[red]error[/] {result.error}")
        if self._rounds:
            self._out.print()
            self._out.print(Text("  ").join(Text(f"■ {LEGEND[name]}", style=STYLES[name]) for name in STYLES))
            self._out.print(_round_table(result.rounds))
        if self._rounds or self._err.is_terminal:
            self._err.print(_line(result), style="dim", highlight=False)


def _round_table(rounds: list[RoundInfo]) -> Table:
    table = Table(box=None, header_style="dim")
    for name in ("round", "M", "accepted", "emitted", "m_cap", "drafter", "wait ms", "verify ms", "commit ms"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for info in rounds:
        times = (info.wait_seconds, info.verify_seconds, info.commit_seconds)
        table.add_row(
            str(info.round), str(len(info.proposed)), str(info.accepted), str(len(info.emitted)), str(info.m_cap),
            info.drafter or "(none)", *(f"{1000 * seconds:.1f}" for seconds in times),
        )  # fmt: skip
    return table


def _line(result: Result) -> str:
    tokens, decode = len(result.token_ids), result.seconds["decode"]
    rounds = len(result.rounds)
    parts = [f"{tokens} tokens in {rounds} rounds ({tokens / max(rounds, 1):.2f} a round)"]
    if decode > 0 and tokens > 1:
        parts.append(f"{(tokens - 1) / decode:.1f} tokens/s")
    rate = result.speculation.get("draft_acceptance_rate")
    if rate:
        parts.append(f"{100 * rate:.0f} % of proposed tokens accepted")
    parts.append(f"prefill {result.seconds['prefill']:.2f} s, load {result.seconds['load']:.1f} s")
    return " · ".join(parts)


async def generate(serving: Serving, tokenizer: Tokenizer, wish: Wish, view: View, load_seconds: float) -> Result:
    """Run one request and show it; raises ``ApiError`` for one that is refused."""
    started = time.perf_counter()
    threads = TokenizerThreads(1, 1)
    try:
        planner = Planner(serving.card, tokenizer, threads, FrontendSettings())
        if wish.chat:
            plan = await planner.chat(parse_chat(wish.body()))
        else:
            plan = await planner.completion(parse_completion(wish.body()))
    finally:
        threads.close()
    (request,) = plan.requests
    choice = Choice(tokenizer.incremental(), request.stop, plan.stops)
    result = Result(plan.prompt_tokens, {"load": load_seconds, "prefill": 0.0, "decode": 0.0})
    first = 0.0
    generation = await serving.generate(request)
    try:
        async for chunk in generation.chunks():
            first = first or time.perf_counter()
            result.rounds += chunk.rounds
            delta = choice.feed(chunk)
            if delta is None:
                continue
            view.tokens(delta.text, delta.tokens, len(result.text))
            result.text += delta.text
            result.token_ids += [token.id for token in delta.tokens]
            result.finish_reason, result.error = delta.finish or "", delta.error
            if choice.finished:
                break
    finally:
        await generation.close()
    result.seconds |= {"prefill": first - started, "decode": time.perf_counter() - first}
    result.speculation = choice.speculation.summary()
    return result
