"""Sequences over a paged KV cache: whoever calls says what the sequence is, the cache follows.

A caller names a prefix and the tokens after it; nothing else. Whatever KV agrees with that stays, what disagrees is
rolled back (a change of length, nothing moves), what is missing is fed, in chunks where the token budget asks for it.
Opening, catching up, verifying and rolling back are therefore one operation.

Laws: KV is written once per token (a row that is run again only for its logits writes to a scratch block); a block
becomes reusable by others only when it is full, holds committed prefix only, and the pass that finished it had finite
logits (C-31). Such a block is also offered to the tiers below, once, and comes back from there the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from sdcp_mono.core.kv import KvTiers, KvUsage
from sdcp_mono.runners.blocks import BLOCK_SIZE, BlockPool, next_key, root_key
from sdcp_mono.runners.decoder import Decoder, Ints, RaggedBatch
from sdcp_mono.runners.sampling import finite_rows

PROMPT_SHARE = 8
"""One part in this many of the token budget is kept for prompts, so that decoding sessions can't starve them."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Run ``tokens`` after the first ``length`` tokens of ``prefix``; the logits of the last ``want`` rows are wanted.

    ``prefix`` is an append-only list shared with the caller: ``prefix[:length]`` never changes. ``tokens`` are guesses,
    replaced or confirmed by a later prefix. 0 <= want <= length + len(tokens).
    """

    session: bytes
    prefix: Sequence[int]
    length: int
    tokens: Sequence[int] = ()
    want: int = 1

    @property
    def total(self) -> int:
        return self.length + len(self.tokens)

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of the whole sequence."""
        part = list(self.prefix[start : min(stop, self.length)]) if start < self.length else []
        if stop > self.length:
            part += self.tokens[max(start - self.length, 0) : stop - self.length]
        return part


@dataclass(slots=True)
class Totals:
    """What a model has done since it started."""

    passes: int = 0
    rows: int = 0
    decode_rows: int = 0  # rows of work that was at the end of its sequence: verification and single tokens
    prefill_rows: int = 0
    cached_tokens: int = 0  # prefix tokens that were found in the cache instead of being computed
    restored_tokens: int = 0  # of these, the ones that came back from a tier below the device
    rolled_back: int = 0  # tokens whose KV was given up because the prefix went another way


