"""The block pool: states, promises, reuse by prefix, eviction."""

from __future__ import annotations

import hashlib
import random

import pytest

from sdcp_mono.runners.blocks import BlockPool, next_key, root_key


def filled(total: int, keys: list[bytes]) -> BlockPool:
    """A pool whose first blocks were published under ``keys`` and given back, in order."""
    pool = BlockPool(total)
    assert pool.reserve(len(keys))
    for key in keys:
        block = pool.take()
        pool.publish(block, key)
        pool.drop([block])
    pool.check()
    return pool


def test_key_is_a_full_hash_chain() -> None:
    """SHA-256 over the previous key and the tokens as little-endian 32-bit integers, seeded with everything else."""
    root = root_key(b"model", None, 2)
    seed = b"sdcp-mono kv 1\n" + b"\0\0\0\5model" + b"\0\0\0\4\0\0\0\2" + b"\0\0\0\0"
    assert root == hashlib.sha256(seed).digest()
    first = next_key(root, [1, 258])
    assert first == hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 1, 0, 0])).digest()
    assert next_key(first, [1, 258]) != first
    roots = {root, root_key(b"other", None, 2), root_key(b"model", None, 4), root_key(b"model", bytes(16), 2)}
    assert len(roots) == 4
    assert root_key(b"model", b"", 2) != root


def test_c38_promises_never_exceed_what_can_be_taken() -> None:
    pool = BlockPool(4)
    assert pool.reserve(3)
    assert not pool.reserve(2)
    assert pool.reserve(1)
    blocks = [pool.take() for _ in range(4)]
    assert sorted(blocks) == [0, 1, 2, 3]
    assert not pool.reserve(1)
    pool.drop(blocks)
    assert pool.available == 4


def test_what_can_never_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs 5 KV blocks, there are 4"):
        BlockPool(4).reserve(5)
    with pytest.raises(ValueError):
        BlockPool(4).reserve(-1)
    with pytest.raises(ValueError):
        BlockPool(0)


def test_nothing_is_taken_without_a_promise() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError):
        pool.take()
    with pytest.raises(ValueError):
        pool.unreserve(1)
    pool.check()


def test_c39_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.reserve(2)
    a, b = pool.take(), pool.take()
    for wrong in ([a, a], [a, 3], [9], [-1]):
        with pytest.raises(ValueError, match="double free"):
            pool.drop(wrong)
        assert pool.used == 2
    pool.drop([a])
    with pytest.raises(ValueError, match="double free"):
        pool.drop([b, a])
    assert pool.used == 1
    pool.check()


def test_a_shared_block_lives_until_the_last_reference_goes() -> None:
    pool = filled(3, [b"k"])
    assert pool.cached == 1
    assert pool.reserve(2)
    first, second = pool.share(b"k"), pool.share(b"k")
    assert first == second is not None
    assert (pool.used, pool.cached) == (1, 0)
    pool.drop([first])
    assert pool.used == 1
    pool.drop([first])
    assert (pool.used, pool.cached) == (0, 1)
    assert pool.share(b"other") is None
    pool.check()


def test_least_recently_used_block_is_evicted_first() -> None:
    pool = filled(3, [b"a", b"b", b"c"])
    assert pool.reserve(3)
    a = pool.share(b"a")
    assert a is not None
    pool.drop([a])  # now b is the oldest
    assert pool.reserve(1)
    pool.take()
    assert pool.share(b"b") is None
    assert pool.share(b"c") is not None
    pool.check()


def test_free_blocks_are_used_before_anything_is_evicted() -> None:
    pool = filled(3, [b"a"])
    assert pool.reserve(2)
    pool.take()
    pool.take()
    assert pool.cached == 1


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    pool = BlockPool(2)
    assert pool.reserve(2)
    blocks = [pool.take(), pool.take()]
    for block, key in zip(blocks, (b"start", b"end"), strict=True):
        pool.publish(block, key)
    pool.drop(blocks)
    assert pool.reserve(2)
    pool.take()
    assert pool.share(b"start") == blocks[0]


def test_a_second_block_with_the_same_content_stays_private() -> None:
    pool = filled(3, [b"k"])
    assert pool.reserve(1)
    block = pool.take()
    pool.publish(block, b"k")
    assert not pool.published(block)
    pool.drop([block])
    assert (pool.free, pool.cached) == (2, 1)
    with pytest.raises(ValueError):
        pool.publish(block, b"z")


def test_own_takes_a_published_block_out_of_circulation() -> None:
    pool = filled(2, [b"k"])
    assert pool.reserve(2)
    block = pool.share(b"k")
    assert block is not None
    assert pool.share(b"k") == block
    other = pool.own(block)
    assert other != block
    assert pool.published(block)
    assert not pool.published(other)
    assert pool.own(block) == block  # shared with nobody else now
    assert pool.share(b"k") is None
    pool.check()


def test_own_without_another_block_is_an_error() -> None:
    pool = filled(1, [b"k"])
    assert pool.reserve(1)
    block = pool.share(b"k")
    assert block is not None
    pool._refs[block] += 1  # a second holder
    with pytest.raises(ValueError, match="no other"):
        pool.own(block)


def test_c37_forgetting_the_index_frees_cached_blocks_only() -> None:
    pool = filled(3, [b"a", b"b"])
    assert pool.reserve(1)
    held = pool.share(b"a")
    pool.forget()
    assert (pool.free, pool.used, pool.cached) == (2, 1, 0)
    assert held is not None
    pool.drop([held])
    assert pool.free == 3
    pool.check()


@pytest.mark.parametrize("seed", range(4))
def test_c39_ten_thousand_random_operations(seed: int) -> None:
    """free + used + cached == total after each; a block that somebody holds is never handed out."""
    rng = random.Random(seed)
    pool = BlockPool(16)
    held: list[int] = []  # one entry per reference
    promised = 0
    keys: dict[bytes, int] = {}
    for _ in range(10_000):
        match rng.randrange(8):
            case 0:
                want = rng.randrange(1, 6)
                assert pool.reserve(want) == (want <= pool.free + pool.cached - promised)
                promised = pool._promised
            case 1 | 2 if promised:
                block = pool.take()
                assert block not in held
                keys = {key: b for key, b in keys.items() if b != block}
                held.append(block)
                promised -= 1
            case 3 if promised:
                key = rng.choice([*keys, b"missing"])
                shared = pool.share(key)
                assert shared == keys.get(key)
                if shared is not None:
                    held.append(shared)
                    promised -= 1
            case 4 if held:
                block, key = rng.choice(held), b"%d" % rng.randrange(24)
                if key not in keys and not pool.published(block):
                    keys[key] = block
                pool.publish(block, key)
            case 5 | 6 if held:
                block = held.pop(rng.randrange(len(held)))
                pool.drop([block])
                if block not in held:
                    with pytest.raises(ValueError):
                        pool.drop([block])
            case 7 if promised:
                pool.unreserve(1)
                promised -= 1
            case _:
                pass
        pool.check()
        assert pool.used == len(set(held))
