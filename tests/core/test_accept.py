"""Acceptance rules, random values and truncation (6.3 step 7, 6.4).

``draw`` and ``reduce`` below are a reference for what a runner computes: inverse CDF over ascending token ids, and the
scalars of ``ports.Scored``.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.core import digest
from sdcp_mono.core.accept import RULES, AcceptanceRule, Outcome, accept, truncate, uniforms
from sdcp_mono.core.messages import Rule
from sdcp_mono.core.ports import Scored, Uniforms

Row = Sequence[float]


def argmax(row: Row) -> int:
    return max(range(len(row)), key=lambda token: (row[token], -token))


def draw(weights: Row, u: float) -> int:
    """The smallest token with cumulative mass above u times the total (AMB-128)."""
    bound, mass = u * sum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > bound:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def reduce(p: Sequence[Row], q: Sequence[Row], tokens: Sequence[int], values: Uniforms) -> list[Scored]:
    scored = []
    for index, (row, u) in enumerate(zip(p, values.extra, strict=True)):
        if index == len(tokens):
            scored.append(Scored(argmax=argmax(row), extra=draw(row, u)))
            continue
        residual = [max(0.0, a - b) for a, b in zip(row, q[index], strict=True)]
        token = tokens[index]
        extra = draw(residual if sum(residual) else row, u)  # AMB-140
        scored.append(Scored(argmax=argmax(row), extra=extra, p=row[token], q=q[index][token]))
    return scored


def greedy(p: Sequence[Row]) -> list[Scored]:
    return [Scored(argmax=argmax(row), extra=argmax(row)) for row in p]


def at(p: float, q: float) -> list[Scored]:
    return [Scored(argmax=0, extra=1, p=p, q=q), Scored(argmax=0, extra=2)]


# ---- rule 1 ----------------------------------------------------------------------------------------


@pytest.mark.vectors("greedy")
def test_sdcp_123_124_greedy_accept(case: dict[str, Any]) -> None:
    outcome = accept(Rule.GREEDY, case["tokens"], greedy(case["p"][: len(case["tokens"]) + 1]))
    assert outcome == Outcome(case["accepted"], case["additional_before_truncation"])
    emitted = [*case["tokens"][: outcome.accepted], outcome.extra]
    kept, ended = truncate(emitted, frozenset(case["stop"]), case["max_new"] - case["n"])
    assert (list(kept), ended) == (case["emitted"], case["finish"])
    assert case["n"] + len(kept) == case["committed"]


def test_sdcp_211_example_round(vectors: dict[str, Any]) -> None:
    example = vectors["appendix_a"]["example_round"]
    scored = [Scored(argmax=token, extra=token) for token in example["target_argmax"]]
    outcome = accept(Rule.GREEDY, example["proposal_tokens"], scored)
    assert outcome == Outcome(accepted=example["accepted"], extra=example["additional"])
    kept, ended = truncate((*example["proposal_tokens"][: outcome.accepted], outcome.extra), frozenset({2}), 254)
    assert list(kept) == example["emitted"]
    assert not ended
    d2 = bytes.fromhex(vectors["appendix_a"]["published_digests_verified"]["d[2]"])
    assert digest.extend(d2, kept).hex() == example["digest"]


def test_sdcp_122_a_match_after_a_mismatch_is_not_accepted() -> None:
    scored = [Scored(argmax=token, extra=token) for token in (1, 2, 3, 4)]
    assert accept(Rule.GREEDY, [1, 9, 3], scored) == Outcome(1, 2)
    scored = [Scored(argmax=0, extra=index, p=p, q=0.5) for index, p in enumerate((1.0, 0.0, 1.0, 1.0))]
    assert accept(Rule.SPECULATIVE_SAMPLING, [1, 2, 3], scored, Uniforms((0.5,) * 3, (0.5,) * 4)) == Outcome(1, 1)


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=20),
)
def test_sdcp_125_greedy_identical_whatever_is_proposed(target: list[int], proposals: list[list[int]]) -> None:
    target = [*target, *([0] * 200)]
    output: list[int] = []
    for tokens in proposals:
        scored = [Scored(argmax=token, extra=token) for token in target[len(output) : len(output) + len(tokens) + 1]]
        outcome = accept(Rule.GREEDY, tokens, scored)
        output += [*tokens[: outcome.accepted], outcome.extra]
    assert output == target[: len(output)]


def test_sdcp_152_a_round_without_proposal() -> None:
    assert accept(Rule.GREEDY, (), [Scored(argmax=5, extra=5)]) == Outcome(0, 5)
    assert accept(Rule.SPECULATIVE_SAMPLING, (), [Scored(argmax=5, extra=3)]) == Outcome(0, 3)


# ---- rule 2 ----------------------------------------------------------------------------------------


@pytest.mark.vectors("speculative_sampling")
def test_sdcp_126_127_128_speculative_sampling(case: dict[str, Any]) -> None:
    tokens = case["tokens"]
    values = uniforms(case["seed"], bytes.fromhex(case["session_hex"]), case["round"], len(tokens))
    for step in case["steps"]:
        assert values.accept[step["i"] - 1] == step["r"]
        assert int(values.accept[step["i"] - 1] * 2**53) == step["value53"]
    additional = case["additional"]
    assert values.extra[additional["i"] - 1] == additional["u"]
    p = [[weight / 16 for weight in row] for row in case["p_sixteenths"][: len(tokens) + 1]]
    q = [[weight / 16 for weight in row] for row in case["q_sixteenths"]]
    outcome = accept(Rule.SPECULATIVE_SAMPLING, tokens, reduce(p, q, tokens, values), values)
    assert outcome == Outcome(case["accepted"], additional["token"])
    assert [*tokens[: outcome.accepted], outcome.extra] == case["emitted"]


def test_sdcp_129_distribution_is_the_targets(vectors: dict[str, Any]) -> None:
    """Exact: integrate over x ~ q and over both uniforms, which only matter as intervals of sixteenths."""
    analytic = vectors["speculative_sampling"]["analytic"]
    p = [float(Fraction(weight)) for weight in analytic["p"]]
    q = [float(Fraction(weight)) for weight in analytic["q"]]
    cells = [(index + 0.5) / 16 for index in range(16)]
    emitted = [Fraction(0)] * 4
    accepted = Fraction(0)
    for token, r, u in product(range(4), cells, cells):
        values = Uniforms((r,), (u, u))
        outcome = accept(Rule.SPECULATIVE_SAMPLING, [token], reduce([p, p], [q], [token], values), values)
        weight = Fraction(q[token]) / 256
        accepted += weight * outcome.accepted
        emitted[token if outcome.accepted else outcome.extra] += weight
    assert emitted == [Fraction(weight) for weight in analytic["distribution_of_first_emitted_token"]]
    assert accepted == Fraction(analytic["acceptance_probability"])


def test_sdcp_126_edges() -> None:
    def accepted(p: float, q: float, r: float) -> int:
        return accept(Rule.SPECULATIVE_SAMPLING, [7], at(p, q), Uniforms((r,), (0.0, 0.0))).accepted

    largest = 1 - 2**-53
    assert accepted(0.0, 0.5, 0.0) == 0  # p = 0 is never accepted, even with r = 0
    assert accepted(0.0, 0.0, 0.0) == 0  # 0/0
    assert accepted(0.5, 0.0, 0.0) == 0  # q = 0 is refused beforehand; here it is a rejection
    assert accepted(float("nan"), 0.5, 0.0) == 0
    assert accepted(0.5, 0.5, largest) == 1  # p >= q is always accepted
    assert accepted(1.0, 2**-149, largest) == 1
    assert accepted(0.25, 0.5, 0.5) == 0  # r < p/q is strict
    assert accepted(0.25, 0.5, 0.5 - 2**-53) == 1


@given(st.floats(2**-149, 1.0, width=32), st.floats(0.0, 1.0), st.integers(0, 2**53 - 1))
def test_sdcp_126_p_not_below_q_is_always_accepted(q: float, p: float, bits: int) -> None:
    outcome = accept(Rule.SPECULATIVE_SAMPLING, [7], at(max(p, q), q), Uniforms((bits / 2**53,), (0.0, 0.0)))
    assert outcome == Outcome(1, 2)


def test_sdcp_126_rule_2_needs_its_values() -> None:
    for values in (None, Uniforms((), (0.5,))):
        with pytest.raises(ValueError, match="uniforms"):
            accept(Rule.SPECULATIVE_SAMPLING, [7], at(0.5, 0.5), values)


@pytest.mark.parametrize("positions", [0, 1, 3])
@pytest.mark.parametrize("rule", Rule)
def test_sdcp_107_one_scored_position_more_than_tokens(rule: Rule, positions: int) -> None:
    scored = [Scored(argmax=1, extra=1)] * positions
    with pytest.raises(ValueError, match="scored"):
        accept(rule, [1], scored, Uniforms((0.5,), (0.5, 0.5)))


def test_c_25_greedy_target_with_a_deterministic_drafter() -> None:
    """Target a .3, b .5, c .2, drafter always a. Temperature 0 gives b under either rule; a ratio test with the
    unsharpened p (.3 against q .2) would accept a."""
    a, b = 0, 1
    p, one_hot_p, one_hot_q = [0.3, 0.5, 0.2], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]
    assert accept(Rule.GREEDY, [a], greedy([p, p])) == Outcome(0, b)
    for seed in range(100):
        values = uniforms(seed, bytes(16), 1, 1)
        scored = reduce([one_hot_p, one_hot_p], [one_hot_q], [a], values)
        assert accept(Rule.SPECULATIVE_SAMPLING, [a], scored, values) == Outcome(0, b)


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        ([1.0, 0.0, 0.0], (0.30, 0.50, 0.20)),  # the point mass that was really drawn from
        ([0.2, 0.2, 0.6], (1.00, 0.00, 0.00)),  # p/q > 1: always accepted
        ([0.6, 0.3, 0.1], (0.50, 0.33, 0.17)),  # accepted with 1/2, residual (0, .2, .1)
    ],
)
def test_c_25_point_mass_is_the_right_q(q: list[float], expected: tuple[float, ...]) -> None:
    """20,000 seeds of an n-gram drafter that proposes a; only q as drawn keeps the target's distribution."""
    counts = [0, 0, 0]
    p = [0.3, 0.5, 0.2]
    for seed in range(20_000):
        values = uniforms(seed, bytes(16), 1, 1)
        outcome = accept(Rule.SPECULATIVE_SAMPLING, [0], reduce([p, p], [q], [0], values), values)
        counts[0 if outcome.accepted else outcome.extra] += 1
    for count, share in zip(counts, expected, strict=True):
        assert abs(count / 20_000 - share) <= 0.014


