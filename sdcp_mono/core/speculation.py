"""How many tokens to propose (6.2): the M rule, and the acceptance estimates that feed it."""

from __future__ import annotations

import math
from typing import Final

from msgspec import UNSET, Struct, UnsetType

INITIAL_ALPHA: Final = 0.7  # before anything was observed (AMB-188)
INITIAL_WEIGHT: Final = 4.0  # judged tokens that the initial alpha counts for: a round or two outweigh it
FORGETTING: Final = 0.15  # per round, within the 0.1..0.2 of AMB-187

_TIE: Final = 1e-12  # relative; closer values of the objective are equal


def choose_m(alpha: float, draft_seconds_per_token: float, verify_seconds: float, limit: int) -> int:
    """The M in 1..limit with the most committed tokens per second; the smaller M on ties (AMB-188).

    A round of M commits 1 + alpha + ... + alpha^M tokens in M * t_d + t_v seconds; where both times are 0, nothing is
    known of them and tokens decide. ``alpha`` in [0, 1], times not negative, ``limit`` >= 1, else ``ValueError``.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha: {alpha} is not in [0, 1]")
    if not (draft_seconds_per_token >= 0.0 and verify_seconds >= 0.0):
        raise ValueError("draft_seconds_per_token, verify_seconds: must not be negative")
    if limit < 1:
        raise ValueError(f"limit: {limit} is below 1")
    if draft_seconds_per_token == verify_seconds == 0.0:
        verify_seconds = 1.0
    best, best_rate = 1, 0.0
    tokens, power = 1.0, 1.0
    for m in range(1, limit + 1):
        power *= alpha
        tokens += power
        rate = tokens / (m * draft_seconds_per_token + verify_seconds)
        if rate > best_rate * (1 + _TIE):
            best, best_rate = m, rate
    return best


class Acceptance(Struct, frozen=True):
    """A drafter's estimates for one session, both forgetting exponentially by the round.

    ``alpha`` is accepted tokens over judged tokens (accepted, and the first rejected one of a round), each sum
    discounted. Averaging a/(a+1) by the round instead would be biased: with alpha 0.5 it tends to 0.31.
    """

    accepted: float = INITIAL_ALPHA * INITIAL_WEIGHT
    judged: float = INITIAL_WEIGHT
    ratio: float | None = None  # of a/M; None before the first round
    forgetting: float = FORGETTING

    @property
    def alpha(self) -> float:
        """Per-token acceptance probability, 0..1."""
        return self.accepted / self.judged

    @property
    def accept_milli(self) -> int | UnsetType:
        """The ``accept_milli`` of a status message: a/M x 1000, rounded half up; absent before the first round."""
        return UNSET if self.ratio is None else math.floor(self.ratio * 1000 + 0.5)

    def after(self, accepted: int, m: int) -> Acceptance:
        """The estimates after a round with ``accepted`` of ``m`` >= 1 tokens."""
        keep = 1.0 - self.forgetting
        now = accepted / m
        return Acceptance(
            accepted=keep * self.accepted + accepted,
            judged=keep * self.judged + accepted + (accepted < m),
            ratio=now if self.ratio is None else keep * self.ratio + self.forgetting * now,
            forgetting=self.forgetting,
        )


COST_FORGETTING: Final = 0.05  # per round: a round's cost follows load within a few dozen rounds
PLAIN_MARGIN: Final = 1.02  # drafting is given up only where plain decoding is clearly faster: estimates are noisy
UNKNOWN_M: Final = 4  # until a round was timed


class RoundCost(Struct, frozen=True):
    """Seconds from proposal to verdict as a straight line in M, fitted to rounds with exponential forgetting.

    M = 0 is a round that the verifier decodes by itself, so the line also tells what not drafting would cost.
    """

    base: float = 0.0
    per_token: float = 0.0
    weight: float = 0.0
    mean_m: float = 0.0
    mean_s: float = 0.0
    var_m: float = 0.0
    cov: float = 0.0

    def seconds(self, m: int) -> float:
        return self.base + m * self.per_token

    def after(self, m: int, seconds: float) -> RoundCost:
        """The line after a round of ``m`` tokens that took ``seconds``."""
        weight = self.weight * (1.0 - COST_FORGETTING) + 1.0
        rate = 1.0 / weight
        dm, ds = m - self.mean_m, seconds - self.mean_s
        mean_m, mean_s = self.mean_m + rate * dm, self.mean_s + rate * ds
        var_m = (1.0 - rate) * (self.var_m + rate * dm * dm)
        cov = (1.0 - rate) * (self.cov + rate * dm * ds)
        slope = max(0.0, cov / var_m) if var_m > _TIE else 0.0
        slope = min(slope, mean_s / mean_m) if mean_m > 0.0 else slope  # a line below zero at M = 0 is noise
        return RoundCost(mean_s - slope * mean_m, slope, weight, mean_m, mean_s, var_m, cov)


class Pace(Struct, frozen=True):
    """What a drafter would do next round: propose ``m`` tokens, committing ``rate`` tokens per second."""

    m: int
    rate: float


def pace(alpha: float, draft_seconds_per_token: float, cost: RoundCost, limit: int) -> Pace:
    """The M in 0..limit with the most committed tokens per second; 0 where not drafting is clearly faster.

    The rule of 6.2 with a verification time that grows with M, and with the choice not to draft at all. While no round
    was timed, M is small and the rate counts a pass as one second.
    """
    if cost.seconds(limit) <= 0.0:
        m = min(limit, UNKNOWN_M)
        return Pace(m, sum(alpha**i for i in range(m + 1)))
    best = Pace(0, 0.0)
    tokens, power = 0.0, 1.0
    for m in range(limit + 1):
        tokens += power
        power *= alpha
        seconds = m * draft_seconds_per_token + cost.seconds(m)
        rate = tokens / max(seconds, _TIE) * (1.0 if m else 1.0 / PLAIN_MARGIN)
        if rate > best.rate * (1 + _TIE):
            best = Pace(m, rate)
    return best
