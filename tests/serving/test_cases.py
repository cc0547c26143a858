"""Public failures of systems like this one, tried on the whole engine with models whose right answers are known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scipy import stats

from sdcp_mono.core.messages import UNSET, Rule, Sampling
from sdcp_mono.core.problems import BadContract

P = {50: 0.2, 51: 0.4, 52: 0.3, 53: 0.1}


@pytest.fixture(scope="session")
def tiny(load_engine: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine over one of the tiny checkpoints, with another one as its draft model; loaded once each."""
    from sdcp_mono.models.identity import read_folder

    loaded: dict[Any, Any] = {}

    def engine(target: str, draft: str, **settings: Any) -> Any:
        key = (target, draft, *sorted(settings.items()))
        if key not in loaded:
            data = tmp_path_factory.mktemp("tiny")
            folder = read_folder(checkpoint(target), target, data)
            drafts = ("ngram", "quantized", f"model:{checkpoint(draft)}")
            loaded[key] = load_engine(folder, data, drafts, **{"kv_memory_mb": 4, **settings})
        return loaded[key]

    return engine


def sampled(engine: Any, seed: int | None, max_new: int, **sampling: int) -> Any:
    profile = Sampling(seed=UNSET if seed is None else seed, **sampling)
    session = None if seed is None else seed.to_bytes(16, "big")
    return engine.request(
        (5, 50), max_new, rule=Rule.SPECULATIVE_SAMPLING, sampling=profile, session=session, stop=()
    )  # fmt: skip


@pytest.mark.parametrize("draft", [None, "self", "quantized", "ngram"])
def test_c31_a_nan_ends_its_own_request_with_an_error_and_nobody_elses(tiny: Any, draft: str | None) -> None:
    """Every logit after token 20 is NaN. A proposal that holds 20 can't be scored, so it ends the request a few tokens
    sooner; what was committed is right, the error says why, and each neighbour equals its run alone."""
    engine = tiny("nan20", "chainA")
    prompts = [(5, 9), (5, 30), (5, 31), (5, 21)]  # only the first one comes to 20
    outputs = engine.run(engine.node(draft, m=4), [engine.request(p, 8, stop=(2,)) for p in prompts], together=4)
    assert outputs[0].tokens == (10, 11, 3, 20)[: len(outputs[0].tokens)]
    assert len(outputs[0].tokens) == 4 or draft in ("self", "quantized")
    assert outputs[0].finish == 5
    assert "finite" in outputs[0].error
    alone = [engine.run(engine.node(), [engine.request(p, 8, stop=(2,))])[0] for p in prompts[1:]]
    assert [o.tokens for o in outputs[1:]] == [o.tokens for o in alone]
    assert outputs[3].tokens == (22, 23, 24, 2)


@pytest.mark.parametrize("draft", ["self", "ngram", "quantized"])
def test_c35_the_first_token_is_a_stop(tiny: Any, draft: str) -> None:
    engine = tiny("chainA", "chainA")
    (output,) = engine.run(engine.node(draft), [engine.request((5, 24), stop=(2,))])
    assert (output.tokens, output.finish, len(output.rounds)) == ((2,), 4, 1)


@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("draft", ["self", "ngram", "quantized"])
def test_rule_2_output_has_the_targets_distribution(tiny: Any, draft: str, m: int) -> None:
    """P on every token whatever the drafter: Q, point masses, or the target in int4 (chi-square, 4,000 tokens)."""
    engine = tiny("targetP", "draftQ")
    requests = [sampled(engine, None, 250) for _ in range(16)]
    outputs = engine.run(engine.node(draft, m=m), requests, together=16)
    tokens = [token for output in outputs for token in output.tokens]
    assert len(tokens) == 4000
    counts = [tokens.count(x) for x in P]
    assert sum(counts) == 4000
    assert stats.chisquare(counts, [4000 * p for p in P.values()]).pvalue > 1e-4
    assert len({output.tokens for output in outputs}) == 16


