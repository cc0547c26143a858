"""Autoregressive drafting: against transformers' own greedy output, fresh drafters and known distributions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from sdcp_mono.core.accept import uniforms
from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import Draft, DraftRequest
from sdcp_mono.drafters.paged_draft import PagedDraft

Request = Callable[..., DraftRequest]
MakeDraft = Callable[..., PagedDraft]

SAMPLED = Rule.SPECULATIVE_SAMPLING
Q = {50: 0.4, 51: 0.3, 52: 0.2, 53: 0.1}  # of the checkpoint draftQ, after any token


@pytest.fixture(scope="module")
def reference(random_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(random_llama, dtype=torch.float32)


@torch.inference_mode()
def greedy(model: Any, prefix: Sequence[int], m: int) -> tuple[int, ...]:
    tokens = list(prefix)
    for _ in range(m):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prefix) :])


def settle(drafter: PagedDraft, requests: Sequence[DraftRequest]) -> list[Draft]:
    """As the batcher does: ask again for those that were answered None."""
    answers: dict[int, Draft] = {}
    while len(answers) < len(requests):
        waiting = [i for i in range(len(requests)) if i not in answers]
        for i, draft in zip(waiting, drafter.draft([requests[i] for i in waiting]), strict=True):
            if draft is not None:
                answers[i] = draft
    return [answers[i] for i in range(len(requests))]


def one(drafter: PagedDraft, request: DraftRequest) -> Draft:
    return settle(drafter, [request])[0]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 64), k=length)


def tokens_of(drafts: Sequence[Draft]) -> list[int]:
    return [token for draft in drafts for token in draft.tokens]


def p_value(tokens: Sequence[int], expected: dict[int, float]) -> float:
    counts = [tokens.count(token) for token in expected]
    assert sum(counts) == len(tokens)
    return float(stats.chisquare(counts, [p * len(tokens) for p in expected.values()]).pvalue)


# ---- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_target_as_its_own_draft_model(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any, m: int
) -> None:
    drafter = make_draft(random_llama)
    for seed in range(4):
        prefix = prompt(5 + 9 * seed, seed)
        draft = one(drafter, request_of(prefix, m, session=seed))
        assert draft.tokens == greedy(reference, prefix, m)
        assert draft.rows is None  # rule 1 needs none


def test_sdcp_118_rolled_back_draft_equals_a_fresh_one(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any
) -> None:
    """Whatever part of each draft is accepted, the next one is what a model without history drafts."""
    drafter, choice = make_draft(random_llama), random.Random(1)
    prefixes = [prompt(length, length) for length in (3, 15, 16, 40)]
    for _ in range(12):
        requests = [request_of(prefix, choice.randint(1, 8), session=i) for i, prefix in enumerate(prefixes)]
        for request, prefix, draft in zip(requests, prefixes, settle(drafter, requests), strict=True):
            assert draft.tokens == greedy(reference, prefix, request.m)
            accepted = choice.randint(0, len(draft.tokens))
            prefix += [*draft.tokens[:accepted], choice.randrange(3, 64)]


def test_going_back_to_the_prompt(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any
) -> None:
    """A resync from index 0 brings another list, here with other output; then the same list, shorter."""
    drafter, start = make_draft(random_llama), prompt(20)
    first = [*start, *prompt(40, 1)]
    second = [*start, *prompt(30, 2)]
    for prefix, length in ((first, 60), (start, 20), (second, 50), (second, 33), (second, 50), (second, 1)):
        draft = one(drafter, request_of(prefix, 4, length=length))
        assert draft.tokens == greedy(reference, prefix[:length], 4)


def test_going_back_while_neighbours_share_the_blocks(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any
) -> None:
    """Two sessions hold the same prompt blocks, every other block is taken, and one of them goes another way."""
    drafter, shared = make_draft(random_llama, blocks=8), prompt(48)
    for session in (1, 2):
        assert one(drafter, request_of(shared, 4, session=session)).tokens  # 3 shared blocks, and one of its own
    assert one(drafter, request_of(prompt(44, 1), 2, session=3)).tokens  # 3 blocks: all are taken
    other = [*shared[:8], *prompt(40, 3)]
    for expected in ((), greedy(reference, other, 4)):
        drafts = settle(drafter, [request_of(other, 4, session=1), request_of(shared, 4, session=2)])
        assert drafts[0].tokens == expected
        assert drafts[1].tokens == greedy(reference, shared, 4)
        drafter.release((3).to_bytes(16, "big"))


def test_batch_of_different_m_equals_each_alone(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any
) -> None:
    drafter = make_draft(random_llama)
    prefixes = [prompt(7 + i, i) for i in range(6)]
    lengths = (1, 8, 3, 1, 5, 2)
    requests = [request_of(p, m, session=i) for i, (p, m) in enumerate(zip(prefixes, lengths, strict=True))]
    drafts = settle(drafter, requests)
    assert [d.tokens for d in drafts] == [greedy(reference, p, m) for p, m in zip(prefixes, lengths, strict=True)]


def test_long_prompt_is_fed_in_parts_and_holds_nobody_up(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any
) -> None:
    drafter = make_draft(random_llama, token_budget=32)
    short, long = prompt(6), prompt(200, 1)
    calls = 0
    while True:
        calls += 1
        first, second = drafter.draft([request_of(short, 2, session=1), request_of(long, 3, session=2)])
        assert first is not None
        assert first.tokens == greedy(reference, short, 2)
        short.append(first.tokens[0])
        if second is not None:
            break
    assert calls >= 200 // 32
    assert second.tokens == greedy(reference, long, 3)


# ---- sampled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, Q),
        ({"top_k": 2}, {50: 4 / 7, 51: 3 / 7}),
        ({"temperature_milli": 500}, {50: 16 / 30, 51: 9 / 30, 52: 4 / 30, 53: 1 / 30}),
        ({"top_p_milli": 850}, {50: 4 / 9, 51: 3 / 9, 52: 2 / 9}),
    ],
)
def test_sdcp_073_tokens_follow_the_published_rows(
    make_draft: MakeDraft,
    request_of: Request,
    draftQ: Path,
    sampling: dict[str, int],
    expected: dict[int, float],
    seed: int | None,
) -> None:
    profile = Sampling(**sampling) if seed is None else Sampling(**sampling, seed=seed)
    drafter = make_draft(draftQ, blocks=256, token_budget=128)
    drafts: list[Draft] = []
    for round in range(1, 4):
        prefixes = [[5, 9] for _ in range(32)]
        drafts += settle(
            drafter,
            [request_of(p, 48, session=i, rule=SAMPLED, sampling=profile, round=round) for i, p in enumerate(prefixes)],
        )
    row = np.zeros(64, np.float32)
    row[list(expected)] = list(expected.values())
    for draft in drafts:
        assert len(draft.tokens) == 48
        draft.rows.check(draft.tokens, 64)
        rows = np.frombuffer(draft.rows.to_bytes(), "<f4").reshape(48, 64)
        np.testing.assert_allclose(rows, np.broadcast_to(row, rows.shape), atol=1e-6)
        assert all(rows[i, token] > 0 for i, token in enumerate(draft.tokens))
    assert p_value(tokens_of(drafts), expected) > 1e-4


def test_sdcp_073_rows_are_the_models_own(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any
) -> None:
    """Position by position: the row at i is the profile's distribution after the tokens drafted before i."""
    prefix = prompt(20)
    draft = one(make_draft(random_llama), request_of(prefix, 6, rule=SAMPLED, sampling=Sampling(seed=3)))
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prefix, *draft.tokens]])).logits[0, len(prefix) - 1 : -1]
    expected = torch.softmax(logits.double(), -1).numpy()
    rows = np.frombuffer(draft.rows.to_bytes(), "<f4").reshape(6, 64)
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_seeded_draft_does_not_depend_on_its_neighbours(
    make_draft: MakeDraft, request_of: Request, random_llama: Path
) -> None:
    sampling = Sampling(seed=11)
    prefixes = [prompt(12 + i, i) for i in range(4)]

    def requests(round: int) -> list[DraftRequest]:
        return [
            request_of(p, 2 + i, session=i, rule=SAMPLED, sampling=sampling, round=round)
            for i, p in enumerate(prefixes)
        ]

    together = settle(make_draft(random_llama), requests(1))
    for request, draft in zip(requests(1), together, strict=True):
        alone = one(make_draft(random_llama), request)
        assert alone.tokens == draft.tokens
    assert [d.tokens for d in settle(make_draft(random_llama), requests(2))] != [d.tokens for d in together]


