"""A target and a drafter of known distributions: the next token depends on the last one only. No tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

from msgspec import UNSET

from sdcp_mono.core.messages import Rule
from sdcp_mono.core.ports import (
    Draft,
    DraftRequest,
    ModelCard,
    RowsProblem,
    Scored,
    ScoreFailure,
    ScoreRequest,
)

Distribution = Sequence[float]
Next = Callable[[int], Distribution]


def one_hot(token: int, vocab_size: int) -> Distribution:
    return tuple(float(i == token) for i in range(vocab_size))


def chain(edges: dict[int, int], vocab_size: int = 64) -> Next:
    """Deterministic: last token -> next token; 0 where the chain says nothing."""
    return lambda last: one_hot(edges.get(last, 0), vocab_size)


def draw(weights: Distribution, u: float) -> int:
    """The smallest x whose cumulative mass exceeds u times the total (AMB-128)."""
    sums = list(accumulate(weights))
    return next((i for i, mass in enumerate(sums) if mass > u * sums[-1]), max(i for i, w in enumerate(weights) if w))


class ToyRows:
    """q rows in one process."""

    def __init__(self, rows: Sequence[Distribution]) -> None:
        self.rows = rows

    def to_bytes(self) -> bytes:
        import struct

        return b"".join(struct.pack(f"<{len(row)}f", *row) for row in self.rows)

    def check(self, tokens: Sequence[int], vocab_size: int) -> None:
        if any(len(row) != vocab_size for row in self.rows) or len(self.rows) > len(tokens):
            raise RowsProblem("q_rows: too long", unavailable=False)
        if len(self.rows) < len(tokens):
            raise RowsProblem("q_rows: too short", unavailable=True)
        if any(row[token] <= 0 for row, token in zip(self.rows, tokens, strict=False)):
            raise RowsProblem("q_rows: q(x) is 0", unavailable=False)


class ToyTarget:
    """Implements ``TargetModel``. ``fail`` sees each request and may answer a failure instead of scores."""

    def __init__(self, next_: Next, card: ModelCard, fail: Callable[[ScoreRequest], ScoreFailure | None] | None = None):
        self.card = card
        self.next = next_
        self.fail = fail or (lambda request: None)
        self.passes = 0
        self.held: set[bytes] = set()
        self.room = 10**9

    block_tokens, longest, free_tokens = 16, 2**20, 2**20

    def admit(self, session: bytes, tokens: int, *, scope: bytes | None = None) -> bool:
        if len(self.held) >= self.room:
            return False
        self.held.add(session)
        return True

    def release(self, session: bytes) -> None:
        self.held.discard(session)

    def step(self, requests: Sequence[ScoreRequest]) -> list[list[Scored] | ScoreFailure | None]:
        self.passes += 1
        return [self.fail(request) or self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> list[Scored]:
        last = [request.prefix[request.length - 1], *request.tokens]
        scored = []
        for i, token in enumerate(last):
            p = self.next(token)
            best = max(range(len(p)), key=lambda x: (p[x], -x))
            if request.rule is Rule.GREEDY:
                scored.append(Scored(best, best))
                continue
            assert request.uniforms is not None
            u = request.uniforms.extra[i]
            if i == len(request.tokens):
                scored.append(Scored(best, draw(p, u)))
                continue
            q, x = request.rows.rows[i], request.tokens[i]
            residual = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
            scored.append(Scored(best, draw(residual if sum(residual) else p, u), p[x], q[x]))
        return scored


class ToyDraft:
    """Implements ``DraftModel`` over the same kind of distribution."""

    name = "toy"
    identity = b"d" * 32

    def __init__(self, next_: Next, vocab_size: int = 64, seed: int = 0) -> None:
        self.next = next_
        self.vocab_size = vocab_size
        self.random = random.Random(seed)
        self.drafted = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._draft(request) for request in requests]

    def release(self, session: bytes) -> None: ...

    def _draft(self, request: DraftRequest) -> Draft:
        self.drafted += 1
        last, tokens, rows = request.prefix[request.length - 1], [], []
        seed = request.sampling.seed
        source = self.random if seed is UNSET else random.Random(f"{seed} {request.session.hex()} {request.round}")
        for _ in range(request.m):
            q = self.next(last)
            best = max(range(len(q)), key=lambda x: (q[x], -x))
            last = best if request.rule is Rule.GREEDY else draw(q, source.random())
            tokens.append(last)
            rows.append(q)
        return Draft(tuple(tokens), ToyRows(rows) if request.rule is not Rule.GREEDY else None)
