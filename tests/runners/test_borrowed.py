"""Drafting over the target's KV must not change a bit of what the target computes, nor draft from what is not true."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcp_mono.kernels import native
from sdcp_mono.runners.borrowed import MAX_BEHIND, BorrowedModel
from sdcp_mono.runners.fused import FusedDecoder
from sdcp_mono.runners.paged import Feed, PagedModel

pytestmark = pytest.mark.skipif(not native.available(), reason="the kernels were not built")

A, B = b"a" * 16, b"b" * 16


@pytest.fixture(scope="module")
def decoder(random_llama: Path) -> Any:
    return lambda weights: FusedDecoder.from_pretrained(random_llama, weights, threads=2)


def paged(decoder: Any, **changes: Any) -> PagedModel:
    return PagedModel(decoder("bfloat16"), b"id", **{"blocks": 32, "token_budget": 128, **changes})


def only(model: Any, feed: Feed) -> torch.Tensor:
    (logits,) = model.feed([feed])
    assert logits is not None
    return torch.as_tensor(logits).clone()


def test_the_target_computes_the_same_bits_with_and_without_a_drafter_on_its_kv(decoder: Any) -> None:
    """Two hundred rounds of drafting, verifying, accepting some and rejecting the rest, two sessions at once."""
    shared, alone = paged(decoder), paged(decoder)
    borrowed = BorrowedModel(shared, decoder("int4"))
    rng = random.Random(7)
    prefixes = {A: [rng.randrange(64) for _ in range(21)], B: [rng.randrange(64) for _ in range(50)]}
    for model in (shared, alone):
        assert model.admit(A, 240)
        assert model.admit(B, 240)
        for session, prefix in prefixes.items():
            only(model, Feed(session, prefix, len(prefix)))
    for _ in range(200):
        session = rng.choice([A, B])
        prefix = prefixes[session]
        if len(prefix) > 200:
            break
        drafted: list[int] = []
        for _ in range(rng.randrange(5)):
            drafted.append(int(only(borrowed, Feed(session, prefix, len(prefix), tuple(drafted))).argmax()))
        feed = Feed(session, prefix, len(prefix), tuple(drafted), len(drafted) + 1)
        verified = only(shared, feed)
        assert torch.equal(verified, only(alone, feed))
        prefix += drafted[: rng.randrange(len(drafted) + 1)]
        prefix.append(rng.randrange(64))
    shared.pool.check()


def test_a_draft_depends_on_committed_tokens_only(decoder: Any) -> None:
    """After rejected drafts it equals that of a model that never drafted them."""
    model = paged(decoder)
    borrowed, prefix = BorrowedModel(model, decoder("int4")), [3, 5, 7, 11, 13]
    model.admit(A, 64)
    only(model, Feed(A, prefix, 5))
    only(borrowed, Feed(A, prefix, 5, (1, 2, 3)))
    only(model, Feed(A, prefix, 5, (1, 2, 3), 4))
    prefix.append(9)
    after = only(borrowed, Feed(A, prefix, 6))
    fresh_model = paged(decoder)
    fresh_model.admit(A, 64)
    only(fresh_model, Feed(A, prefix, 5))
    fresh = BorrowedModel(fresh_model, decoder("int4"))
    assert torch.equal(after, only(fresh, Feed(A, prefix, 6)))


def test_a_step_feeds_one_row(decoder: Any) -> None:
    model = paged(decoder)
    borrowed, prefix = BorrowedModel(model, decoder("int4")), list(range(20))
    model.admit(A, 64)
    only(model, Feed(A, prefix, 20))
    for i in range(4):
        before = borrowed.totals.rows
        only(borrowed, Feed(A, prefix, 20, tuple(range(i))))
        assert borrowed.totals.rows - before == 1


def test_shared_blocks_are_never_written(decoder: Any) -> None:
    """Two sessions with the same prompt share its blocks; drafting for one leaves the other's logits as they were."""
    model = paged(decoder)
    borrowed = BorrowedModel(model, decoder("int4"))
    prefix = list(range(32))
    model.admit(A, 64), model.admit(B, 64)
    only(model, Feed(A, prefix, 32))
    mine = list(prefix)
    before = only(model, Feed(B, mine, 32))
    assert model.cached_tokens(B) == 32
    only(borrowed, Feed(B, mine, 32, (1, 2)))
    assert torch.equal(only(model, Feed(B, mine, 32)), before)
    assert torch.equal(only(model, Feed(A, prefix, 32)), before)


def test_the_target_reads_the_prompt_before_anything_is_drafted(decoder: Any) -> None:
    """A session that was resumed or preempted: its rounds are cut where they would have been (6.9)."""
    model = paged(decoder)
    borrowed, prefix = BorrowedModel(model, decoder("int4")), [1] * (MAX_BEHIND + 8)
    assert not borrowed.admit(A, 16)
    model.admit(A, 128)
    answers = [borrowed.feed([Feed(A, prefix, len(prefix))]) for _ in range(3)]
    assert [answer[0] is None for answer in answers] == [True, False, False]
    assert borrowed.failed == frozenset()
    assert model.agreed(Feed(A, prefix, len(prefix))) == len(prefix)
    assert torch.equal(answers[1][0], answers[2][0])


def test_other_kv_is_refused(decoder: Any) -> None:
    with pytest.raises(ValueError, match="share_kv"):
        BorrowedModel(PagedModel(decoder("float32"), b"id", blocks=4, token_budget=80), decoder("int4"))