# ---- random values ------------------------------------------------------------------------------------


@pytest.mark.vectors("hmac_random")
def test_sdcp_132_seeded_values(case: dict[str, Any]) -> None:
    i, session = case["i"], bytes.fromhex(case["session_hex"])
    if case["purpose"] == 0:
        value = uniforms(case["seed"], session, case["round"], i).accept[i - 1]
    else:
        value = uniforms(case["seed"], session, case["round"], i - 1).extra[i - 1]
    assert value == case["value_float64"]
    assert int(value * 2**53) == case["value53"]
    message = bytes.fromhex(case["message_hex"])
    assert len(message) == 39
    assert hmac.digest(case["seed"].to_bytes(8, "big"), message, "sha256").hex() == case["hmac_hex"]


@given(st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), st.integers(0, 64))
def test_sdcp_132_133_lengths_range_and_reproduction(seed: int, session: bytes, round_: int, m: int) -> None:
    values = uniforms(seed, session, round_, m)
    assert (len(values.accept), len(values.extra)) == (m, m + 1)
    assert all(0.0 <= value < 1.0 for value in (*values.accept, *values.extra))
    longer = uniforms(seed, session, round_, m + 1)
    assert (longer.accept[:m], longer.extra[: m + 1]) == (values.accept, values.extra)
    assert len({*values.accept, *values.extra}) == 2 * m + 1