def test_sdcp_134_draws_are_not_the_verifiers(make_draft: MakeDraft, request_of: Request, draftQ: Path) -> None:
    """What the verifier's random values would have drawn agrees with the draft as often as chance has it."""
    drafter = make_draft(draftQ, blocks=256, token_budget=128)
    cumulative = np.cumsum(list(Q.values()))
    agree = {"accept": 0, "extra": 0}
    total = 0
    for round in range(1, 4):
        requests = [
            request_of([5, 9], 48, session=i, rule=SAMPLED, sampling=Sampling(seed=7), round=round) for i in range(16)
        ]
        for request, draft in zip(requests, settle(drafter, requests), strict=True):
            drawn = np.array(draft.tokens) - 50
            values = uniforms(7, request.session, round, 48)
            for name in agree:
                agree[name] += int((np.searchsorted(cumulative, getattr(values, name)[:48], "right") == drawn).sum())
            total += 48
    for count in agree.values():
        assert stats.binomtest(count, total, sum(q * q for q in Q.values())).pvalue > 1e-4


def test_greedy_and_sampled_in_one_batch(
    make_draft: MakeDraft, request_of: Request, random_llama: Path, reference: Any
) -> None:
    left, right = prompt(9, 1), prompt(11, 2)
    plain, sampled = settle(
        make_draft(random_llama),
        [
            request_of(left, 4, session=1),
            request_of(right, 3, session=2, rule=SAMPLED, sampling=Sampling(temperature_milli=0)),
        ],
    )
    assert plain.tokens == greedy(reference, left, 4)
    assert sampled.tokens == greedy(reference, right, 3)  # temperature 0: all of q is on the best token
    assert plain.rows is None
    sampled.rows.check(sampled.tokens, 64)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Rule.GREEDY, SAMPLED])
