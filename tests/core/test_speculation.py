"""The M rule and the acceptance estimates (6.2)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from sdcp_mono.core.speculation import PLAIN_MARGIN, UNKNOWN_M, Acceptance, RoundCost, choose_m, pace

ALPHA = st.floats(0.0, 1.0)
SECONDS = st.floats(1e-6, 10.0)


@pytest.mark.vectors("m_rule")
def test_sdcp_092_m_rule(case: dict[str, Any]) -> None:
    chosen = choose_m(case["alpha"], case["t_d"], case["t_v"], case["limit"])
    assert chosen == case["M"]
    assert case["objective"][chosen - 1] == max(case["objective"])


@given(ALPHA, SECONDS, SECONDS, st.integers(1, 64))
def test_sdcp_092_m_is_the_first_maximum(alpha: float, t_d: float, t_v: float, limit: int) -> None:
    a, d, v = Fraction(alpha), Fraction(t_d), Fraction(t_v)

    def rate(m: int) -> Fraction:
        return (m + 1 if a == 1 else (1 - a ** (m + 1)) / (1 - a)) / (m * d + v)

    chosen = choose_m(alpha, t_d, t_v, limit)
    assert 1 <= chosen <= limit
    best = max(rate(m) for m in range(1, limit + 1))
    assert rate(chosen) >= best * (1 - Fraction(1, 10**9))


@given(ALPHA, SECONDS, SECONDS, SECONDS, st.integers(1, 64))
def test_sdcp_092_slower_drafting_never_gives_a_larger_m(
    alpha: float, t_d: float, slower: float, t_v: float, limit: int
) -> None:
    assert choose_m(alpha, t_d + slower, t_v, limit) <= choose_m(alpha, t_d, t_v, limit)


def test_sdcp_092_smaller_m_on_ties() -> None:
    assert choose_m(0.0, 0.0, 1.0, 8) == 1  # one token in one second, whatever M
    assert choose_m(0.5, 0.0, 1.0, 64) < 64  # further tokens vanish in the rounding


def test_sdcp_092_unknown_times_let_tokens_decide() -> None:
    assert choose_m(0.9, 0.0, 0.0, 8) == 8


@pytest.mark.parametrize(
    ("alpha", "t_d", "t_v", "limit", "field"),
    [(1.1, 1, 1, 1, "alpha"), (-0.1, 1, 1, 1, "alpha"), (float("nan"), 1, 1, 1, "alpha"), (0.5, -1, 1, 1, "seconds"),
     (0.5, 1, -1, 1, "seconds"), (0.5, float("nan"), 1, 1, "seconds"), (0.5, 1, 1, 0, "limit")],
)  # fmt: skip
def test_sdcp_092_bad_arguments_are_named(alpha: float, t_d: float, t_v: float, limit: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        choose_m(alpha, t_d, t_v, limit)


def test_sdcp_066_accept_milli_after_a_known_sequence() -> None:
    acceptance = Acceptance(forgetting=0.25)
    assert acceptance.accept_milli is UNSET
    acceptance = acceptance.after(2, 3)
    assert acceptance.accept_milli == 667  # the first round counts in full
    acceptance = acceptance.after(0, 4)
    assert acceptance.accept_milli == 500  # 0.75 * 2/3
    acceptance = acceptance.after(1, 1)
    assert acceptance.accept_milli == 625  # 0.75 * 0.5 + 0.25
    acceptance = acceptance.after(0, 1)
    assert acceptance.accept_milli == 469  # 468.75, rounded half up
    assert Acceptance(ratio=0.0625).accept_milli == 63  # 62.5


def test_sdcp_092_alpha_counts_judged_tokens() -> None:
    acceptance = Acceptance(accepted=0.0, judged=0.0, forgetting=0.5)
    acceptance = acceptance.after(3, 4)  # 3 accepted, the 4th rejected
    assert acceptance.alpha == 0.75
    acceptance = acceptance.after(2, 2)  # nothing rejected: (1.5 + 2) / (2 + 2)
    assert acceptance.alpha == 0.875
    acceptance = acceptance.after(0, 8)  # one judged, seven never looked at: 1.75 / (2 + 1)
    assert acceptance.alpha == pytest.approx(1.75 / 3)


def test_sdcp_092_alpha_starts_at_the_prior() -> None:
    assert Acceptance().alpha == pytest.approx(0.7)


def test_sdcp_092_alpha_finds_a_constant_acceptance() -> None:
    """Rounds with exactly the outcome frequencies of alpha 1/2, M = 3: a = 0 four times, 1 twice, 2 once, 3 once."""
    acceptance = Acceptance(forgetting=0.001)
    for _ in range(2000):
        for accepted in (0, 3, 0, 1, 0, 2, 0, 1):
            acceptance = acceptance.after(accepted, 3)
    assert acceptance.alpha == pytest.approx(0.5, abs=0.001)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 64)), max_size=50))
def test_sdcp_066_estimates_stay_in_range(rounds: list[tuple[int, int]]) -> None:
    acceptance = Acceptance()
    for accepted, m in rounds:
        acceptance = acceptance.after(min(accepted, m), m)
        assert 0.0 <= acceptance.alpha <= 1.0
        assert acceptance.accept_milli is not UNSET
        assert 0 <= acceptance.accept_milli <= 1000


@pytest.mark.vectors("m_rule")
def test_sdcp_092_pace_is_the_m_rule_or_not_drafting(case: dict[str, Any]) -> None:
    """With a verification time that does not depend on M; M = 0 is one token in t_v seconds."""
    chosen = pace(case["alpha"], case["t_d"], RoundCost(base=case["t_v"]), case["limit"]).m
    plain = 1 / case["t_v"] / PLAIN_MARGIN
    assert chosen == (case["M"] if max(case["objective"]) > plain else 0)


def test_pace_before_a_round_was_timed() -> None:
    assert pace(0.7, 0.0, RoundCost(), 8).m == UNKNOWN_M
    assert pace(0.7, 0.0, RoundCost(), 2).m == 2


def test_round_cost_finds_a_straight_line() -> None:
    cost = RoundCost()
    for m in (4, 1, 8, 2, 6, 3) * 5:
        cost = cost.after(m, 0.010 + 0.002 * m)
    assert cost.seconds(0) == pytest.approx(0.010)
    assert cost.seconds(5) == pytest.approx(0.020)


def test_round_cost_of_a_single_m_is_flat() -> None:
    cost = RoundCost().after(4, 0.02).after(4, 0.02)
    assert cost.seconds(1) == cost.seconds(8) == pytest.approx(0.02)
