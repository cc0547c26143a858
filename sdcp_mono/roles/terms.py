"""What a router's contracts say (4.1), and how many requests it takes."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, Struct

from sdcp_mono.core.messages import Action, Contract
from sdcp_mono.core.ports import GenerateRequest, ModelCard

LADDER: Final = 512  # entries that a contract's fallback list may grow by; 1024 are allowed


class Terms(Struct, frozen=True):
    """What every session contract of this router says (4.1), and how many requests it takes."""

    m_max: int = 8
    m_init: int = 4
    low_rounds: int = 4
    low_ratio: int = 0
    fallback: tuple[int, ...] = (Action.REDUCE, Action.REDUCE, Action.SELF_DECODE, Action.SELF_DECODE)
    self_load: int = 100
    self_max: int = 32
    active: int = 32  # sessions at work; more wait, so that each one is fast enough to be useful
    queue: int = 256  # waiting requests; more would wait longer than clients do
    wait_seconds: float = 120.0  # of a queued request, then 503
    drafted: bool = True  # a drafter will come; otherwise a session is drafted if one has reported when it opens

    def contract(self, request: GenerateRequest, card: ModelCard, scope: bytes) -> Contract:
        """The contract of a session for ``request``."""
        # A seeded session's rounds must not follow from earlier ones, which a failover forgets: no ladder.
        low_rounds = request.max_new + 1 if _seeded(request) else self.low_rounds
        # A drafter that is never right costs time, not the answer: each entry is worth low_rounds + self_max tokens, so
        # the ladder doesn't run out, which would be "fail" (6.5.2), before max_new does.
        self_max = max(self.self_max, request.max_new // LADDER)
        more = request.max_new // (self.low_rounds + self_max)
        return Contract(
            target=card.target,
            tokenizer=card.tokenizer,
            rule=int(request.rule),
            sampling=request.sampling,
            m_max=self.m_max,
            max_new=request.max_new,
            stop=request.stop,
            low_rounds=low_rounds,
            low_ratio=self.low_ratio,
            fallback=(*(int(entry) for entry in self.fallback), *[int(Action.SELF_DECODE)] * more),
            self_load=self.self_load,
            self_max=self_max,
            scope=scope,
        )

    def first_limit(self, request: GenerateRequest) -> int:
        """The limit of a drafter's first proposal; a later drafter of a seeded session must not start lower."""
        return self.m_max if _seeded(request) else self.m_init


def _seeded(request: GenerateRequest) -> bool:
    return request.sampling.seed is not UNSET
