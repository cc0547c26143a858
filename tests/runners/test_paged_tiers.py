"""PagedModel and the tiers below it: what is offered, what comes back, and that logits don't know the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sdcp_mono.core.kv import KvLoad
from sdcp_mono.kernels import native
from sdcp_mono.runners.decoder import Decoder
from sdcp_mono.runners.fused import FusedDecoder
from sdcp_mono.runners.hf import HfDecoder
from sdcp_mono.runners.paged import Feed, PagedModel

SIZE = 16
A, B, C = b"A" * 16, b"B" * 16, b"C" * 16
PROMPT = [(7 * i + 3) % 60 for i in range(100)]


class Shelf:
    """The port's plainest implementation: copies are made when ``copy`` is called. ``full``: takes nothing."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes | None, bytes], bytes] = {}
        self.waiting: list[tuple[tuple[bytes | None, bytes], memoryview, Callable[[], None]]] = []
        self.full = False

    def offer(self, key: bytes, scope: bytes | None, data: memoryview, done: Callable[[], None]) -> bool:
        if self.full:
            return False
        self.waiting.append(((scope, key), data, done))
        return True

    def copy(self) -> None:
        for name, data, done in self.waiting:
            assert name not in self.blocks, "offered twice"
            self.blocks[name] = bytes(data)
            done()
        self.waiting.clear()

    def predict(self, keys: Sequence[bytes], scope: bytes | None) -> tuple[int, float]:
        raise NotImplementedError

    async def load(self, keys: Sequence[bytes], scope: bytes | None, seconds: float) -> KvLoad:
        raise NotImplementedError


@pytest.fixture(params=["hf", "fused"])
def decoder(request: pytest.FixtureRequest, random_llama: Path) -> Decoder:
    if request.param == "hf":
        return HfDecoder.load(random_llama)
    if not native.available():
        pytest.skip("the kernels were not built")
    return FusedDecoder.from_pretrained(random_llama, "float32", 1)


def paged(decoder: Decoder, shelf: Shelf, blocks: int = 24) -> PagedModel:
    model = PagedModel(decoder, b"id", blocks=blocks, block_size=SIZE, token_budget=64)
    model.tiers = shelf
    return model


def last_logits(model: PagedModel, session: bytes, prefix: list[int], length: int | None = None) -> torch.Tensor:
    feed = Feed(session, prefix, length or len(prefix))
    for _ in range(20):
        (logits,) = model.feed([feed])
        if logits is not None:
            return logits.clone()
    raise AssertionError("never fed")


def stored(shelf: Shelf, keys: Sequence[bytes], scope: bytes | None = None) -> list[memoryview]:
    return [memoryview(shelf.blocks[scope, key]) for key in keys]


def test_each_full_committed_block_is_offered_once(decoder: Decoder) -> None:
    shelf = Shelf()
    model = paged(decoder, shelf)
    assert model.admit(A, 128, scope=b"s" * 16)
    last_logits(model, A, PROMPT)
    assert len(shelf.waiting) == 100 // SIZE  # the last 4 tokens fill no block
    assert {scope for (scope, _), _, _ in shelf.waiting} == {b"s" * 16}
    assert all(len(data) == decoder.block_bytes for _, data, _ in shelf.waiting)
    shelf.copy()
    model.release(A)
    model.admit(B, 128, scope=b"s" * 16)
    last_logits(model, B, PROMPT)  # found on the device, so nothing is new
    assert not shelf.waiting
    model.pool.check()


def test_guesses_are_never_offered(decoder: Decoder) -> None:
    shelf = Shelf()
    model = paged(decoder, shelf)
    model.admit(A, 128)
    model.feed([Feed(A, PROMPT, 30, tuple(PROMPT[30:50]), 21)])
    assert len(shelf.waiting) == 1  # of 50 tokens only 30 are committed
    model.feed([Feed(A, PROMPT, 48)])
    assert len(shelf.waiting) == 3


def test_a_block_stays_as_it_is_while_it_is_copied(decoder: Decoder) -> None:
    """C-39: released and under pressure, the blocks that are being read are neither freed nor evicted."""
    shelf = Shelf()
    model = paged(decoder, shelf, blocks=8)
    model.admit(A, 128)
    last_logits(model, A, PROMPT)
    before = [bytes(data) for _, data, _ in shelf.waiting]
    model.release(A)
    assert model.pool.used == 6
    assert not model.admit(B, 128)
    assert model.admit(B, 2 * SIZE)
    last_logits(model, B, [5] * 32)
    assert [bytes(data) for _, data, _ in shelf.waiting][: len(before)] == before
    shelf.copy()
    assert model.free_tokens >= 6 * SIZE
    assert model.admit(C, 6 * SIZE)
    model.release(B)
    model.release(C)
    model.pool.check()
    assert model.pool.used == 0


