"""How many tokens to propose (6.2): the M rule, and the acceptance estimates that feed it."""

from __future__ import annotations

import math
from collections.abc import Callable
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


COST_DOWN: Final = 0.2  # weight of a pass that was faster than expected
COST_UP: Final = 0.03  # and of one that was slower: passes that also fed a prompt, or met a neighbour, say little
COST_SURPRISE: Final = 3.0  # a pass that took longer than this many times what was expected counts as this many
PLAIN_MARGIN: Final = 1.02  # drafting is given up only where plain decoding is clearly faster: estimates are noisy


class CostTable(Struct, frozen=True):
    """Seconds of a model pass by its rows, at powers of two; in between and beyond, straight lines.

    What isn't measured any more is not forgotten: a verifier that has stopped verifying long proposals still knows what
    they would cost, so the choice of M doesn't swing.
    """

    seconds_at: tuple[float, ...] = ()  # at 1, 2, 4, ... rows; 0.0 where nothing is known

    def seconds(self, rows: float) -> float:
        """Expected seconds of a pass of ``rows`` >= 1 rows; 0.0 while nothing is known."""
        known = [(1 << i, seconds) for i, seconds in enumerate(self.seconds_at) if seconds > 0.0]
        if not known:
            return 0.0
        if len(known) == 1 or rows <= known[0][0]:
            return known[0][1]
        upper = next((i for i, (at, _) in enumerate(known) if at >= rows), len(known) - 1)
        (x0, y0), (x1, y1) = known[upper - 1], known[upper]
        return y0 + max(y1 - y0, 0.0) * (rows - x0) / (x1 - x0)  # more rows never cost less

    def after(self, rows: int, seconds: float) -> CostTable:
        """The table after a pass of ``rows`` rows took ``seconds``."""
        place = max(rows, 1).bit_length() - 1
        table = list(self.seconds_at) + [0.0] * (place + 1 - len(self.seconds_at))
        expected = self.seconds(rows)
        if not expected or not table[place]:
            table[place] = seconds
        else:  # shift the place by as much as this pass was off
            off = min(seconds, COST_SURPRISE * expected) - expected
            table[place] = max(table[place] + (COST_UP if off > 0.0 else COST_DOWN) * off, _TIE)
        return CostTable(tuple(table))


class Pace(Struct, frozen=True):
    """What a drafter would do next round: propose ``m`` tokens, committing ``rate`` tokens per second."""

    m: int
    rate: float


def pace(alpha: float, draft_seconds: float, verify_seconds: Callable[[int], float], limit: int) -> Pace:
    """The M in 0..limit with the most committed tokens per second; 0 where not drafting is clearly faster.

    The rule of 6.2 with a verification time that depends on M, and with the choice not to draft at all.
    ``draft_seconds`` is one drafted token's, ``verify_seconds(m)`` a round's from proposal to verdict.
    """
    best = Pace(0, 0.0)
    tokens, power = 0.0, 1.0
    for m in range(limit + 1):
        tokens += power
        power *= alpha
        rate = tokens / max(m * draft_seconds + verify_seconds(m), _TIE) * (1.0 if m else 1.0 / PLAIN_MARGIN)
        if rate > best.rate * (1 + _TIE):
            best = Pace(m, rate)
    return best