def test_c31_draft_ends_before_logits_that_are_not_finite(
    make_draft: MakeDraft, request_of: Request, nan20: Path, rule: Rule
) -> None:
    drafter = make_draft(nan20)
    sound, broken = [5, 30], [5, 9, 20]
    for _ in range(2):
        drafts = settle(
            drafter,
            [
                request_of([5, 9], 8, session=1, rule=rule),
                request_of(broken, 8, session=2, rule=rule),
                request_of(sound, 4, session=3, rule=rule),
            ],
        )
        assert [d.tokens for d in drafts] == [(10, 11, 3, 20), (), (31, 32, 33, 34)]


def test_c31_prompt_whose_logits_are_not_finite(make_draft: MakeDraft, request_of: Request, nan20: Path) -> None:
    """Fed in parts: it must not be asked for again for ever."""
    drafter = make_draft(nan20, token_budget=16)
    assert one(drafter, request_of([20, *prompt(100)], 4)) == Draft(())
    assert one(drafter, request_of([5, 9], 2, session=2)).tokens == (10, 11)


def test_no_blocks_left_is_an_empty_draft(make_draft: MakeDraft, request_of: Request, cyc: Path) -> None:
    drafter = make_draft(cyc, blocks=3)
    first, second = [10] * 30, [10] * 20
    assert one(drafter, request_of(first, 2, session=1)).tokens == (11, 12)
    assert one(drafter, request_of(second, 2, session=2)) == Draft(())
    first += [11] * 2  # session 1 goes on, and grows into the last block
    assert one(drafter, request_of(first, 2, session=1)).tokens == (12, 13)
    first += [12] * 20  # more than there will ever be: it doesn't sit on blocks that it has no use for
    assert one(drafter, request_of(first, 2, session=1)) == Draft(())
    assert one(drafter, request_of(second, 2, session=2)).tokens == (11, 12)


@pytest.mark.parametrize(("length", "drafted"), [(509, 4), (510, 3), (512, 1), (513, 0)])
def test_draft_ends_with_the_context(
    make_draft: MakeDraft, request_of: Request, cyc: Path, length: int, drafted: int
) -> None:
    draft = one(make_draft(cyc), request_of([10] * length, 4))
    assert draft.tokens == (11, 12, 13, 14)[:drafted]


def test_release_gives_every_block_back(make_draft: MakeDraft, request_of: Request, cyc: Path) -> None:
    drafter = make_draft(cyc)
    for session in range(8):
        one(drafter, request_of([10, 11, *prompt(30, session)], 4, session=session))
    for session in (*range(8), 0, 99):
        drafter.release(session.to_bytes(16, "big"))
    pool = drafter._model.pool
    pool.check()
    assert pool.available == pool.total
    assert not drafter._seen