def test_c27_seeds_alone_in_a_crowd_and_after_a_restart(tiny: Any) -> None:
    engine = tiny("targetP", "draftQ")
    (alone,) = engine.run(engine.node("self"), [sampled(engine, 7, 32)])
    crowd = [sampled(engine, seed, 32) for seed in (None, 1, 7, None, 2, None)]
    outputs = engine.run(engine.node("self"), crowd, together=6)
    assert outputs[2].tokens == alone.tokens
    assert len({output.tokens for output in outputs}) == 6


@pytest.mark.parametrize("temperature_milli", [1, 10, 0])
def test_c30_a_tiny_temperature_is_greedy(tiny: Any, temperature_milli: int) -> None:
    engine = tiny("targetP", "draftQ")
    (output,) = engine.run(engine.node("self"), [sampled(engine, None, 24, temperature_milli=temperature_milli)])
    assert output.tokens == (51,) * 24


def test_c30_a_huge_temperature_is_uniform_without_nan(tiny: Any) -> None:
    engine = tiny("targetP", "draftQ")
    outputs = engine.run(
        engine.node("self"), [sampled(engine, None, 100, temperature_milli=10**12) for _ in range(8)], together=8
    )
    assert all(output.finish == 4 for output in outputs)
    assert len({token for output in outputs for token in output.tokens}) > 50


@pytest.mark.parametrize(
    ("sampling", "only"),
    [
        ({"top_k": 1}, {51}),
        ({"top_k": 2}, {51, 52}),
        ({"top_p_milli": 0}, {51}),
        ({"top_k": 1, "top_p_milli": 800}, {51}),
        ({"top_p_milli": 650}, {51, 52}),
        ({"top_k": 65}, set(P)),
        ({"top_k": 10**9}, set(P)),
        ({"top_k": 0}, set(P)),
    ],
)
def test_c29_truncation_on_both_sides(tiny: Any, sampling: dict[str, int], only: set[int]) -> None:
    engine = tiny("targetP", "draftQ")
    outputs = engine.run(
        engine.node("self", m=3), [sampled(engine, None, 60, **sampling) for _ in range(4)], together=4
    )
    assert {token for output in outputs for token in output.tokens} == only


def test_c38_many_short_requests_on_a_small_pool_all_finish(tiny: Any) -> None:
    """16 blocks for sessions of 6 blocks: they queue for room, and none is lost."""
    engine = tiny("chainA", "chainA")
    node = engine.node("quantized", max_sessions=8)
    outputs = engine.run(node, [engine.request((5, 9), 9, stop=(2,)) for _ in range(120)], together=40)
    assert {output.tokens for output in outputs} == {(10, 11, 3, 20, 21, 22, 23, 24, 2)}


def test_c33_what_can_never_fit_is_refused_before_anything_is_taken(tiny: Any) -> None:
    engine = tiny("chainA", "chainA")

    async def ask() -> None:
        async with engine.node("self") as node:
            await node.serving.generate(engine.request((5, 9), 4096))

    with pytest.raises(BadContract, match="max_new"):
        asyncio.run(ask())


def test_the_logprobs_of_every_origin_are_the_targets(tiny: Any) -> None:
    """Accepted, corrected, bonus and self-decoded tokens alike: ln P."""
    import math

    engine = tiny("targetP", "draftQ")
    request = sampled(engine, None, 60)
    import msgspec

    (output,) = engine.run(engine.node("self", m=3), [msgspec.structs.replace(request, top_logprobs=2)])
    infos = [info for r in output.rounds for info in r.tokens]
    assert {info.origin for info in infos} >= {"self", "accepted", "correction"}
    for token, info in zip(output.tokens, infos, strict=True):
        assert info.logprob == pytest.approx(math.log(P[token]), abs=0.02)  # weights in bfloat16
        assert [entry.token for entry in info.top] == [51, 52]
