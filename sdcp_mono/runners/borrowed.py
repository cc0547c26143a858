"""A second set of weights over the KV of a first: drafting needs no prefill and no catching up.

The draft pass reads the target's KV of the committed prefix and writes its own KV of what it drafts into the slots
right after it. Those slots belong to the same session and hold nothing yet: the target writes every one of them when it
verifies, before anything of its own reads it. So drafting can't change what the target computes, and both models must
run on one thread. Where the target has yet to read much of the prefix, it does so first: its verification needs that
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from sdcp_mono.runners.decoder import Decoder, RaggedBatch
from sdcp_mono.runners.paged import Feed, PagedModel, Totals
from sdcp_mono.runners.sampling import finite_rows

MAX_BEHIND: Final = 64  # rows a draft may have to feed before it; more are the target's to read


class SharesKv(Decoder, Protocol):
    """A decoder that can run over another one's KV."""

    def share_kv(self, other: Decoder) -> None:
        """Raises ``ValueError`` if the two lay their KV out differently."""


@dataclass(slots=True)
class _Ahead:
    """What this model has written for a session: ``tokens`` from position ``start`` on."""

    start: int
    tokens: list[int]


class BorrowedModel:
    """What ``PagedModel`` is to a drafter, over ``lender``'s sessions, blocks and KV."""

    def __init__(self, lender: PagedModel, decoder: SharesKv) -> None:
        decoder.share_kv(lender.decoder)
        self.decoder: Decoder = decoder
        self.totals = Totals()
        self.failed: frozenset[bytes] = frozenset()
        self._lender = lender
        self._ahead: dict[bytes, _Ahead] = {}

    def capacity(self, session: bytes) -> int:
        return self._lender.capacity(session)

    @property
    def block_size(self) -> int:
        return self._lender.block_size

    def admit(self, session: bytes, tokens: int, *, scope: bytes | None = None) -> bool:
        """The lender's room is all there is."""
        return tokens <= self._lender.capacity(session)

    def release(self, session: bytes) -> None:
        self._ahead.pop(session, None)

    def feed(self, work: Sequence[Feed]) -> list[torch.Tensor | None]:
        """As ``PagedModel.feed``: None while the lender has yet to read the prefix."""
        results: list[torch.Tensor | None] = [None] * len(work)
        failed: set[bytes] = set()
        jobs, unread = [], []
        for index, feed in enumerate(work):
            valid = self._lender.agreed(feed)
            start = min(valid + self._agreed_ahead(feed, valid), feed.total - feed.want)
            if feed.total - start > MAX_BEHIND:
                unread.append(Feed(feed.session, feed.prefix, feed.length, want=0))
            else:
                jobs.append((index, feed, valid, start))
        if unread:
            self._lender.feed(unread)
            failed |= self._lender.failed
        if jobs:
            logits = self.decoder.forward(self._batch([(feed, valid, start) for _, feed, valid, start in jobs]))
            finite, row = finite_rows(logits), 0
            for index, feed, valid, _ in jobs:
                rows = slice(row, row + feed.want)
                row = rows.stop
                results[index] = logits[rows]
                if finite[rows].all():
                    self._ahead[feed.session] = _Ahead(valid, feed.slice(valid, feed.total))
                else:
                    self._ahead.pop(feed.session, None)
                    failed.add(feed.session)
            self.totals.passes += 1
            self.totals.rows += sum(feed.total - start for _, feed, _, start in jobs)
        self.failed = frozenset(failed)
        return results

    def _agreed_ahead(self, feed: Feed, valid: int) -> int:
        """How many tokens after the lender's KV are this model's own and still true."""
        ahead = self._ahead.get(feed.session)
        if ahead is None or ahead.start != valid:
            return 0
        tokens = feed.slice(valid, feed.total)
        return next((i for i, (a, b) in enumerate(zip(ahead.tokens, tokens, strict=False)) if a != b),
                    min(len(ahead.tokens), len(tokens)))  # fmt: skip

    def _batch(self, jobs: Sequence[tuple[Feed, int, int]]) -> RaggedBatch:
        size = self._lender.block_size
        tables = [self._lender.lend(feed.session, feed.total) for feed, _, _ in jobs]
        tokens: list[int] = []
        positions, slots, logit_rows = [], [], []
        for (feed, valid, start), table in zip(jobs, tables, strict=True):
            tokens += feed.slice(start, feed.total)
            where = np.arange(start, feed.total, dtype=np.int32)
            slot = table[where // size] * size + where % size
            slot[: max(valid - start, 0)] = self._lender.scratch  # the target's KV, perhaps shared: only for logits
            positions.append(where)
            slots.append(slot)
            logit_rows.append(np.arange(len(tokens) - feed.want, len(tokens), dtype=np.int32))
        used = [-(-feed.total // size) for feed, _, _ in jobs]
        padded = np.full((len(jobs), max(used)), -1, np.int32)
        for row, table, count in zip(padded, tables, used, strict=True):
            row[:count] = table[:count]
        return RaggedBatch(
            token_ids=np.asarray(tokens, dtype=np.int32),
            positions=np.concatenate(positions),
            query_starts=np.cumsum([0] + [feed.total - start for feed, _, start in jobs], dtype=np.int32),
            context=np.asarray([feed.total for feed, _, _ in jobs], dtype=np.int32),
            block_tables=padded,
            slots=np.concatenate(slots),
            logit_rows=np.concatenate(logit_rows),
        )
