"""Draft models over the tiny checkpoints of ``tests/conftest.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import DraftRequest
from sdcp_mono.drafters.paged_draft import PagedDraft
from sdcp_mono.runners.hf import HfDecoder
from sdcp_mono.runners.paged import PagedModel

IDENTITY = bytes(range(32))

Request = Callable[..., DraftRequest]
MakeDraft = Callable[..., PagedDraft]


@pytest.fixture(scope="session")
def request_of() -> Request:
    """``request_of(prefix, m, ...)``: a request of session 1 unless said otherwise."""

    def make(
        prefix: Sequence[int],
        m: int,
        *,
        length: int | None = None,
        session: int = 1,
        rule: Rule = Rule.GREEDY,
        sampling: Sampling | None = None,
        round: int = 1,
    ) -> DraftRequest:
        return DraftRequest(
            session=session.to_bytes(16, "big"),
            prefix=prefix,
            length=len(prefix) if length is None else length,
            m=m,
            rule=rule,
            sampling=sampling or Sampling(),
            round=round,
        )

    return make


@pytest.fixture(scope="session")
def make_draft() -> MakeDraft:
    """``make_draft(folder, ...)``: a float32 drafter of its own over a checkpoint."""

    def make(folder: Path, *, blocks: int = 64, token_budget: int = 64, block_size: int = 16) -> PagedDraft:
        decoder = HfDecoder.load(folder, dtype=torch.float32)
        model = PagedModel(decoder, IDENTITY, blocks=blocks, block_size=block_size, token_budget=token_budget)
        return PagedDraft(model, "draft", IDENTITY)

    return make
