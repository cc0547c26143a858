"""What every decoder of a paged, ragged batch looks like: numbers in, logits out.

A *row* is one token to run through the model. A pass carries the rows of many sequences, concatenated: verification
rows, single decode rows and chunks of prompts alike. Keys and values live in blocks that the decoder owns; which block
belongs to whom is decided outside (``blocks.py``, ``paged.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One pass over T rows of S sequences; R of the rows want logits. All arrays are int32.

    A row sees the first ``positions[t] + 1`` tokens of its sequence's KV (less with a sliding window). ``context``
    counts them after this pass, the new rows included. Blocks hold ``block_size`` tokens, the one given to
    ``Decoder.allocate``.
    """

    token_ids: Ints  # (T,) rows of all sequences, concatenated
    positions: Ints  # (T,)
    query_starts: Ints  # (S+1,) rows of sequence s: query_starts[s] .. query_starts[s+1]
    context: Ints  # (S,) KV length of each sequence after this pass (its new rows included)
    block_tables: Ints  # (S, B) padded with -1
    slots: Ints  # (T,) block * block_size + offset where each row's K/V go
    logit_rows: Ints  # (R,) rows whose logits are wanted, ascending


class Decoder(Protocol):
    """A model with its KV blocks. Owned by one thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """The longest sequence in tokens."""

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def kv_layout(self) -> str:
        """How a block's bytes come about and lie: two decoders of one model may swap blocks if these are equal.

        It names whatever changes a bit of the KV: dtype, order, and the arithmetic that computes it.
        """

    @property
    def kv_dtype(self) -> torch.dtype: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""

    def allocate(self, blocks: int, block_size: int) -> None:
        """Make room for ``blocks`` blocks of ``block_size`` tokens; their content is undefined."""

    def read_block(self, index: int) -> memoryview:
        """The bytes of a block, (block_bytes,): in place where memory allows it, so valid until the block changes."""

    def write_block(self, index: int, data: memoryview) -> None:
        """Replace a block by what ``read_block`` gave for an equal ``kv_layout`` and block size."""

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Run one pass; the logits of ``logit_rows``, (R, V) float32, valid until the next call."""
