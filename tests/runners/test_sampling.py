"""The sampling profile and draws, against hand-made distributions and exact fractions."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sdcp_mono.core.accept import accept
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import Scored, Uniforms
from sdcp_mono.runners.rows import QRows
from sdcp_mono.runners.sampling import Weights, best, best_ids, distribution, distributions, draw, log_probabilities

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "sampling.json").read_text())
DRAWS = 20_000
P = {50: 0.2, 51: 0.4, 52: 0.3, 53: 0.1}


def logits_of(distribution: dict[int, float], size: int = 64) -> torch.Tensor:
    row = torch.full((size,), -40.0, dtype=torch.float32)
    for token, p in distribution.items():
        row[token] = math.log(p)
    return row


def p_of(logits: torch.Tensor, **profile: int) -> torch.Tensor:
    return distributions(logits[None], [Sampling(**profile)])[0]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_vectors_sampling_profile(case: dict) -> None:
    p = p_of(torch.tensor(case["logits"], dtype=torch.float64), **case["sampling"])
    want = [float(Fraction(text)) for text in case["p"]]
    assert p.tolist() == pytest.approx(want, abs=1e-9)
    assert [x == 0 for x in p.tolist()] == [x == 0 for x in want]


def test_vectors_in_one_batch_of_mixed_profiles() -> None:
    cases = VECTORS["cases"]
    logits = torch.tensor([case["logits"] for case in cases], dtype=torch.float64)
    got = distributions(logits, [Sampling(**case["sampling"]) for case in cases])
    np.testing.assert_allclose(got.numpy(), [case["p_float"] for case in cases], atol=1e-9)


@pytest.mark.parametrize("top_k", [0, 64, 65, 10**9, 2**64 - 1])
def test_c29_top_k_off(top_k: int) -> None:
    assert torch.equal(p_of(logits_of(P), top_k=top_k), p_of(logits_of(P)))


@pytest.mark.parametrize(
    "profile", [{"top_p_milli": 0}, {"top_k": 1}, {"top_k": 1, "top_p_milli": 800}, {"temperature_milli": 0}]
)
def test_c29_single_best_token(profile: dict[str, int]) -> None:
    """Never an empty set, and not 0/0."""
    assert p_of(logits_of(P), **profile).tolist() == [float(i == 51) for i in range(64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c30_extreme_temperatures(dtype: torch.dtype) -> None:
    logits = logits_of(P).to(dtype).float()
    cold = p_of(logits, temperature_milli=1)
    assert cold[51] == pytest.approx(1.0, abs=1e-12)
    hot = p_of(logits, temperature_milli=2**64 - 1)
    assert hot.tolist() == pytest.approx([1 / 64] * 64, rel=1e-6)
    for milli in (0, 1, 10, 2**63, 2**64 - 1):
        assert torch.isfinite(p_of(logits, temperature_milli=milli)).all()


def test_profile_equals_transformers_for_random_rows() -> None:
    """C-29: temperature, then top-k, then top-p, as Hugging Face's warpers do it. Total variation < 1e-6."""
    torch.manual_seed(0)
    logits = torch.randn(10, 1000) * 3
    for milli, k, top_p in ((700, 50, 900), (1000, 0, 950), (1300, 20, 0.0), (500, 0, 100), (2000, 700, 990)):
        warped = TemperatureLogitsWarper(milli / 1000)(None, logits.double())
        if k:
            warped = TopKLogitsWarper(k)(None, warped)
        profile = {"temperature_milli": milli, "top_k": k}
        if top_p:
            warped = TopPLogitsWarper(top_p / 1000)(None, warped)
            profile["top_p_milli"] = int(top_p)
        want = torch.softmax(warped, -1)
        got = distributions(logits, [Sampling(**profile)] * 10)
        assert ((got - want).abs().sum(-1) / 2).max() < 1e-6


def exact_kept(row: np.ndarray, sampling: dict[str, int]) -> list[int]:
    """The definition, sorted in plain Python."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if 0 < sampling.get("top_k", 0) < len(row):
        order = order[: sampling["top_k"]]
    t = sampling.get("temperature_milli", 1000) / 1000
    weights = [math.exp((float(row[i]) - float(row[order[0]])) / t) for i in order]
    total, mass = math.fsum(weights), 0.0
    for n, weight in enumerate(weights, 1):
        mass += weight
        if mass >= sampling.get("top_p_milli", 1000) / 1000 * total - 1e-9:
            return sorted(order[:n])
    return sorted(order)


@pytest.mark.parametrize("size", [7, 3000])
def test_kept_tokens_equal_the_definition_with_many_ties(size: int) -> None:
    """More tokens than the first partial sort looks at, logits from a small set, so that every boundary is a tie."""
    rng = np.random.default_rng(size)
    for _ in range(40):
        row = rng.integers(0, 5, size).astype(np.float32) / 7
        profile = {
            "temperature_milli": int(rng.integers(1, 3000)),
            "top_k": int(rng.integers(0, size + 2)),
            "top_p_milli": int(rng.integers(0, 1000)),
        }
        p = p_of(torch.from_numpy(row), **profile)
        assert torch.nonzero(p)[:, 0].tolist() == exact_kept(row, profile)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_argmax_takes_the_smallest_id_on_ties(threads: int) -> None:
    """Also where torch splits the row among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = torch.zeros(3, 200_000)
        rows[0, [7, 150_000, 199_999]] = 1.0
        rows[1, 199_999] = 1.0
        assert best(rows).tolist() == [7, 199_999, 0]
        assert rows.argmax(-1).tolist() == [7, 199_999, 0]  # what best() uses on a GPU
    finally:
        torch.set_num_threads(before)