@dataclass(slots=True, eq=False)
class _Session:
    root: bytes
    scope: bytes | None
    table: Ints  # blocks in order; the first ``taken`` are valid, the rest is promised
    taken: int = 0
    tokens: list[int] = field(default_factory=list)  # what the KV holds
    prefix: Sequence[int] | None = None
    confirmed: int = 0  # leading tokens known to equal ``prefix``
    keys: list[bytes] = field(default_factory=list)  # of the leading full blocks, as far as they were needed
    published: int = 0  # leading blocks that were offered for reuse, or came from it
    reused: int = 0
    served: int = 0  # the last pass that had rows of this session

    def cut(self, length: int, block_size: int) -> None:
        del self.tokens[length:]
        del self.keys[length // block_size :]
        self.published = min(self.published, length // block_size)
        self.confirmed = min(self.confirmed, length)


@dataclass(slots=True, eq=False)
class _Job:
    index: int
    feed: Feed
    session: _Session
    start: int  # first row to run
    stop: int = 0  # row after the last one of this pass; 0 while not scheduled

    @property
    def need(self) -> int:
        return self.feed.total - self.start

    @property
    def done(self) -> bool:
        return self.stop == self.feed.total

    @property
    def logit_rows(self) -> int:
        """How many rows of this pass have logits: at least the last, to see that what was computed is finite."""
        return max(self.feed.want, 1) if self.done else 1


class PagedModel:
    """Many sequences over one decoder. Used by the target and by draft models alike; owned by one thread.

    ``identity`` names weights, dtype and weight format (it keys prefix reuse). ``token_budget`` bounds the rows of one
    pass, that is its duration and its activations. ``blocks`` bounds memory: ``(blocks + 1) * block_size *
    decoder.kv_bytes_per_token`` bytes. Implements ``core.ports.HoldsKv``.
    """

    def __init__(
        self, decoder: Decoder, identity: bytes, *, blocks: int, block_size: int = BLOCK_SIZE, token_budget: int = 512
    ) -> None:
        if token_budget < PROMPT_SHARE:
            raise ValueError(f"token_budget: need at least {PROMPT_SHARE}, got {token_budget}")
        self.decoder = decoder
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.token_budget = token_budget
        self.totals = Totals()
        self.failed: frozenset[bytes] = frozenset()  # sessions whose rows of the last pass had logits not finite
        self.tiers: KvTiers | None = None  # get a copy of what may be reused
        self._copied: deque[int] = deque()  # blocks whose copies are done; filled by any thread, bounded by the pool
        self._identity = identity + decoder.kv_layout.encode()
        self._sessions: dict[bytes, _Session] = {}  # bounded by the pool: each holds or was promised a block
        self._scratch = blocks * block_size  # first slot of the block after the pool's
        decoder.allocate(blocks + 1, block_size)

    @property
    def decode_budget(self) -> int:
        """The most rows of one pass that don't belong to prompts; the most that one feed may want logits of."""
        return self.token_budget - self.token_budget // PROMPT_SHARE

    def admit(self, session: bytes, tokens: int, *, scope: bytes | None = None) -> bool:
        """Reserve room for ``tokens`` tokens; False if there is none now. Again for a known session: grow its room.

        Raises ``ValueError`` if they can never fit. Blocks are only shared within one ``scope``.
        """
        self._unpin()
        if not 1 <= tokens <= self.decoder.context:
            raise ValueError(f"a session of {tokens} tokens does not fit a context of {self.decoder.context}")
        known = self._sessions.get(session)
        have = 0 if known is None else len(known.table)
        more = -(-tokens // self.block_size) - have
        if have + more > self.pool.total:
            raise ValueError(f"a session of {tokens} tokens needs {have + more} KV blocks, there are {self.pool.total}")
        if more > 0 and not self.pool.reserve(more):
            return False
        if known is None:
            root = root_key(self._identity, scope, self.block_size)
            self._sessions[session] = _Session(root, scope, np.full(more, -1, np.int32))
        elif more > 0:
            known.table = np.concatenate([known.table, np.full(more, -1, np.int32)])
        return True

    def capacity(self, session: bytes) -> int:
        """Tokens that the session may grow to; 0 for one that was not admitted."""
        known = self._sessions.get(session)
        return 0 if known is None else min(len(known.table) * self.block_size, self.decoder.context)

    def cached_tokens(self, session: bytes) -> int:
        """Prefix tokens of this session that were found in the cache instead of being computed."""
        known = self._sessions.get(session)
        return 0 if known is None else known.reused

    def release(self, session: bytes) -> None:
        """Forget a session; its full blocks stay reusable by prefix until evicted. Unknown sessions are ignored."""
        known = self._sessions.pop(session, None)
        if known is not None:
            self.pool.drop(known.table[: known.taken].tolist())
            self.pool.unreserve(len(known.table) - known.taken)

    @property
    def longest(self) -> int:
        """The longest sequence in tokens that could ever be admitted."""
        return min(self.decoder.context, self.pool.total * self.block_size)

    @property
    def free_tokens(self) -> int:
        """Tokens that could be admitted now; may be read from any thread, as a hint."""
        return max(self.pool.available + len(self._copied), 0) * self.block_size

    @property
    def block_tokens(self) -> int:
        return self.block_size

    @property
    def block_bytes(self) -> int:
        return self.decoder.block_bytes

    @property
    def kv_dtype(self) -> str:
        return str(self.decoder.kv_dtype).removeprefix("torch.")

    @property
    def on_gpu(self) -> bool:
        return getattr(getattr(self.decoder, "device", None), "type", "cpu") == "cuda"

    @property
    def usage(self) -> KvUsage:
        pool, totals = self.pool, self.totals
        asked, found = totals.cached_tokens + totals.prefill_rows, totals.cached_tokens - totals.restored_tokens
        return KvUsage(pool.total, pool.used, pool.cached, asked, found, totals.restored_tokens)

    def missing(self, session: bytes, tokens: Sequence[int], scope: bytes | None) -> list[bytes]:
        """Keys of the full blocks of ``tokens`` that have to be computed or loaded, in order.

        The session, which is admitted for so many tokens if it wasn't, takes those before them, which are on the
        device, now. Empty where there is no room for it, or it holds more already.
        """
        if not tokens or (len(tokens) > self.capacity(session) and not self.admit(session, len(tokens), scope=scope)):
            return []
        known = self._sessions[session]
        self._follow(known, Feed(session, tokens, len(tokens), want=0))
        if len(known.tokens) != known.taken * self.block_size:
            return []
        key, keys = self._key(known, known.taken), []
        for start in range(len(known.tokens), len(tokens) - self.block_size + 1, self.block_size):
            key = next_key(key, tokens[start : start + self.block_size])
            keys.append(key)
        return keys

    def adopt(self, session: bytes, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Write blocks that ``missing`` asked for, from its first key on; how many were of use.

        The session may have gone on or gone meanwhile: what doesn't continue what it holds is left alone.
        """
        known, size, used = self._sessions.get(session), self.block_size, 0
        for key, data in zip(keys, blocks, strict=False):
            if known is None or known.prefix is None or len(known.tokens) != known.taken * size:
                break
            start = len(known.tokens)
            tokens = list(known.prefix[start : start + size])
            if known.confirmed != start or known.taken == len(known.table) or len(tokens) < size:
                break
            if next_key(self._key(known, known.taken), tokens) != key:
                break
            block = self.pool.share(key)  # somebody else has computed or loaded it since
            if block is None:
                block = self.pool.take()
                self.decoder.write_block(block, data)
                self.pool.publish(block, key)
                self.totals.restored_tokens += size
            self._join(known, block, tokens)
            used += 1
        return used

    @property
    def scratch(self) -> int:
        """A slot that nothing is read from."""
        return self._scratch

    def agreed(self, feed: Feed) -> int:
        """How many leading tokens of a feed's sequence are in the KV, of its committed prefix only."""
        session = self._sessions.get(feed.session)
        if session is None or session.prefix is None:
            return 0
        held = session.tokens[: feed.length]
        if session.prefix is feed.prefix:  # the confirmed part needs no comparison
            return session.confirmed + _common(held[session.confirmed :], feed.slice(session.confirmed, len(held)))
        return _common(held, feed.slice(0, len(held)))

    def lend(self, session: bytes, tokens: int) -> Ints:
        """The block table of a session, with blocks for ``tokens`` tokens; the caller may write what isn't held yet."""
        known = self._sessions[session]
        while known.taken * self.block_size < tokens:
            known.table[known.taken] = self.pool.take()
            known.taken += 1
        return known.table

    def feed(self, work: Sequence[Feed]) -> list[torch.Tensor | None]:
        """One pass. For each feed the logits of its last ``want`` rows, (want, V) float32, valid until the next call;
        None while its rows didn't all fit the budget: feed it again (nothing is lost by feeding something else).

        Where logits are not finite the session is in ``failed`` until the next call, whatever is returned; the rows of
        that pass are forgotten, its neighbours don't notice. Raises ``ValueError`` before anything is changed for a
        feed that breaks its contract.
        """
        results: list[torch.Tensor | None] = [None] * len(work)
        self._refuse_bad(work)
        self._unpin()
        jobs = []
        for index, feed in enumerate(work):
            session = self._sessions[feed.session]
            job = _Job(index, feed, session, self._follow(session, feed))
            if job.need:
                jobs.append(job)
            else:
                results[index] = torch.empty(0, self.decoder.vocab_size)
        scheduled = self._schedule(jobs)
        failed = []
        if scheduled:
            logits = self.decoder.forward(self._batch(scheduled))
            row = 0
            finite = finite_rows(logits)
            for job in scheduled:
                rows = slice(row, row + job.logit_rows)
                row = rows.stop
                if finite[rows].all():
                    self._keep(job)
                else:
                    failed.append(job.feed.session)
                if job.done:
                    results[job.index] = logits[rows][job.logit_rows - job.feed.want :]
        self.failed = frozenset(failed)
        return results

    def _refuse_bad(self, work: Sequence[Feed]) -> None:
        if len({feed.session for feed in work}) != len(work):
            raise ValueError("session: the same one twice in one pass")
        for feed in work:
            capacity = self.capacity(feed.session)
            if not 0 < feed.length <= len(feed.prefix):
                raise ValueError(f"length: {feed.length} of a prefix of {len(feed.prefix)} tokens")
            if feed.total > capacity:
                raise ValueError(f"session {feed.session.hex()}: {feed.total} tokens, admitted for {capacity}")
            if not 0 <= feed.want <= min(feed.total, self.decode_budget):
                raise ValueError(f"want: {feed.want} rows of {feed.total}, at most {self.decode_budget} in one pass")

    def _follow(self, session: _Session, feed: Feed) -> int:
        """Roll back to what agrees with the feed, take what the cache knows of the rest; the first row to run."""
        if session.prefix is not feed.prefix:
            session.prefix, session.confirmed = feed.prefix, 0
        known = min(session.confirmed, feed.length)
        agree = known + _common(session.tokens[known : feed.total], feed.slice(known, feed.total))
        if agree < min(len(session.tokens), feed.total):
            self.totals.rolled_back += len(session.tokens) - agree
            session.cut(agree, self.block_size)
            self._make_writable(session, feed.session)
        session.confirmed = max(session.confirmed, min(len(session.tokens), agree, feed.length))
        self._reuse(session, feed)
        return min(len(session.tokens), feed.total - feed.want)

    def _make_writable(self, session: _Session, name: bytes) -> None:
        """After a roll-back into published blocks (a caller went back behind its own prefix): others keep theirs."""
        for index in range(len(session.tokens) // self.block_size, session.taken):
            block = int(session.table[index])
            if not self.pool.published(block):
                continue
            try:
                session.table[index] = own = self.pool.own(block)
            except ValueError:
                self.release(name)
                raise
            if own != block:
                session.cut(min(len(session.tokens), index * self.block_size), self.block_size)

    def _reuse(self, session: _Session, feed: Feed) -> None:
        """Take blocks of the prefix that somebody else has computed already."""
        size = self.block_size
        while True:
            length = len(session.tokens)
            if length != session.confirmed or length != session.taken * size or length + size > feed.length:
                return
            tokens = feed.slice(length, length + size)
            block = self.pool.share(next_key(self._key(session, session.taken), tokens))
            if block is None:
                return
            self._join(session, block, tokens)

    def _join(self, session: _Session, block: int, tokens: Sequence[int]) -> None:
        """A block that holds the next ``tokens`` of the prefix becomes part of the session."""
        session.table[session.taken] = block
        session.taken += 1
        session.published += 1
        session.tokens += tokens
        session.confirmed += len(tokens)
        session.reused += len(tokens)
        self.totals.cached_tokens += len(tokens)

    def _key(self, session: _Session, blocks: int) -> bytes:
        """The key of the first ``blocks`` full blocks."""
        size, keys = self.block_size, session.keys
        while len(keys) < blocks:
            tokens = session.tokens[len(keys) * size : (len(keys) + 1) * size]
            keys.append(next_key(keys[-1] if keys else session.root, tokens))
        return keys[blocks - 1] if blocks else session.root

    def _schedule(self, jobs: list[_Job]) -> list[_Job]:
        """Give this pass's rows away: work at the end of its sequence first and whole, then prompts in chunks, each in
        the order in which they were last served, so that nobody starves."""
        jobs.sort(key=lambda job: job.session.served)
        room = self.decode_budget if jobs else 0
        prompts = []
        for job in jobs:
            if job.need > min(job.feed.want + self.block_size, self.decode_budget):
                prompts.append(job)
            elif job.need <= room:
                job.stop = job.feed.total
                room -= job.need
                self.totals.decode_rows += job.need
        room += self.token_budget - self.decode_budget
        coming: set[bytes] = set()
        for job in prompts:
            chunk = job.need
            if chunk > room:
                chunk = min(room, job.need - job.feed.want)
                if chunk > self.block_size:  # end with a whole block, so that others can use it
                    chunk -= (job.start + chunk) % self.block_size
            keys = self._coming_keys(job, chunk)
            if chunk <= 0 or (keys and keys[0] in coming):
                continue  # no room, or a neighbour computes this very block now: it can be reused in the next pass
            coming.update(keys)
            job.stop = job.start + chunk
            room -= chunk
            self.totals.prefill_rows += chunk
        scheduled = [job for job in jobs if job.stop]
        self.totals.passes += bool(scheduled)
        for job in scheduled:
            job.session.served = self.totals.passes
            self.totals.rows += job.stop - job.start
        return scheduled

    def _coming_keys(self, job: _Job, chunk: int) -> list[bytes]:
        """Keys of the full prefix blocks that a chunk starting at a block boundary will complete."""
        size, start, length = self.block_size, job.start, job.feed.length
        if start % size or start != len(job.session.tokens) or start != job.session.confirmed:
            return []
        key, keys = self._key(job.session, start // size), []
        for block in range(start, min(start + chunk, length) - size + 1, size):
            key = next_key(key, job.feed.slice(block, block + size))
            keys.append(key)
        return keys

    def _batch(self, jobs: Sequence[_Job]) -> RaggedBatch:
        size = self.block_size
        tokens: list[int] = []
        positions, slots, logit_rows = [], [], []
        for job in jobs:
            session = job.session
            while session.taken * size < job.stop:
                session.table[session.taken] = self.pool.take()
                session.taken += 1
            tokens += job.feed.slice(job.start, job.stop)
            where = np.arange(job.start, job.stop, dtype=np.int32)
            slot = session.table[where // size] * size + where % size
            slot[: max(len(session.tokens) - job.start, 0)] = self._scratch  # in the KV already: run again for logits
            positions.append(where)
            slots.append(slot)
            logit_rows.append(np.arange(len(tokens) - job.logit_rows, len(tokens), dtype=np.int32))
        token_ids = np.asarray(tokens, dtype=np.int32)
        assert token_ids.min() >= 0, "negative token id"
        assert token_ids.max() < self.decoder.vocab_size, "token id outside the vocabulary"
        tables = np.full((len(jobs), max(-(-job.stop // size) for job in jobs)), -1, np.int32)
        for row, job in zip(tables, jobs, strict=True):
            used = -(-job.stop // size)
            row[:used] = job.session.table[:used]
        return RaggedBatch(
            token_ids=token_ids,
            positions=np.concatenate(positions),
            query_starts=np.cumsum([0] + [job.stop - job.start for job in jobs], dtype=np.int32),
            context=np.asarray([job.stop for job in jobs], dtype=np.int32),
            block_tables=tables,
            slots=np.concatenate(slots),
            logit_rows=np.concatenate(logit_rows),
        )

    def _keep(self, job: _Job) -> None:
        """The rows of this pass are sound: they are part of the sequence now, and full blocks can be shared."""
        session, feed, size = job.session, job.feed, self.block_size
        held = len(session.tokens)
        session.tokens += feed.slice(held, job.stop)
        session.confirmed = max(session.confirmed, min(len(session.tokens), feed.length))
        for index in range(session.published, session.confirmed // size):
            block, key = int(session.table[index]), self._key(session, index + 1)
            if self.pool.publish(block, key) and self.tiers is not None:
                self._offer(block, key, session.scope, self.tiers)
        session.published = session.confirmed // size

    def _offer(self, block: int, key: bytes, scope: bytes | None, tiers: KvTiers) -> None:
        """Have a block copied while the model goes on. A reference keeps it as it is until the copy is done."""
        self.pool.pin(block)
        if not tiers.offer(key, scope, self.decoder.read_block(block), partial(self._copied.append, block)):
            self.pool.drop([block])

    def _unpin(self) -> None:
        while self._copied:
            self.pool.drop([self._copied.popleft()])


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common start."""
    if left == right[: len(left)]:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
