"""TargetRunner: scored positions of real checkpoints whose distributions are known by hand."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sdcp_mono.core.accept import accept, uniforms
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import ModelCard, Scored, ScoreFailure, ScoreRequest, Uniforms
from sdcp_mono.runners.decoder import RaggedBatch
from sdcp_mono.runners.hf import HfDecoder
from sdcp_mono.runners.paged import PagedModel
from sdcp_mono.runners.rows import QRows
from sdcp_mono.runners.target import UNSCORED, TargetRunner

GREEDY, SAMPLED = Rule.GREEDY, Rule.SPECULATIVE_SAMPLING
S = [i.to_bytes(16, "big") for i in range(8)]
CHAIN = (5, 9, 10, 11, 3, 20, 21, 22, 23, 24, 2)


def target(
    folder: Path, *, blocks: int = 64, block_size: int = 16, budget: int = 128, context: int = 512
) -> TargetRunner:
    decoder = HfDecoder.load(folder)
    card = ModelCard("tiny", bytes(32), bytes(32), decoder.vocab_size, context)
    return TargetRunner(card, PagedModel(decoder, b"x", blocks=blocks, block_size=block_size, token_budget=budget))


def ask(session: bytes, prefix: list[int], tokens: tuple[int, ...] = (), rule: Rule = GREEDY, **more) -> ScoreRequest:
    return ScoreRequest(session, prefix, len(prefix), tokens, rule, more.pop("sampling", Sampling()), **more)


def randoms(seed: int, m: int) -> Uniforms:
    rng = random.Random(seed)
    return Uniforms(tuple(rng.random() for _ in range(m)), tuple(rng.random() for _ in range(m + 1)))


def scored(answer: object) -> list[Scored]:
    assert isinstance(answer, list), answer
    return answer


def test_rule_1_scores_m_plus_1_positions(chainA: Path) -> None:
    """Greedy on [5, 9] gives 10 11 3 20 21 22 23 24 2, whatever the proposal."""
    runner = target(chainA)
    assert runner.admit(S[0], 20)
    assert runner.admit(S[1], 20)
    right, wrong = CHAIN[2:6], (10, 11, 40, 20)
    first, second = runner.step([ask(S[0], [5, 9], right), ask(S[1], [5, 9], wrong)])
    assert [s.argmax for s in scored(first)] == [10, 11, 3, 20, 21]
    assert [s.argmax for s in scored(second)] == [10, 11, 3, 9, 21]
    assert all(s.extra == s.argmax and s.logprobs is None for s in scored(first))
    assert accept(GREEDY, wrong, scored(second)).accepted == 2
    assert runner.totals.passes == 1


def test_rule_1_ignores_the_profile(chainA: Path) -> None:
    """AMB-029."""
    runner = target(chainA)
    assert runner.admit(S[0], 20)
    plain = runner.step([ask(S[0], [5, 9], (10, 11))])
    hot = runner.step([ask(S[0], [5, 9], (10, 11), sampling=Sampling(temperature_milli=5000, top_k=3))])
    assert plain == hot


def test_rule_2_p_q_and_residual(targetP: Path) -> None:
    """P = (.2, .4, .3, .1), Q = (.4, .3, .2, .1) on 50..53: after a rejection only 51 and 52 can come, half each."""
    runner = target(targetP)
    q = torch.zeros(3, 64)
    q[:, 50:54] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tokens = (50, 51, 53)
    extras = []
    for u in (0.0, 0.49, 0.51, 0.99):
        assert runner.admit(S[0], 20)
        draws = Uniforms((0.5, 0.5, 0.5), (u, u, u, u))
        (answer,) = runner.step([ask(S[0], [1], tokens, SAMPLED, uniforms=draws, rows=QRows.dense_rows(q))])
        assert [s.p for s in scored(answer)] == pytest.approx([0.2, 0.4, 0.1, 0.0], abs=1e-6)
        assert [s.q for s in scored(answer)] == pytest.approx([0.4, 0.3, 0.1, 0.0], abs=1e-6)
        assert [s.argmax for s in scored(answer)] == [51] * 4
        extras.append([s.extra for s in scored(answer)])
    # At position 4 the draw is from p itself: cumulative .2 .6 .9 1.
    assert extras == [[51, 51, 51, 50], [51, 51, 51, 51], [52, 52, 52, 51], [52, 52, 52, 53]]


def test_rule_2_with_point_masses(targetP: Path) -> None:
    """C-25: q = 1 at the proposed token, and the residual is everything else."""
    runner = target(targetP)
    assert runner.admit(S[0], 20)
    rows = QRows.point_masses([51, 50], 64)
    for u, first in ((0.0, 50), (0.333, 50), (0.334, 52), (0.832, 52), (0.834, 53)):
        draws = Uniforms((0.5, 0.5), (u, u, u))
        (answer,) = runner.step([ask(S[0], [1], (51, 50), SAMPLED, uniforms=draws, rows=rows)])
        assert scored(answer)[0].extra == first
        assert [s.q for s in scored(answer)] == [1.0, 1.0, 0.0]


def test_rule_2_at_temperature_0_is_greedy(targetP: Path) -> None:
    """AMB-028, whatever q is; and 0/0 is no acceptance."""
    runner = target(targetP)
    assert runner.admit(S[0], 20)
    cold = Sampling(temperature_milli=0)
    for rows in (QRows.point_masses([51, 52], 64), QRows.dense_rows(torch.full((2, 64), 1 / 64))):
        (answer,) = runner.step([ask(S[0], [1], (51, 52), SAMPLED, sampling=cold, uniforms=randoms(1, 2), rows=rows)])
        assert [(s.p, s.extra) for s in scored(answer)] == [(1.0, 51), (0.0, 51), (0.0, 51)]
        outcome = accept(SAMPLED, (51, 52), scored(answer), randoms(1, 2))
        assert (outcome.accepted, outcome.extra) == (1, 51)


def test_profiles_are_per_request(targetP: Path) -> None:
    """C-29: greedy, top-k, top-p and plain sampling in one pass; the greedy neighbour is intact."""
    runner = target(targetP)
    for session in S[:4]:
        assert runner.admit(session, 20)
    half = Uniforms((), (0.95,))
    profiles = [Sampling(top_k=1, top_p_milli=800), Sampling(top_k=2), Sampling(top_p_milli=850), Sampling(top_k=10**9)]
    requests = [ask(s, [1], (), SAMPLED, uniforms=half, sampling=p) for s, p in zip(S, profiles, strict=False)]
    assert runner.admit(S[5], 20)
    answers = runner.step([*requests, ask(S[5], [1])])
    assert [scored(a)[0].extra for a in answers] == [51, 52, 52, 53, 51]


def test_logprobs_are_the_models_own(random_llama: Path) -> None:
    """Before temperature, with the best alternatives in order; rule 2 at top_k 1 changes nothing about them."""
    runner = target(random_llama)
    prompt = [3, 1, 4, 1, 5]
    model = AutoModelForCausalLM.from_pretrained(random_llama, dtype=torch.float32)
    with torch.inference_mode():
        want = torch.log_softmax(model(torch.tensor([[*prompt, 9, 2]])).logits[0, 4:].double(), -1)
    assert runner.admit(S[0], 20)
    more = {"sampling": Sampling(temperature_milli=300, top_k=1), "uniforms": randoms(0, 2), "top_logprobs": 3}
    (answer,) = runner.step([ask(S[0], prompt, (9, 2), SAMPLED, rows=QRows.point_masses([9, 2], 64), **more)])
    for position, row, proposed in zip(scored(answer), want, (9, 2, None), strict=True):
        assert position.logprobs is not None
        best = torch.topk(row, 3)
        assert [t.token for t in position.logprobs.top] == best.indices.tolist()
        assert [t.logprob for t in position.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert position.logprobs.extra == pytest.approx(float(row[position.extra]), abs=1e-4)
        if proposed is not None:
            assert position.logprobs.proposed == pytest.approx(float(row[proposed]), abs=1e-4)
    (answer,) = runner.step([ask(S[0], prompt, (9,), top_logprobs=0)])
    logprobs = scored(answer)[0].logprobs
    assert logprobs is not None
    assert logprobs.top == ()
    (answer,) = runner.step([ask(S[0], prompt, (), top_logprobs=1000)])
    logprobs = scored(answer)[0].logprobs
    assert logprobs is not None
    assert len(logprobs.top) == 64
    assert sum(math.exp(t.logprob) for t in logprobs.top) == pytest.approx(1.0)


def test_c31_nan_fails_one_request_only(nan20: Path, chainA: Path) -> None:
    """A batch of 4 where one prompt reaches 20, greedy and sampled; the others equal a run alone."""
    runner, alone = target(nan20), target(chainA)
    prompts = [[5, 9], [30, 31], [3, 20], [33]]
    answers = {}
    for rule in (GREEDY, SAMPLED):
        for session in S[:4]:
            assert runner.admit(session, 30)
            assert alone.admit(session, 30)
        more = {"uniforms": randoms(0, 0)} if rule is SAMPLED else {}
        requests = [ask(s, p, (), rule, **more) for s, p in zip(S, prompts, strict=False)]
        answers = dict(zip(S, runner.step(requests), strict=False))
        failure = answers[S[2]]
        assert isinstance(failure, ScoreFailure)
        assert not failure.permanent
        for request in (requests[0], requests[1], requests[3]):
            assert answers[request.session] == alone.step([request])[0]
        for session in S[:4]:
            runner.release(session)
            alone.release(session)


class Faulty:
    """A test hook: one logit of the last wanted row of the first sequence is replaced."""

    def __init__(self, decoder: HfDecoder) -> None:
        self._decoder = decoder
        self.value: float | None = None

    def __getattr__(self, name: str):
        return getattr(self._decoder, name)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        logits = self._decoder.forward(batch).clone()
        if self.value is not None:
            logits[(batch.logit_rows < batch.query_starts[1]).sum() - 1, 7] = self.value
        return logits


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_c31_one_bad_logit(chainA: Path, value: float) -> None:
    decoder = Faulty(HfDecoder.load(chainA))
    card = ModelCard("tiny", bytes(32), bytes(32), 64, 512)
    runner = TargetRunner(card, PagedModel(decoder, b"x", blocks=64, token_budget=128))
    for session in S[:2]:
        assert runner.admit(session, 30)
    work = [ask(S[0], [5, 9], (10,)), ask(S[1], [5, 9], (10,))]
    decoder.value = value
    bad, good = runner.step(work)
    assert isinstance(bad, ScoreFailure)
    assert [s.argmax for s in scored(good)] == [10, 11]
    decoder.value = None
    assert runner.step(work) == [good, good]  # the retry succeeds, from KV that never held the failed rows


def test_a_long_prompt_is_answered_when_it_is_fed(cyc: Path) -> None:
    runner = target(cyc, budget=80)
    prompt = [10 + i % 10 for i in range(200)]
    assert runner.admit(S[0], 210)
    assert runner.admit(S[1], 20)
    answers = [runner.step([ask(S[0], prompt), ask(S[1], [12 + i % 3], (14,))]) for i in range(3)]
    assert [a[0] is None for a in answers] == [True, True, False]
    assert scored(answers[2][0])[0].argmax == 10
    assert [scored(a[1])[0].argmax for a in answers] == [13, 14, 15]
    assert runner.totals.prefill_rows == 200


def test_amb_126_positions_past_the_context_are_not_scored(cyc: Path) -> None:
    """M larger than the room at the end of the context: always M+1 answers, the rest refuses its token."""
    runner = target(cyc, context=32)
    prefix = [10 + i % 10 for i in range(30)]
    assert runner.admit(S[0], 32)
    (answer,) = runner.step([ask(S[0], prefix, (10, 11, 12, 13, 14))])
    assert [s.argmax for s in scored(answer)] == [10, 11, 12, -1, -1, -1]
    assert scored(answer)[3] is UNSCORED
    assert accept(GREEDY, (10, 11, 12, 13, 14), scored(answer)).accepted == 3
    rows = QRows.point_masses([10, 11, 12], 64)
    (answer,) = runner.step([ask(S[0], prefix, (10, 11, 12), SAMPLED, uniforms=randoms(0, 3), rows=rows)])
    assert [s.q for s in scored(answer)] == [1.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="context of 32"):
        runner.admit(S[1], 33)


def test_a_proposal_without_room_for_it_is_refused_whole(cyc: Path) -> None:
    """Room is made before a pass (``roles/residency.py``); a pass that lacks it must not score half a proposal."""
    runner = target(cyc, block_size=4)
    assert runner.admit(S[0], 6)
    tokens = tuple(10 + i % 10 for i in range(4, 12))
    (answer,) = runner.step([ask(S[0], [10, 11, 12, 13], tokens)])
    assert isinstance(answer, ScoreFailure)
    assert runner.admit(S[0], 12)
    (answer,) = runner.step([ask(S[0], [10, 11, 12, 13], tokens)])
    assert accept(GREEDY, tokens, scored(answer)).accepted == 8


def test_a_callers_mistake_fails_one_request(cyc: Path) -> None:
    runner = target(cyc, blocks=3)  # too few for room past the end
    assert runner.admit(S[0], 48)
    long = [10] * 49
    fine = ask(S[0], [10], (11,))
    bad = [
        ask(S[1], [10]),
        ask(S[2], [10], (11,), SAMPLED, rows=QRows.point_masses([11], 64)),
        ask(S[3], [10], (11,), SAMPLED, uniforms=randoms(0, 1)),
        ask(S[4], long),
    ]
    answers = runner.step([*bad, fine])
    assert all(isinstance(a, ScoreFailure) and a.permanent for a in answers[:4])
    assert [s.argmax for s in scored(answers[4])] == [11, 12]


def test_card_and_model_must_agree(cyc: Path) -> None:
    decoder = HfDecoder.load(cyc)
    for vocab, context, budget in ((63, 512, 128), (64, 513, 128), (64, 512, 70)):
        with pytest.raises(ValueError):
            TargetRunner(
                ModelCard("tiny", bytes(32), bytes(32), vocab, context),
                PagedModel(decoder, b"x", blocks=4, token_budget=budget),
            )


def test_c27_batch_mates_do_not_change_a_seeded_session(targetP: Path) -> None:
    """The same session alone, and among neighbours with other profiles: the same ids."""

    def generate(neighbours: int, m: int) -> list[int]:
        runner = target(targetP, budget=256)
        prefixes = {S[i]: [i + 1] for i in range(neighbours + 1)}
        for session in prefixes:
            assert runner.admit(session, 60)
        for round in range(1, 20):
            requests = []
            for i, (session, prefix) in enumerate(prefixes.items()):
                tokens = tuple(50 + (round + j + i) % 4 for j in range(m))
                draws, rows = uniforms(7 + i, session, round, m), QRows.point_masses(tokens, 64)
                profile = Sampling(temperature_milli=1000 if i == 0 else 500 * i)
                requests.append(ask(session, prefix, tokens, SAMPLED, sampling=profile, uniforms=draws, rows=rows))
            if neighbours:
                requests = requests[round % 3 :] + requests[: round % 3]
            for request, answer in zip(requests, runner.step(requests), strict=True):
                outcome = accept(SAMPLED, request.tokens, scored(answer), request.uniforms)
                prefixes[request.session] += [*request.tokens[: outcome.accepted], outcome.extra]
        return prefixes[S[0]]

    for m in (1, 4):
        assert generate(0, m) == generate(6, m)


def test_c28_rejection_of_the_only_proposed_token(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A graph with two branches of p = .5, a drafter that always takes branch A, k = 1, block size 4, prefix cache on:
    branch share .5, each emitted pair is an edge, never a skipped node."""
    graph = {10: {11: 0.5, 21: 0.5}, 11: {12: 1.0}, 21: {22: 1.0}, 12: {10: 1.0}, 22: {10: 1.0}}
    plugin = request.config.pluginmanager
    conftest = next(p for p in plugin.get_plugins() if hasattr(p, "chain_model"))
    folder = conftest.write_checkpoint(tmp_path / "branches", conftest.chain_model(graph, {10: 1.0}))
    runner = target(folder, blocks=2400, block_size=4, budget=512)
    branch_a = {10: 11, 11: 12, 21: 22, 12: 10, 22: 10}
    rng = random.Random(0)
    taken = {11: 0, 21: 0}
    for group in range(5):
        prefixes = {(group * 100 + i).to_bytes(16, "big"): [10, 11, 12, 10] for i in range(100)}
        for session in prefixes:
            assert runner.admit(session, 24)
        while prefixes:
            requests = []
            for session, prefix in prefixes.items():
                x = branch_a[prefix[-1]]
                draws = Uniforms((rng.random(),), (rng.random(), rng.random()))
                rows = QRows.point_masses([x], 64)
                requests.append(ask(session, prefix, (x,), SAMPLED, uniforms=draws, rows=rows))
            for asked, answer in zip(requests, runner.step(requests), strict=True):
                if answer is None:
                    continue
                prefix = prefixes[asked.session]
                outcome = accept(SAMPLED, asked.tokens, scored(answer), asked.uniforms)
                for token in (*asked.tokens[: outcome.accepted], outcome.extra):
                    assert token in graph[prefix[-1]]
                    if prefix[-1] == 10:
                        taken[token] += 1
                    prefix.append(token)
                if len(prefix) >= 22:
                    runner.release(asked.session)
                    del prefixes[asked.session]
    total = sum(taken.values())
    assert total > 2500
    assert taken[11] / total == pytest.approx(0.5, abs=0.03)
    runner._model.pool.check()
