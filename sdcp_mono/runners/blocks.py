"""Which KV block belongs to whom: reference counts, promises, and reuse by prefix.

Every block is in exactly one of three states: *free* (content meaningless), *used* (referenced by at least one
sequence) or *cached* (unreferenced, but its content is still known by its prefix and can be used again until it is
evicted, least recently used first). Always: free + used + cached == total.

Blocks are promised before they are taken: a sequence reserves its worst case, and a promise is only given while a free
or cached block stands behind it. A sequence that was admitted therefore never waits for a block, so that sequences
can't wait for one another (C-38).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

BLOCK_SIZE = 16
"""Tokens in a block unless said otherwise: small enough that the unused tail of a session is cheap."""

ROOT_DOMAIN = b"sdcp-mono kv 1\n"


def root_key(identity: bytes, scope: bytes | None, block_size: int) -> bytes:
    """The key that stands before the first block, 32 bytes: nothing is shared across models, scopes or block sizes.

    ``identity`` must differ between any two models whose KV differs: weights, dtype and weight format.
    """
    h = hashlib.sha256(ROOT_DOMAIN)
    for part in (identity, block_size.to_bytes(4, "big"), b"" if scope is None else b"scope" + scope):
        h.update(len(part).to_bytes(4, "big") + part)
    return h.digest()


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that holds ``tokens`` after everything that ``previous`` stands for (SHA-256, 32 bytes)."""
    return hashlib.sha256(previous + np.asarray(tokens, dtype="<u4").tobytes()).digest()


class BlockPool:
    """``total`` blocks, numbered from 0. Every method is O(1) or O(blocks named); nothing here blocks or waits."""

    __slots__ = ("_block_of", "_cached", "_free", "_key_of", "_promised", "_refs", "total")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"blocks: need at least 1, got {total}")
        self.total = total
        self._free: deque[int] = deque(range(total))
        self._refs = [0] * total
        self._promised = 0
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced blocks with a key, oldest first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that can still be promised."""
        return self.free + self.cached - self._promised

    def reserve(self, blocks: int) -> bool:
        """Promise ``blocks`` blocks; False if there are not that many now. Raises ``ValueError`` if there never are."""
        if blocks < 0:
            raise ValueError(f"blocks: can't reserve {blocks}")
        if blocks > self.total:
            raise ValueError(f"needs {blocks} KV blocks, there are {self.total}")
        if blocks > self.available:
            return False
        self._promised += blocks
        return True

    def unreserve(self, blocks: int) -> None:
        """Take back promises that were not used."""
        if not 0 <= blocks <= self._promised:
            raise ValueError(f"can't take back {blocks} of {self._promised} promised blocks")
        self._promised -= blocks

    def take(self) -> int:
        """A block for new content, against one promise. May evict the least recently used cached block."""
        self._keep_promise()
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._refs[block] = 1
        return block

    def share(self, key: bytes) -> int | None:
        """One more reference, against one promise, to the block whose content ``key`` names; None if there is none."""
        block = self._block_of.get(key)
        if block is None:
            return None
        self._keep_promise()
        self._cached.pop(block, None)
        self._refs[block] += 1
        return block

    def publish(self, block: int, key: bytes) -> bool:
        """Make a referenced block's content reusable as ``key``; it must never be written again.

        False where another block has the key already: this one stays private.
        """
        if not self._refs[block]:
            raise ValueError(f"block {block} is not in use")
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def pin(self, block: int) -> None:
        """One more reference to a block that is in use; ``drop`` gives it up (a copy reads the block meanwhile)."""
        if not self._refs[block]:
            raise ValueError(f"block {block} is not in use")
        self._refs[block] += 1

    def published(self, block: int) -> bool:
        return block in self._key_of

    def own(self, block: int) -> int:
        """What to write into instead of a published block that its only or one of its holders wants to change.

        The block itself, taken out of the index, where nobody else holds it; else another one (of undefined content).
        Raises ``ValueError`` where there is none: sharing made room for others, and no promise covers this case.
        """
        if self._refs[block] == 1:
            del self._block_of[self._key_of.pop(block)]
            return block
        if not self.reserve(1):
            raise ValueError(f"block {block} is shared and there is no other")
        self.drop([block])
        return self.take()

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block; raises ``ValueError`` (and changes nothing) on a double free."""
        if len(set(blocks)) != len(blocks) or not all(0 <= b < self.total and self._refs[b] for b in blocks):
            raise ValueError(f"double free among blocks {list(blocks)}")
        for block in reversed(blocks):  # the end of a prefix is worth less than its start, so it goes first
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self) -> None:
        """Empty the prefix index: cached blocks become free, referenced ones private."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._block_of.clear()

    def check(self) -> None:
        """Assert what always holds (C-39)."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(self._refs) if refs}
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert min(self._refs) >= 0, "negative reference count"
        assert not any((free & cached, free & used, cached & used)), "a block has two states"
        assert len(free) + len(used) + len(cached) == self.total, "a block was lost"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "index and keys differ"
        assert cached <= set(self._key_of), "a cached block has no key"
        assert not free & set(self._key_of), "a free block has a key"
        assert 0 <= self._promised <= self.free + self.cached, "a promise has no block behind it"

    def _keep_promise(self) -> None:
        if self._promised < 1:
            raise ValueError("a block was taken that nobody reserved")
        self._promised -= 1