def test_best_ids_prefers_small_ids() -> None:
    assert best_ids(np.asarray([1.0, 3.0, 2.0, 2.0, 2.0]), 3).tolist() == [1, 2, 3]


def test_log_probabilities_ignore_the_profile() -> None:
    got = log_probabilities(torch.tensor([[math.log(3.0), 0.0]]))
    assert got[0].tolist() == pytest.approx([math.log(0.75), math.log(0.25)], abs=1e-7)


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.2499999, 1), (0.25, 3), (0.9999999, 3), (1 - 2**-53, 3)])
def test_draw_is_the_inverse_cdf_over_ascending_ids(u: float, token: int) -> None:
    """AMB-128: the smallest x with cumulative mass > u * total, never a token of mass 0."""
    assert draw(torch.tensor([[0.0, 0.5, 0.0, 1.5, 0.0]], dtype=torch.float64), [u]).tolist() == [token]


def test_weights_over_a_few_ids_equal_those_over_all() -> None:
    row = logits_of(P).numpy()
    few, many = distribution(row, Sampling(top_k=3)), p_of(logits_of(P), top_k=3)
    assert few.ids is not None
    assert few.ids.tolist() == [50, 51, 52]
    assert [few.of(i) for i in range(64)] == many.tolist()
    for u in (0.0, 0.1, 0.3, 0.7, 0.99):
        assert few.draw(u) == draw(many[None], [u])[0]


def test_draw_never_passes_the_last_token_with_mass() -> None:
    weights = torch.tensor([[5e-324, 0.0]], dtype=torch.float64)  # u * total rounds up to the total
    assert draw(weights, [0.9]).tolist() == [0]


def round_of(p: torch.Tensor, rows: QRows, tokens: np.ndarray, seed: int) -> np.ndarray:
    """One position of rule 2, many times: accept or draw from the residual, exactly as runner and core do it."""
    rng = np.random.default_rng(seed)
    count = len(tokens)
    extra = [rows.residual(i, Weights(p[i].numpy())).draw(u) for i, u in enumerate(rng.random(count).tolist())]
    accepts = rng.random(count).tolist()
    out = []
    for i, x in enumerate(tokens.tolist()):
        scored = [Scored(argmax=-1, extra=extra[i], p=float(p[i, x]), q=rows.of(i, x)), Scored(argmax=-1, extra=-1)]
        outcome = accept(Rule.SPECULATIVE_SAMPLING, [x], scored, Uniforms(accept=(accepts[i],), extra=(0.0, 0.0)))
        out.append(x if outcome.accepted else outcome.extra)
    return np.asarray(out)


def assert_distributed(tokens: np.ndarray, p: torch.Tensor) -> None:
    seen = np.bincount(tokens, minlength=len(p))
    support = np.flatnonzero(p.numpy() > 1e-12)
    assert seen[support].sum() == len(tokens)
    assert chisquare(seen[support], p.numpy()[support] * len(tokens)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ({}, {}),
        ({"temperature_milli": 500}, {}),
        ({"top_k": 2}, {}),
        ({}, {"top_k": 2}),
        ({"top_p_milli": 700}, {}),
        ({"top_k": 3, "top_p_milli": 800, "temperature_milli": 1500}, {"top_p_milli": 900}),
    ],
)
def test_rule_2_yields_the_target_for_q_unlike_p(target: dict[str, int], draft: dict[str, int]) -> None:
    p, q = p_of(logits_of(P), **target), p_of(logits_of({50: 0.4, 51: 0.3, 52: 0.2, 53: 0.1}), **draft)
    rows = QRows.dense_rows(q.expand(DRAWS, -1))
    proposed = draw(rows.rows, np.random.default_rng(1).random(DRAWS).tolist())
    assert_distributed(round_of(p.expand(DRAWS, -1), rows, proposed, 2), p)


def test_c25_rule_2_with_point_masses_yields_the_target() -> None:
    """An n-gram drafter that always proposes a; q(a) = 0.2 instead of 1 would give a always."""
    p = p_of(logits_of({1: 0.3, 2: 0.5, 3: 0.2}))
    rows = QRows.point_masses([1] * DRAWS, 64)
    got = round_of(p.expand(DRAWS, -1), rows, np.full(DRAWS, 1), 3)
    assert_distributed(got, p)
    shares = np.bincount(got, minlength=4)[1:] / DRAWS
    assert shares.tolist() == pytest.approx([0.3, 0.5, 0.2], abs=0.014)


def test_plain_sampling_is_distributed_as_p() -> None:
    p = p_of(logits_of(P), top_p_milli=850)
    assert_distributed(draw(p.expand(DRAWS, -1), np.random.default_rng(4).random(DRAWS).tolist()), p)
    assert p[53] == 0.0
    assert p[50].item() == pytest.approx(2 / 9, abs=1e-6)
