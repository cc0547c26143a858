"""Acceptance rules 1 and 2, the random values of a round, and truncation (6.3 step 7, 6.4).

Everything works on scalars per position; the runner has reduced the distributions to them (``ports.Scored``).
Positions are 1-based in the draft: position i is ``tokens[i - 1]`` and ``scored[i - 1]``.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from msgspec import Struct

from sdcp_mono.core.messages import Rule, SessionId
from sdcp_mono.core.ports import Scored, Uniforms

_ACCEPTANCE_TEST: Final = 0
_ADDITIONAL_TOKEN: Final = 1


class Outcome(Struct, frozen=True):
    """What a rule yields: a accepted tokens, before truncation (AMB-105), and the additional token."""

    accepted: int
    extra: int


class AcceptanceRule(Struct, frozen=True):
    """What the registration of a rule must specify (10.2.2).

    ``accept`` yields a, given the M proposed tokens, the M+1 scored positions and the round's random values;
    ``extra`` the additional token, given scored position a+1. ``required_artifacts`` are the members that a proposal
    must carry. ``trust`` says in which drafters: ``any``, or ``verifier`` for those trusted as the verifier is (9).
    """

    accept: Callable[[Sequence[int], Sequence[Scored], Uniforms | None], int]
    extra: Callable[[Scored], int]
    required_artifacts: frozenset[str]
    preserves_target: bool
    trust: Literal["any", "verifier"]


def uniforms(seed: int, session: SessionId, round: int, m: int) -> Uniforms:
    """The random values of a seeded round of M tokens; M = 0 for a self-decoded one (6.4, AMB-122, AMB-127, AMB-129).

    ``seed`` fits 64 bits, ``round`` 32, else ``OverflowError``. Each value is exact: the first 53 bits over 2^53.
    """
    key = seed.to_bytes(8, "big")
    head = b"SDCP-VERIFY-1\0" + session + round.to_bytes(4, "big")

    def value(i: int, purpose: int) -> float:
        bits = hmac.digest(key, head + i.to_bytes(4, "big") + bytes((purpose,)), "sha256")
        return (int.from_bytes(bits[:8], "big") >> 11) / 2**53

    return Uniforms(
        accept=tuple(value(i, _ACCEPTANCE_TEST) for i in range(1, m + 1)),
        extra=tuple(value(i, _ADDITIONAL_TOKEN) for i in range(1, m + 2)),
    )


def accept(rule: Rule, tokens: Sequence[int], scored: Sequence[Scored], uniforms: Uniforms | None = None) -> Outcome:
    """Apply ``rule`` to M proposed tokens and M+1 scored positions; M may be 0.

    Rule 2 needs ``uniforms`` unless M is 0. Raises ``ValueError`` where the lengths do not fit.
    """
    if len(scored) != len(tokens) + 1:
        raise ValueError(f"scored: {len(scored)} positions for {len(tokens)} tokens, expected one more than tokens")
    registered = RULES[rule]
    accepted = registered.accept(tokens, scored, uniforms)
    return Outcome(accepted, registered.extra(scored[accepted]))


def truncate(emitted: Sequence[int], stop: frozenset[int], room: int) -> tuple[tuple[int, ...], bool]:
    """Keep what comes up to and with the first stop token, at most ``room`` tokens; whether generation has ended.

    6.3 step 7, AMB-106, AMB-108. ``room`` is max_new - n.
    """
    kept = tuple(emitted[:room])
    for index, token in enumerate(kept):
        if token in stop:
            return kept[: index + 1], True
    return kept, len(kept) == room


def _accept_greedy(tokens: Sequence[int], scored: Sequence[Scored], _: Uniforms | None) -> int:
    for index, token in enumerate(tokens):
        if token != scored[index].argmax:
            return index
    return len(tokens)


def _accept_sampled(tokens: Sequence[int], scored: Sequence[Scored], uniforms: Uniforms | None) -> int:
    if tokens and (uniforms is None or len(uniforms.accept) < len(tokens)):
        raise ValueError("uniforms: rule 2 needs one value for every proposed position")
    for index in range(len(tokens)):
        position = scored[index]
        assert uniforms is not None
        # r < min(1, p/q) in float64 (AMB-027, AMB-141); r < 1 always. 0/0 is a rejection, NaN compares false.
        if not (position.q > 0.0 and uniforms.accept[index] < position.p / position.q):
            return index
    return len(tokens)


RULES: Final[Mapping[Rule, AcceptanceRule]] = MappingProxyType(
    {
        Rule.GREEDY: AcceptanceRule(
            accept=_accept_greedy,
            extra=lambda position: position.argmax,
            required_artifacts=frozenset(),
            preserves_target=True,
            trust="any",
        ),
        Rule.SPECULATIVE_SAMPLING: AcceptanceRule(
            accept=_accept_sampled,
            extra=lambda position: position.extra,
            required_artifacts=frozenset({"q_rows"}),
            preserves_target=True,
            trust="verifier",
        ),
    }
)