def test_sdcp_132_numbers_that_do_not_fit() -> None:
    for seed, round_ in ((2**64, 1), (-1, 1), (0, 2**32)):
        with pytest.raises(OverflowError):
            uniforms(seed, bytes(16), round_, 1)


# ---- truncation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("emitted", "stop", "room", "kept", "ended"),
    [
        ([7, 9, 11], {9}, 99, (7, 9), True),  # the stop token is kept
        ([7, 9], {9}, 99, (7, 9), True),  # as the additional token
        ([7, 9, 11], set(), 2, (7, 9), True),
        ([7, 9, 11], set(), 3, (7, 9, 11), True),  # exactly full
        ([7, 9, 11], set(), 4, (7, 9, 11), False),
        ([7, 8, 9, 11], {9}, 2, (7, 8), True),  # both limits: the earlier one (AMB-108)
        ([7, 9, 9], {9}, 99, (7, 9), True),
        ([9], {9}, 1, (9,), True),
    ],
)
def test_sdcp_108_109_truncation(
    emitted: list[int], stop: set[int], room: int, kept: tuple[int, ...], ended: bool
) -> None:
    assert truncate(emitted, frozenset(stop), room) == (kept, ended)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.frozensets(st.integers(0, 9)), st.integers(1, 9))
def test_sdcp_003_at_least_one_token_and_fewer_only_at_the_end(
    emitted: list[int], stop: frozenset[int], room: int
) -> None:
    kept, ended = truncate(emitted, stop, room)
    assert kept == tuple(emitted[: len(kept)])
    assert 1 <= len(kept) <= room
    assert ended or len(kept) == len(emitted)
    assert stop.isdisjoint(kept[:-1])
    assert ended == (kept[-1] in stop or len(kept) == room)


# ---- the registry --------------------------------------------------------------------------------------


def test_sdcp_208_rule_registry() -> None:
    assert AcceptanceRule.__struct_fields__ == ("accept", "extra", "required_artifacts", "preserves_target", "trust")
    assert set(RULES) == {Rule.GREEDY, Rule.SPECULATIVE_SAMPLING}
    assert RULES[Rule.GREEDY].required_artifacts == frozenset()
    assert RULES[Rule.SPECULATIVE_SAMPLING].required_artifacts == {"q_rows"}
    assert (RULES[Rule.GREEDY].trust, RULES[Rule.SPECULATIVE_SAMPLING].trust) == ("any", "verifier")
    assert all(rule.preserves_target for rule in RULES.values())
    with pytest.raises(TypeError):
        RULES[Rule.GREEDY] = RULES[Rule.SPECULATIVE_SAMPLING]  # type: ignore[index]
    with pytest.raises(AttributeError):
        RULES[Rule.GREEDY].trust = "verifier"  # type: ignore[misc]
