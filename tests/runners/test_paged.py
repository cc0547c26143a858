"""PagedModel: whatever is fed in whatever order, the logits are those of a fresh forward pass over the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sdcp_mono.kernels import native
from sdcp_mono.runners.decoder import Decoder, RaggedBatch
from sdcp_mono.runners.fused import FusedDecoder
from sdcp_mono.runners.hf import HfDecoder
from sdcp_mono.runners.paged import Feed, PagedModel
from sdcp_mono.runners.sampling import finite_rows

Reference = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def reference(random_llama: Path) -> Reference:
    """transformers' own logits for every position of one sequence, without any cache."""
    model = AutoModelForCausalLM.from_pretrained(random_llama, dtype=torch.float32)

    @torch.inference_mode()
    def run(tokens: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    return run


@pytest.fixture(scope="module")
def decoder(random_llama: Path) -> HfDecoder:
    return HfDecoder.load(random_llama)


@pytest.fixture(scope="module")
def fused(random_llama: Path) -> FusedDecoder:
    if not native.available():
        pytest.skip("the kernels were not built")
    return FusedDecoder.from_pretrained(random_llama, "float32", 1)


class Watched:
    """A decoder that keeps what it was asked."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.batches: list[RaggedBatch] = []

    def __getattr__(self, name: str):
        return getattr(self._decoder, name)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        self.batches.append(batch)
        return self._decoder.forward(batch)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 64, length).tolist()


def same(got: torch.Tensor | None, want: torch.Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def run(model: PagedModel, feed: Feed, passes: int = 1000) -> torch.Tensor:
    """Feed until the answer is there."""
    for _ in range(passes):
        (got,) = model.feed([feed])
        if got is not None:
            return got.clone()
    raise AssertionError("not fed in time")


def test_rows_are_those_that_were_wanted(decoder: HfDecoder, reference: Reference) -> None:
    model = PagedModel(decoder, b"x", blocks=8, block_size=8)
    prefix, guess = text(20), (7, 8, 9)
    assert model.admit(b"a", 40)
    want = reference([*prefix, *guess])
    same(run(model, Feed(b"a", prefix, 20)), want[19:20])
    same(run(model, Feed(b"a", prefix, 20, guess, 4)), want[19:])
    same(run(model, Feed(b"a", prefix, 20, guess, 1)), want[22:])
    same(run(model, Feed(b"a", prefix, 20, guess, 23)), want)
    assert run(model, Feed(b"a", prefix, 20, guess, 0)).shape == (0, 64)
    same(run(model, Feed(b"a", prefix, 11, (), 2)), want[9:11])


def test_a_drafter_feeds_each_token_once(decoder: HfDecoder) -> None:
    """Token by token after the same prefix: one row per pass."""
    watched = Watched(decoder)
    model = PagedModel(watched, b"x", blocks=8)
    prefix = text(10)
    assert model.admit(b"a", 40)
    model.feed([Feed(b"a", prefix, 10)])
    for n in range(1, 6):
        model.feed([Feed(b"a", prefix, 10, prefix[:n])])
    assert [len(b.token_ids) for b in watched.batches] == [10, 1, 1, 1, 1, 1]
    prefix += [*prefix[:3], 50]  # three accepted, one corrected: only the correction is missing
    model.feed([Feed(b"a", prefix, 14)])
    assert watched.batches[-1].token_ids.tolist() == [50]
    assert model.totals.rolled_back == 2


def test_roll_back_is_a_change_of_length(decoder: HfDecoder, reference: Reference) -> None:
    """Rejected at each position in turn, over block boundaries (block size 4)."""
    model = PagedModel(decoder, b"x", blocks=32, block_size=4)
    prefix = text(6)
    assert model.admit(b"a", 100)
    for step in range(16):
        guess = tuple(text(5, step + 1))
        got = run(model, Feed(b"a", prefix, len(prefix), guess, 6))
        same(got, reference([*prefix, *guess])[len(prefix) - 1 :])
        accepted = step % 6
        prefix += [*guess[:accepted], (guess[min(accepted, 4)] + 1) % 64]
        model.pool.check()
    assert len(prefix) <= 100


@pytest.mark.parametrize(("kind", "blocks", "block_size"), [("decoder", 24, 4), ("fused", 12, 16)])
@pytest.mark.parametrize("seed", range(3))
def test_joining_and_leaving_neighbours(
    request: pytest.FixtureRequest, reference: Reference, kind: str, blocks: int, block_size: int, seed: int
) -> None:
    """A random history: sessions come with shared prefixes, propose, roll back, wait and leave, in a pool that is
    too small for all of them and under a token budget that cuts prompts into chunks. Every logit is checked."""
    rng = random.Random(seed)
    watched = Watched(request.getfixturevalue(kind))
    model = PagedModel(watched, b"x", blocks=blocks, block_size=block_size, token_budget=40)
    stems = [text(30, 100 + i) for i in range(3)]
    live: dict[bytes, list[int]] = {}
    pending: dict[bytes, Feed] = {}
    checked = 0
    for step in range(70):
        name = step.to_bytes(2, "big")
        if rng.random() < 0.4 and len(live) < 6 and model.admit(name, 46):
            live[name] = rng.choice(stems)[: rng.randrange(1, 31)] + text(rng.randrange(0, 4), step)
            live[name] = live[name] or [1]
        for session, prefix in live.items():
            if session not in pending and len(prefix) < 42:
                guess = tuple(rng.randrange(1, 64) for _ in range(rng.randrange(0, 5)))
                pending[session] = Feed(session, prefix, len(prefix), guess, len(guess) + 1)
        work = [feed for feed in pending.values() if rng.random() < 0.8]
        for feed, got in zip(work, model.feed(work), strict=True):
            if got is not None:
                same(got, reference([*feed.prefix, *feed.tokens])[feed.length - 1 :])
                checked += 1
                del pending[feed.session]
                accepted = rng.randrange(0, len(feed.tokens) + 1)
                live[feed.session] += [*feed.tokens[:accepted], rng.randrange(1, 64)]
        for session in [s for s, prefix in live.items() if rng.random() < 0.08 or len(prefix) >= 42]:
            model.release(session)
            pending.pop(session, None)
            del live[session]
        model.pool.check()
    assert checked > 60
    assert model.totals.cached_tokens > 0
    assert max(len(b.token_ids) for b in watched.batches) <= 40
    for session in live:
        model.release(session)
    model.pool.check()
    assert model.pool.available == model.pool.total


def test_chunked_prefill_shares_passes_with_decoding(decoder: HfDecoder, reference: Reference) -> None:
    """Verification rows come first and whole, two prompts take turns with what is left, nobody waits for ever."""
    model = PagedModel(decoder, b"x", blocks=64, token_budget=32)
    short, long, other = text(5, 1), text(100, 2), text(70, 3)
    for name in (b"s", b"l", b"o"):
        assert model.admit(name, 130)
    run(model, Feed(b"s", short, 5))
    answers: dict[bytes, int] = {}
    for step in range(12):
        guess = tuple(text(4, step))
        work = [Feed(b"l", long, 100), Feed(b"o", other, 70), Feed(b"s", short, len(short), guess, 5)]
        got = model.feed(work)
        same(got[2], reference([*short, *guess])[len(short) - 1 :])
        short += [guess[0], 1]
        for feed, logits in zip(work[:2], got[:2], strict=True):
            if logits is not None and feed.session not in answers:
                same(logits, reference(list(feed.prefix))[-1:])
                answers[feed.session] = step
        if len(answers) == 2:
            break
    # 170 prompt rows, at least 32 - 6 a pass minus what block boundaries and last rows cost
    assert answers[b"o"] < answers[b"l"] <= 9


def test_decoding_cannot_starve_prompts(decoder: HfDecoder) -> None:
    """More verification rows than the budget, for ever: the prompt still gets its share of each pass."""
    model = PagedModel(decoder, b"x", blocks=64, token_budget=16)
    busy = [bytes([i]) for i in range(4)]
    prefixes = {name: text(3, i) for i, name in enumerate(busy)}
    for name in (*busy, b"p"):
        assert model.admit(name, 100)
    prompt = text(40, 9)
    served = dict.fromkeys(busy, 0)
    for step in range(30):
        work = [Feed(n, prefixes[n], len(prefixes[n]), (5, 6, 7, 8), 5) for n in busy]
        got = model.feed([*work, Feed(b"p", prompt, 40)])
        for name, logits in zip(busy, got, strict=False):
            if logits is not None:
                served[name] += 1
                prefixes[name].append(1 + step)
        if got[-1] is not None:
            break
    assert got[-1] is not None
    assert max(served.values()) - min(served.values()) <= 2


def test_prefix_reuse(decoder: HfDecoder, reference: Reference) -> None:
    watched = Watched(decoder)
    model = PagedModel(watched, b"x", blocks=16, block_size=4)
    stem = text(12)
    assert model.admit(b"a", 20)
    run(model, Feed(b"a", [*stem, 5, 6], 14))
    model.release(b"a")
    assert model.admit(b"b", 20)
    mine = [*stem, 9]
    same(run(model, Feed(b"b", mine, 13)), reference(mine)[-1:])
    assert model.cached_tokens(b"b") == 12
    assert len(watched.batches[-1].token_ids) == 1
    assert model.admit(b"c", 20)  # while b still holds them
    same(run(model, Feed(b"c", stem, 12, (3,), 2)), reference([*stem, 3])[-2:])
    assert model.cached_tokens(b"c") == 12
    assert model.totals.cached_tokens == 24
    model.pool.check()


def test_a_shared_block_is_never_written_again(decoder: HfDecoder) -> None:
    """A prompt of whole blocks: its last token is run again for its logits, and only for them."""
    model = PagedModel(decoder, b"x", blocks=8, block_size=4)
    stem = text(8)
    assert model.admit(b"a", 12)
    first = run(model, Feed(b"a", stem, 8))
    before = {layer: (k[:-4].clone(), v[:-4].clone()) for layer, (k, v) in decoder._cache.items()}
    assert model.admit(b"b", 12)
    again = run(model, Feed(b"b", stem, 8))
    torch.testing.assert_close(first, again, atol=1e-5, rtol=0)
    run(model, Feed(b"a", stem, 8, (), 3))
    assert model.cached_tokens(b"b") == 8
    for layer, (k, v) in decoder._cache.items():
        assert torch.equal(k[:-4], before[layer][0])
        assert torch.equal(v[:-4], before[layer][1])


def test_proposals_never_enter_the_prefix_index(decoder: HfDecoder) -> None:
    """A block that proposals filled becomes reusable when they are committed, not before."""
    model = PagedModel(decoder, b"x", blocks=16, block_size=4)
    prefix, guess = text(3), tuple(text(9, 1))
    assert model.admit(b"a", 20)
    run(model, Feed(b"a", prefix, 3, guess, 10))
    whole = [*prefix, *guess]
    assert model.admit(b"b", 20)
    run(model, Feed(b"b", whole, 12))
    assert model.cached_tokens(b"b") == 0
    model.release(b"b")
    model.pool.forget()
    prefix += [*guess[:5], 1]  # 9 tokens committed: two blocks
    run(model, Feed(b"a", prefix, 9))
    assert model.admit(b"c", 20)
    run(model, Feed(b"c", whole, 12))
    assert model.cached_tokens(b"c") == 8


def test_scopes_share_nothing(decoder: HfDecoder) -> None:
    model = PagedModel(decoder, b"x", blocks=16, block_size=4)
    stem = text(9)
    for name, scope, cached in ((b"a", b"1" * 16, 0), (b"b", b"2" * 16, 0), (b"c", None, 0), (b"d", b"1" * 16, 8)):
        assert model.admit(name, 10, scope=scope)
        run(model, Feed(name, stem, 9))
        assert model.cached_tokens(name) == cached


def test_the_same_prompt_at_the_same_time_is_computed_once(decoder: HfDecoder, reference: Reference) -> None:
    """n = 4 for one prompt: three wait a pass for the blocks of the first."""
    watched = Watched(decoder)
    model = PagedModel(watched, b"x", blocks=64, token_budget=48)
    prompt = text(100)
    names = [bytes([i]) for i in range(4)]
    for name in names:
        assert model.admit(name, 110)
    left = {name: Feed(name, prompt, 100) for name in names}
    for _ in range(8):
        work = list(left.values())
        for feed, got in zip(work, model.feed(work), strict=True):
            if got is not None:
                same(got, reference(prompt)[-1:])
                del left[feed.session]
    assert not left
    assert sum(len(b.token_ids) for b in watched.batches) <= 100 + 3 * 16
    assert model.totals.cached_tokens >= 3 * 80


def test_eviction_under_pressure_keeps_results_right(decoder: HfDecoder, reference: Reference) -> None:
    """C-38: 30 short requests through 6 blocks; all finish, and no block is lost."""
    model = PagedModel(decoder, b"x", blocks=6, block_size=4)
    stems = [text(8, i) for i in range(2)]
    for i in range(30):
        name = bytes([i])
        prompt = [*stems[i // 2 % 2], *text(i % 5, i)]
        assert model.admit(name, len(prompt) + 2)
        same(run(model, Feed(name, prompt, len(prompt))), reference(prompt)[-1:])
        model.release(name)
        model.pool.check()
    assert model.totals.cached_tokens > 0
    assert model.pool.available == 6


def test_c38_admission_is_the_worst_case(decoder: HfDecoder) -> None:
    model = PagedModel(decoder, b"x", blocks=10)
    assert model.admit(b"a", 100)  # 7 blocks
    assert not model.admit(b"b", 64)  # 4
    assert model.admit(b"b", 48)  # 3
    run(model, Feed(b"a", text(100), 100))  # what was admitted never runs out
    run(model, Feed(b"b", text(48, 1), 48))
    model.release(b"a")
    model.release(b"a")  # as often as one likes
    assert model.admit(b"c", 112)
    with pytest.raises(ValueError, match="11 KV blocks, there are 10"):
        model.admit(b"d", 161)
    with pytest.raises(ValueError, match="context of 512"):
        model.admit(b"d", 513)
    with pytest.raises(ValueError):
        model.admit(b"d", 0)


def test_a_session_can_grow(decoder: HfDecoder, reference: Reference) -> None:
    model = PagedModel(decoder, b"x", blocks=4)
    prefix = text(40)
    assert model.admit(b"a", 10)
    assert model.capacity(b"a") == 16
    run(model, Feed(b"a", prefix, 16))
    with pytest.raises(ValueError, match="40 tokens, admitted for 16"):
        model.feed([Feed(b"a", prefix, 40)])
    assert model.admit(b"a", 40)
    same(run(model, Feed(b"a", prefix, 40)), reference(prefix)[-1:])
    assert model.admit(b"b", 16)
    assert not model.admit(b"a", 64)
    assert model.capacity(b"a") == 48


def test_a_changed_prefix_is_followed_and_others_keep_theirs(decoder: HfDecoder, reference: Reference) -> None:
    model = PagedModel(decoder, b"x", blocks=16, block_size=4)
    old = text(14)
    new = [*old[:6], *text(9, 5)]
    assert model.admit(b"a", 16)
    assert model.admit(b"b", 16)
    run(model, Feed(b"a", old, 14))
    run(model, Feed(b"b", old, 14))
    same(run(model, Feed(b"a", new, 15, (), 4)), reference(new)[-4:])
    same(run(model, Feed(b"b", old, 14, (1,), 2)), reference([*old, 1])[-2:])
    same(run(model, Feed(b"b", old[:10], 10, (2,), 2)), reference([*old[:10], 2])[-2:])
    assert model.admit(b"c", 16)
    same(run(model, Feed(b"c", old, 14)), reference(old)[-1:])
    model.pool.check()


@pytest.fixture
def poisoned(nan20: Path) -> PagedModel:
    return PagedModel(HfDecoder.load(nan20), b"x", blocks=32, block_size=4)


def test_c31_nan_stays_where_it_is(poisoned: PagedModel) -> None:
    """One of four prompts reaches 20; the others' logits and everybody's blocks are unaffected."""
    prompts = [[5, 9, 10, 11], [30, 31, 32, 33, 34], [9, 10, 11, 3, 20, 21, 22, 23, 24], [33, 34]]
    names = [bytes([i]) for i in range(4)]
    for name in names:
        assert poisoned.admit(name, 20)
    work = [Feed(n, p, len(p)) for n, p in zip(names, prompts, strict=True)]
    for _ in range(2):  # a retry is no better
        got = poisoned.feed(work)
        assert poisoned.failed == {names[2]}
        assert [int(row[-1].argmax()) for i, row in enumerate(got) if i != 2 and row is not None] == [3, 35, 35]
    poisoned.pool.check()
    poisoned.release(names[2])
    assert poisoned.admit(b"again", 20)
    poisoned.feed([Feed(b"again", prompts[2], 9)])
    assert poisoned.cached_tokens(b"again") == 0  # its blocks were never put into the prefix cache
    assert poisoned.admit(b"next", 20)
    (row,) = poisoned.feed([Feed(b"next", prompts[0], 4)])
    assert row is not None
    assert not poisoned.failed
    assert poisoned.cached_tokens(b"next") == 4


def test_c31_blocks_that_held_nan_are_fit_for_others(poisoned: PagedModel) -> None:
    for i in range(12):
        assert poisoned.admit(b"bad", 44)
        poisoned.feed([Feed(b"bad", [20] * (30 + i), 30 + i)])
        assert poisoned.failed == {b"bad"}
        poisoned.release(b"bad")
    assert poisoned.admit(b"good", 128)
    prompt = [30 + i % 9 for i in range(120)]
    (row,) = poisoned.feed([Feed(b"good", prompt, 120, (), 120)])
    assert row is not None
    assert torch.isfinite(row).all()


def test_finite_rows() -> None:
    rows = torch.zeros(4, 5)
    rows[1, 4], rows[2, 0], rows[3, 2] = torch.nan, torch.inf, -torch.inf
    assert finite_rows(rows).tolist() == [True, False, False, False]


def test_what_breaks_the_contract_is_refused_before_anything_changes(decoder: HfDecoder) -> None:
    model = PagedModel(decoder, b"x", blocks=16, token_budget=16)
    prefix = text(10)
    assert model.admit(b"a", 40)
    run(model, Feed(b"a", prefix, 10))
    bad = [
        [Feed(b"a", prefix, 10), Feed(b"a", prefix, 9)],
        [Feed(b"a", prefix, 11)],
        [Feed(b"a", prefix, 0)],
        [Feed(b"a", prefix, 10, (), 11)],
        [Feed(b"a", prefix, 10, (1,) * 20, 15)],
        [Feed(b"unknown", prefix, 10)],
    ]
    before = model.totals.rows
    for work in bad:
        with pytest.raises(ValueError):
            model.feed(work)
    assert model.totals.rows == before
    for token in (64, -1):
        with pytest.raises(AssertionError, match="token id"):
            model.feed([Feed(b"a", prefix, 10, (token,), 2)])
    same_again = run(model, Feed(b"a", prefix, 10))
    assert torch.isfinite(same_again).all()
    with pytest.raises(ValueError, match="token_budget"):
        PagedModel(decoder, b"x", blocks=16, token_budget=7)
