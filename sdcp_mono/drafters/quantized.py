"""The target's own weights in int4 as its drafter: no training, any model, right in about 97 % of greedy positions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sdcp_mono.core.messages import Hash32
from sdcp_mono.drafters.paged_draft import PagedDraft
from sdcp_mono.kernels.native import Format
from sdcp_mono.runners.borrowed import BorrowedModel
from sdcp_mono.runners.fused import FusedDecoder
from sdcp_mono.runners.loading import Engine, load_decoder
from sdcp_mono.runners.paged import PagedModel

NAME: Final = "quantized"
FORMAT: Final[Format] = "int4"


def quantized_identity(target: Hash32) -> Hash32:
    """SHA-256 over a label, the weight format and the target's digest, from which the weights follow."""
    return hashlib.sha256(b"sdcp-mono quantized 1\n" + FORMAT.encode() + b"\n" + target).digest()


def can_share(target: PagedModel, dtype: str) -> bool:
    """Whether an int4 copy can draft over the target's own KV: both fused, and the KV in the dtype that int4 uses."""
    return isinstance(target.decoder, FusedDecoder) and dtype == "bfloat16"


def load_beside(
    target: PagedModel,
    folder: Path,
    identity: Hash32,
    *,
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PagedDraft:
    """The drafter over the KV of a target in the same thread; ``identity`` is the target's digest.

    Raises ``ValueError`` where the two can't share KV (``can_share``).
    """
    decoder = load_decoder(folder, FORMAT, "fused", threads, progress)
    assert isinstance(decoder, FusedDecoder)
    return PagedDraft(BorrowedModel(target, decoder), NAME, quantized_identity(identity))


def load_quantized(
    folder: Path,
    target: Hash32,
    *,
    kv_bytes: int,
    token_budget: int,
    engine: Engine = "auto",
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PagedDraft:
    """The drafter for the model in ``folder``, whose digest is ``target``. Raises as ``load_decoder`` does."""
    decoder = load_decoder(folder, FORMAT, engine, threads, progress)
    return PagedDraft.over(decoder, NAME, quantized_identity(target), kv_bytes=kv_bytes, token_budget=token_budget)
