"""The M rule and the acceptance estimates (6.2)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from sdcp_mono.core.speculation import PLAIN_MARGIN, Acceptance, CostTable, choose_m, pace

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
    """With a verification time that doesn't depend on M it is the recommended rule, unless plain decoding is faster."""
    alpha, t_d, t_v = case["alpha"], case["t_d"], case["t_v"]
    plan = pace(alpha, t_d, lambda m: t_v, case["limit"])
    drafted = max(case["objective"])
    assert plan.m == (case["M"] if drafted * PLAIN_MARGIN > 1 / t_v else 0)
    assert plan.rate == pytest.approx(drafted if plan.m else 1 / t_v / PLAIN_MARGIN)


def test_pace_stops_drafting_where_rows_are_dear() -> None:
    """Sixteen sessions on a saturated machine: each further row costs as much as the first."""
    assert pace(0.9, 0.2, lambda m: 1.0, 8).m > 0
    assert pace(0.9, 0.2, lambda m: 1.0 * (m + 1), 8).m == 0


def test_cost_table_follows_straight_lines_between_and_beyond() -> None:
    table = CostTable().after(1, 10.0).after(8, 17.0).after(16, 33.0)
    assert [table.seconds(rows) for rows in (1, 8, 16)] == [10.0, 17.0, 33.0]
    assert table.seconds(4) == pytest.approx(13.0)
    assert table.seconds(32) == pytest.approx(65.0)
    assert CostTable().seconds(5) == 0.0
    assert CostTable().after(4, 2.0).seconds(64) == 2.0  # one point says nothing about a slope


def test_cost_table_keeps_what_is_not_measured_any_more() -> None:
    table = CostTable().after(1, 10.0).after(64, 100.0)
    for _ in range(500):
        table = table.after(1, 12.0)
    assert table.seconds(1) == pytest.approx(12.0, rel=1e-3)
    assert table.seconds(64) == 100.0


def test_cost_table_hardly_believes_a_pass_that_also_fed_a_prompt() -> None:
    table = CostTable().after(1, 10.0)
    assert table.after(1, 1000.0).seconds(1) == pytest.approx(10.6)  # 3 % of at most three times what was expected
    assert table.after(1, 5.0).seconds(1) == pytest.approx(9.0)
