"""Speculation control: m_cap, the counters c, g, j and the escalation ladder (6.5).

Two limits make m_cap (AMB-111): the ladder cap, halved by reduce and restored by one per good round, and the load cap,
computed afresh for each verdict. Self-decoded rounds have no proposal and never come here (AMB-114).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, structs

from sdcp_mono.core.contract import low_ratio, self_decode_permitted
from sdcp_mono.core.messages import Action, Contract

HIGH_LOAD: Final = 80  # percent; above it m_cap is cut and never restored (AMB-112)


class Control(Struct, frozen=True):
    """``c`` consecutive low rounds, ``g`` consecutive rounds that are not, ``j`` position in the fallback list."""

    c: int
    g: int
    j: int
    cap: int  # the ladder cap, 1..m_max


class Steering(Struct, frozen=True):
    """What a verdict says about the next round; ``low`` counts this round, before any reset (AMB-110)."""

    control: Control
    action: Action
    low: int
    m_cap: int


def start(contract: Contract, m_init: int) -> Control:
    """A new session, or one resumed by another verifier (AMB-066)."""
    return Control(c=0, g=0, j=0, cap=_clamp(m_init, contract))


def assigned(control: Control, contract: Contract, m_init: int) -> Control:
    """A new drafter starts from its m_init; c, g and j stay (AMB-079, AMB-116)."""
    return structs.replace(control, cap=_clamp(m_init, contract))


def after_round(
    control: Control, contract: Contract, accepted: int, m: int, load: int, *, finished: bool = False
) -> Steering:
    """Steer after a round that accepted ``accepted`` of ``m`` >= 1 tokens at verifier load ``load`` percent.

    ``finished``: the round ended generation, which beats any escalation (AMB-109).
    """
    action, cap, j = Action.CONTINUE, control.cap, control.j
    if is_low(contract, accepted, m):
        c, g = control.c + 1, 0
    else:
        c, g = 0, control.g + 1
        if g >= contract.low_rounds:
            j = 0
        if load <= HIGH_LOAD:
            cap = min(cap + 1, contract.m_max)
    low = c
    if finished:
        action = Action.FINISH
    elif c >= contract.low_rounds:
        action, j = _escalate(contract, j, load)
        c = 0
        if action is Action.REDUCE:
            cap = max(1, cap // 2)
    m_cap = max(1, min(cap, load_cap(contract.m_max, load), contract.m_max))
    return Steering(Control(c=c, g=g, j=j, cap=cap), action, low, m_cap)


def is_low(contract: Contract, accepted: int, m: int) -> bool:
    """Whether a drafted round is low (6.5.2); ``accepted`` is a before truncation (AMB-105)."""
    ratio = low_ratio(contract)
    return 100 * accepted < ratio * m if ratio else accepted == 0


def load_cap(m_max: int, load: int) -> int:
    """The limit that the verifier's own load sets: m_max up to 80 percent, then linearly down to 1 at 100.

    Rounded down, so that any load above 80 percent cuts it (if m_max > 1).
    """
    cut = max(0, min(load, 100) - HIGH_LOAD)
    return m_max - -(-(m_max - 1) * cut // (100 - HIGH_LOAD))


def _escalate(contract: Contract, j: int, load: int) -> tuple[Action, int]:
    """The first permitted entry from ``j`` on, and the position after it; fail if there is none."""
    for index in range(j, len(contract.fallback)):
        entry = Action(contract.fallback[index])
        if entry is not Action.SELF_DECODE or self_decode_permitted(contract, load):
            return entry, index + 1
    return Action.FAIL, len(contract.fallback)


def _clamp(m_init: int, contract: Contract) -> int:
    return max(1, min(m_init, contract.m_max))  # AMB-078
