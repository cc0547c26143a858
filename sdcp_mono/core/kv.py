"""What a model's KV cache and the tiers below it need of each other: two ports (design, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from sdcp_mono.core.messages import SessionId


class KvUsage(Struct, frozen=True):
    """Blocks of a model's device memory, and tokens of prefixes so far: looked for, found there, brought back."""

    total: int
    used: int
    cached: int  # of nobody, but still known by their prefix
    asked_tokens: int
    found_tokens: int
    restored_tokens: int


class HoldsKv(Protocol):
    """A model's KV on its device, as the tiers below see it; methods run on the thread that owns the model.

    ``tiers``, once set, are offered every block that may be reused.
    """

    tiers: KvTiers | None

    @property
    def block_tokens(self) -> int:
        """Tokens of one KV block."""

    @property
    def block_bytes(self) -> int: ...
    @property
    def usage(self) -> KvUsage:
        """As of now; may be read from any thread."""

    @property
    def kv_dtype(self) -> str: ...
    @property
    def on_gpu(self) -> bool:
        """Whether blocks are copied to and from a GPU, for which host memory is better pinned."""

    def missing(self, session: SessionId, tokens: Sequence[int], scope: bytes | None) -> Sequence[bytes]:
        """Keys of the full blocks of ``tokens`` that the device lacks, after those it has, which the session takes."""

    def adopt(self, session: SessionId, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Take over the leading ones of the missing blocks; how many were of use."""


class KvLoad(Protocol):
    """KV blocks in host memory, checked, and pinned until ``close`` (which may be called again)."""

    @property
    def blocks(self) -> Sequence[memoryview]: ...
    def close(self) -> None: ...


class KvTiers(Protocol):
    """The tiers below the device, for the KV blocks of one model (design, section 5). Safe from any thread.

    A block is named by its key (32 bytes, the hash chain of ``runners/blocks.py``) within a scope. Nothing here raises:
    what can't be stored, found or read in time is a miss.
    """

    def offer(self, key: bytes, scope: bytes | None, data: memoryview, done: Callable[[], None]) -> bool:
        """Copy a block soon. ``done`` is called once, from any thread, when ``data`` is not read any more.

        False: not taken (it is there already, or too many wait); then ``done`` is not called.
        """

    def predict(self, keys: Sequence[bytes], scope: bytes | None) -> tuple[int, float]:
        """How many of the leading blocks could be loaded, and in how many seconds."""

    async def load(self, keys: Sequence[bytes], scope: bytes | None, seconds: float) -> KvLoad:
        """The leading blocks that are there whole within ``seconds``."""