def test_what_nobody_takes_is_free_at_once(decoder: Decoder) -> None:
    shelf = Shelf()
    shelf.full = True
    model = paged(decoder, shelf)
    model.admit(A, 128)
    last_logits(model, A, PROMPT)
    model.release(A)
    assert model.pool.used == 0
    model.pool.check()


def test_adopted_blocks_give_the_same_logits_to_the_bit(decoder: Decoder) -> None:
    """Cold, from the device, from below: the same."""
    shelf = Shelf()
    model = paged(decoder, shelf)
    model.admit(A, 128)
    cold = last_logits(model, A, PROMPT)
    shelf.copy()
    model.release(A)
    model.pool.forget()  # the device knows nothing any more

    assert model.admit(B, 128)
    keys = model.missing(B, PROMPT, None)
    assert len(keys) == 6
    assert model.adopt(B, keys, stored(shelf, keys)) == 6
    rows = model.totals.rows
    assert torch.equal(last_logits(model, B, PROMPT), cold)
    assert model.totals.rows - rows == 4
    assert model.totals.restored_tokens == model.cached_tokens(B) == 96
    assert not shelf.waiting  # what came from below is not sent there again
    model.release(B)
    model.admit(C, 128)
    assert model.missing(C, PROMPT, None) == []
    assert torch.equal(last_logits(model, C, PROMPT), cold)
    model.pool.check()


def test_the_device_comes_first_and_only_the_rest_is_missing(decoder: Decoder) -> None:
    shelf = Shelf()
    model = paged(decoder, shelf)
    model.admit(A, 128)
    last_logits(model, A, PROMPT)
    shelf.copy()
    model.admit(B, 128)
    other = [*PROMPT[:40], *[9] * 60]
    keys = model.missing(B, other, None)
    assert len(keys) == 4  # two of six blocks are shared with A
    assert model.cached_tokens(B) == 32
    assert not set(keys) & {key for _, key in shelf.blocks}


def test_a_part_is_of_use_and_the_rest_is_computed(decoder: Decoder) -> None:
    shelf = Shelf()
    model = paged(decoder, shelf)
    model.admit(A, 128)
    cold = last_logits(model, A, PROMPT)
    shelf.copy()
    model.release(A)
    model.pool.forget()
    model.admit(B, 128)
    keys = model.missing(B, PROMPT, None)
    assert model.adopt(B, keys, stored(shelf, keys[:3])) == 3
    assert torch.equal(last_logits(model, B, PROMPT), cold)
    assert model.cached_tokens(B) == 48


def test_blocks_of_another_prefix_or_a_session_that_went_on_are_left_alone(decoder: Decoder) -> None:
    shelf = Shelf()
    model = paged(decoder, shelf)
    model.admit(A, 128)
    cold = last_logits(model, A, PROMPT)
    shelf.copy()
    keys = [key for _, key in shelf.blocks]
    blocks = stored(shelf, keys)
    assert model.adopt(A, keys, blocks) == 0  # has them
    assert model.adopt(C, keys, blocks) == 0  # unknown, or gone meanwhile
    model.admit(B, 128)
    model.missing(B, [1] * 100, None)
    assert model.adopt(B, keys, blocks) == 0  # holds another prefix
    torch.testing.assert_close(last_logits(model, A, PROMPT), cold)  # one row alone: transformers rounds differently
    model.pool.check()


def test_keys_are_of_one_layout_and_one_scope(random_llama: Path) -> None:
    """KV of another dtype, other arithmetic or another tenant is never found."""
    if not native.available():
        pytest.skip("the kernels were not built")
    decoders: list[Decoder] = [
        HfDecoder.load(random_llama),
        HfDecoder.load(random_llama, dtype=torch.bfloat16),
        FusedDecoder.from_pretrained(random_llama, "float32", 1),
        FusedDecoder.from_pretrained(random_llama, "bfloat16", 1),
    ]
    assert len({decoder.kv_layout for decoder in decoders}) == 4
    found = set()
    for decoder in decoders:
        model = paged(decoder, Shelf())
        for session, scope in ((A, None), (B, b"x" * 16), (C, b"y" * 16)):
            model.admit(session, 32, scope=scope)
            found.update(model.missing(session, PROMPT[:16], scope))
    assert len(found) == 12


def test_a_block_of_the_wrong_size_is_refused(decoder: Decoder) -> None:
    paged(decoder, Shelf())
    with pytest.raises(ValueError, match="a block has"):
        decoder.write_block(0, memoryview(bytes(8)))
