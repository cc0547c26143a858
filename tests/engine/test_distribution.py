"""SDCP-129: under rule 2 what comes out has the target's distribution, whatever the drafter's is.

P over ids 0..3 after any token, drafters with another distribution, with all mass on one token, and with the same one.
Independent rounds through the engine, chi-square at 1e-4 with fixed seeds.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
from msgspec import structs
from scipy.stats import chisquare

from sdcp_mono.core.messages import Sampling
from sdcp_mono.core.ports import OpenOptions, Scored, ScoreRequest, Uniforms

P = (0.2, 0.4, 0.3, 0.1)
Q = (0.4, 0.3, 0.2, 0.1)
DRAWS = 24_000


def draw(weights: Any, u: float) -> int:
    sums = list(accumulate(weights))
    return next(x for x, mass in enumerate(sums) if mass > u * sums[-1])


def score(request: ScoreRequest, q: tuple[float, ...]) -> list[Scored]:
    assert request.uniforms is not None
    left = [max(0.0, a - b) for a, b in zip(P, q, strict=True)]
    rows = [
        Scored(1, draw(left if sum(left) else P, u), P[x], q[x])
        for x, u in zip(request.tokens, request.uniforms.extra, strict=False)
    ]
    return [*rows, Scored(1, draw(P, request.uniforms.extra[-1]))]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("q", [Q, (0.0, 0.0, 1.0, 0.0), P], ids=["other", "point mass", "same"])
def test_sdcp_129_chi_square(kit: Any, q: tuple[float, ...], seeded: bool) -> None:
    rng = random.Random(f"{q} {seeded}")
    profile = Sampling(seed=12345) if seeded else Sampling()
    contract = kit.contract(rule=2, sampling=profile, max_new=4000, stop=(), low_rounds=10**6)
    counts, pairs, accepted, proposed, number = [0] * 4, [0] * 16, 0, 0, 0
    while sum(counts) < DRAWS:
        number += 1
        world = session(kit, contract, number, q, rng)
        for _ in range(400):
            tokens = [draw(q, rng.random()) for _ in range(4)]
            verdict = kit.verdict(propose(world, number, tokens))
            accepted, proposed = accepted + verdict.accepted, proposed + min(verdict.accepted + 1, 4)
        output = [token for record in world.commits for token in record.emitted]
        for token in output:
            counts[token] += 1
        for a, b in zip(output[::2], output[1::2], strict=False):
            pairs[4 * a + b] += 1  # and tokens are independent of each other
    assert chisquare(counts, [p * sum(counts) for p in P]).pvalue > 1e-4
    assert chisquare(pairs, [a * b * sum(pairs) for a in P for b in P]).pvalue > 1e-4
    rate = sum(min(a, b) for a, b in zip(P, q, strict=True))  # the chance to accept: 1 - total variation
    assert abs(accepted / proposed - rate) < 0.02


def session(kit: Any, contract: Any, number: int, q: tuple[float, ...], rng: random.Random) -> Any:
    world = kit.World(contract, OpenOptions(), vocab=4)

    def fresh(request: ScoreRequest) -> list[Scored]:
        return score(request, q)

    world.score = fresh
    run = world.run

    def run_with_draws(effects: Any) -> None:
        """The role's part: values for rounds without a seed."""
        run([_drawn(effect, rng) for effect in effects])

    world.run = run_with_draws
    name = number.to_bytes(16, "big")
    world.open(session=name, prompt=(1,))
    world.ask(lambda waiter: world.engine.assign(assignment(world, name, contract, kit.B), waiter, world.at()))
    return world


def _drawn(effect: Any, rng: random.Random) -> Any:
    if getattr(effect, "fresh_uniforms", False):
        m = len(effect.request.tokens)
        drawn = Uniforms(tuple(rng.random() for _ in range(m)), tuple(rng.random() for _ in range(m + 1)))
        request = structs.replace(effect.request, uniforms=drawn)
        return structs.replace(effect, request=request, fresh_uniforms=False)
    return effect


def assignment(world: Any, name: bytes, contract: Any, drafter: str) -> Any:
    from sdcp_mono.core.messages import Assignment

    state = world.engine.sessions[name].state()
    return Assignment(
        session=name, epoch=1, contract=contract, verifier="https://v/", drafter=drafter, prompt=(1,), round=0,
        committed=0, digest=state.digest, m_init=8,
    )  # fmt: skip


def propose(world: Any, number: int, tokens: list[int]) -> Any:
    from sdcp_mono.core.messages import Proposal, Status

    name = number.to_bytes(16, "big")
    state = world.engine.sessions[name].state()
    proposal = Proposal(
        session=name, epoch=1, round=state.round + 1, drafter="https://b/", base=state.committed,
        base_digest=state.digest, tokens=tuple(tokens), q_rows="mlc://mlc/-/q_rows/1",
        status=Status(instance="b", role=1, load=0, queue=0, ttl_ms=1000),
    )  # fmt: skip
    return world.send(proposal)
