"""The autoregressive drafter over a paged model.

A call drafts in lockstep for all its sessions: one pass a step, in which every session that wants more tokens has one
row. The first pass also feeds what was committed since a session's last draft, one or two tokens after a round; the KV
follows the committed prefix by itself (``runners/paged.py``), so a rejected draft is rolled back by what comes next
(SDCP-118). Drafting is never stopped by a token's probability: the quantized target is right in 79 % of the cases
in which it gives its best token less than 0.2, and stopping there gains nothing.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import torch

from sdcp_mono.core.messages import UNSET, Hash32, Rule, SessionId
from sdcp_mono.core.ports import Draft, DraftRequest
from sdcp_mono.runners.blocks import BLOCK_SIZE
from sdcp_mono.runners.borrowed import BorrowedModel
from sdcp_mono.runners.decoder import Decoder
from sdcp_mono.runners.paged import Feed, PagedModel
from sdcp_mono.runners.rows import QRows
from sdcp_mono.runners.sampling import best, distributions, draw

PERSON: Final = b"sdcp-mono draft"  # BLAKE2b's personalisation, 16 octets at most
NOTHING: Final = Draft(())


@dataclass(slots=True, eq=False)
class _Lane:
    """One request being drafted: at most ``m`` tokens; fewer than asked for where the context ends."""

    request: DraftRequest
    m: int
    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # (V,) float32 each, under rule 2

    @property
    def feed(self) -> Feed:
        return Feed(self.request.session, self.request.prefix, self.request.length, tuple(self.tokens))


class PagedDraft:
    """A ``DraftModel`` that takes ``model`` over; owned by one thread. ``identity`` is the digest of its weights."""

    def __init__(self, model: PagedModel | BorrowedModel, name: str, identity: Hash32) -> None:
        self.name = name
        self.identity = identity
        self.vocab_size = model.decoder.vocab_size
        self.kv = model if isinstance(model, PagedModel) else None  # its own, as the tiers below the device see it
        self.borrows = self.kv is None
        self._model = model
        self._seen: dict[SessionId, tuple[Sequence[int], int]] = {}  # admitted sessions' last prefix and length
        self._drafting: set[SessionId] = set()  # sessions of the present call
        self._seconds_per_token = 0.0  # as last measured
        self._random = random.SystemRandom()

    @classmethod
    def over(cls, decoder: Decoder, name: str, identity: Hash32, *, kv_bytes: int, token_budget: int) -> Self:
        """Over its own KV blocks, as many as ``kv_bytes`` hold. Raises ``ValueError`` if that isn't one."""
        blocks = kv_bytes // (BLOCK_SIZE * decoder.kv_bytes_per_token) - 1  # one is the model's scratch
        return cls(PagedModel(decoder, identity, blocks=blocks, token_budget=token_budget), name, identity)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """See ``DraftModel``. Empty where there is no KV block left, the context is full, or logits are not finite."""
        answers: list[Draft | None] = [NOTHING] * len(requests)
        self._drafting = {request.session for request in requests}
        lanes = {index: lane for index, request in enumerate(requests) if (lane := self._admit(request))}
        going, seconds, steps = dict(lanes), 0.0, 0
        while going:
            prefilled, started = self._model.totals.prefill_rows, time.perf_counter()
            logits = self._model.feed([lane.feed for lane in going.values()])
            fed = []
            for (index, lane), row in zip(list(going.items()), logits, strict=True):
                if lane.request.session in self._model.failed:
                    del going[index]  # C-31: what was drafted before is sound
                elif row is None:
                    del going[index]
                    if not lane.tokens:
                        del lanes[index]
                        answers[index] = None  # the prefix is still being fed
                else:
                    fed.append((lane, row))
            self._choose(fed)
            going = {index: lane for index, lane in going.items() if len(lane.tokens) < lane.m}
            if self._model.totals.prefill_rows == prefilled:
                seconds, steps = seconds + time.perf_counter() - started, steps + 1
        if steps:
            self._seconds_per_token = seconds / steps
        for index, lane in lanes.items():
            if lane.tokens:
                rows = QRows.dense_rows(torch.stack(lane.rows)) if lane.rows else None
                answers[index] = Draft(tuple(lane.tokens), rows, self._seconds_per_token)
        return answers

    def release(self, session: SessionId) -> None:
        self._seen.pop(session, None)
        self._model.release(session)

    def _admit(self, request: DraftRequest) -> _Lane | None:
        """Make room in the KV for this draft; None if there is none now, or ever."""
        context = self._model.decoder.context
        m = min(request.m, context - request.length + 1)  # the last drafted token is not fed
        if m < 1:
            return None
        session, tokens = request.session, request.length + m - 1
        prefix, length = self._seen.get(session, (request.prefix, 0))
        if prefix is not request.prefix or request.length < length:
            # Committed tokens were taken back (a resync from the start). Their blocks may be shared by now, and a copy
            # of each could be more than there is room for; a new session takes over all that is still true.
            self.release(session)
        admitted = self._room(request, tokens)
        if not admitted:
            self.release(session)  # without drafting it needs none; what they hold can be found again by prefix
            return None
        self._seen.pop(session, None)  # the last one drafted for is last in order
        self._seen[session] = (request.prefix, request.length)
        return _Lane(request, m)

    def _room(self, request: DraftRequest, tokens: int) -> bool:
        """Make room for ``tokens`` tokens; a session that must be reproducible takes it from those not at work now."""
        session, model = request.session, self._model
        idle = [other for other in self._seen if other != session and other not in self._drafting]
        try:
            while not (model.capacity(session) >= tokens or model.admit(session, tokens, scope=request.scope)):
                if request.sampling.seed is UNSET or not idle:
                    return False
                self.release(idle.pop(0))
        except ValueError:  # more than all the blocks there are
            return False
        return True

    def _choose(self, fed: Sequence[tuple[_Lane, torch.Tensor]]) -> None:
        """One more token for every lane, from its (1, V) logits."""
        greedy = [(lane, row) for lane, row in fed if lane.request.rule is Rule.GREEDY]
        sampled = [(lane, row) for lane, row in fed if lane.request.rule is not Rule.GREEDY]
        if greedy:
            for (lane, _), token in zip(greedy, best(torch.cat([row for _, row in greedy])).tolist(), strict=True):
                lane.tokens.append(token)
        if sampled:
            logits = torch.cat([row for _, row in sampled])
            # Drawn from the row as it is published: after the profile, after rounding to binary32 (SDCP-073).
            q = distributions(logits, [lane.request.sampling for lane, _ in sampled]).float()
            tokens = draw(q, [self._uniform(lane) for lane, _ in sampled]).tolist()
            for (lane, _), token, row in zip(sampled, tokens, q, strict=True):
                lane.tokens.append(token)
                lane.rows.append(row)

    def _uniform(self, lane: _Lane) -> float:
        """The drafter's own draw for a lane's next position, in [0, 1)."""
        request = lane.request
        seed = request.sampling.seed
        if seed is UNSET:
            return self._random.random()
        # Another function than the verifier's (6.4): were the two draws related, its acceptance test would be biased.
        where = request.session + request.round.to_bytes(4, "big") + len(lane.tokens).to_bytes(4, "big")
        bits = hashlib.blake2b(where, digest_size=8, key=seed.to_bytes(8, "big"), person=PERSON).digest()
        return float((int.from_bytes(bits, "big") >> 11) / 2**53)
