"""The reference verifier's target: a toy whose next token depends on the last one only, and its random values."""

from __future__ import annotations

import hashlib
import hmac
import math
import random
import struct
from typing import TYPE_CHECKING

from reference_host import Host

if TYPE_CHECKING:
    from reference_verifier import Session

V = 64


def logits(last: int) -> list[float]:
    """The toy target: the next token depends on the last one only."""
    best = (last * 5 + 3) % V
    return [4.0 if x == best else ((x * 7 + last) % 11) / 8 for x in range(V)]


class Model(Host):
    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.random = random.Random(1)

    def profile(self, session: Session, round_: int) -> dict[str, int]:
        chosen = max((n for n in session.policies if n <= round_), default=None)
        return session.contract.get("sampling", {}) if chosen is None else session.policies[chosen]

    def last(self, session: Session, tokens: list[int]) -> int:
        if session.junk and len(tokens) == len(session.tokens):
            return session.junk[-1]
        return [*session.prompt, *tokens][-1]

    def best(self, session: Session, tokens: list[int]) -> int:
        row = logits(self.last(session, tokens))
        return row.index(max(row))

    def p(self, session: Session, tokens: list[int], profile: dict[str, int]) -> list[float]:
        row = logits(self.last(session, tokens))
        temperature = profile.get("temperature_milli", 1000) / 1000
        if self.bad("temperature 0 is 1") and temperature == 0:
            temperature = 1.0
        if temperature == 0:
            return [float(x == row.index(max(row))) for x in range(V)]
        weights = [math.exp((x - max(row)) / temperature) for x in row]
        order = sorted(range(V), key=lambda x: (-weights[x], x))
        if (k := profile.get("top_k", 0)) and not self.bad("top_k ignored"):
            weights = [w if x in order[:k] else 0.0 for x, w in enumerate(weights)]
        limit, kept, mass = profile.get("top_p_milli", 1000) / 1000 * sum(weights), set[int](), 0.0
        for x in order:
            kept.add(x)
            mass += weights[x]
            if mass >= limit:
                break
        total = sum(weights[x] for x in kept)
        return [weights[x] / total if x in kept else 0.0 for x in range(V)]

    def uniform(self, session: Session, round_: int, i: int, purpose: int) -> float:
        if self.bad("constant draws"):
            return 0.25
        seed = self.profile(session, round_).get("seed")
        if seed is None or self.bad("the seed is ignored"):
            return self.random.random() if seed is not None else random.SystemRandom().random()
        i = i - 1 if self.bad("i from 0") else i
        text = b"SDCP-VERIFY-1\0" + session.id + struct.pack(">IIB", round_, i, purpose)
        code = hmac.new(seed.to_bytes(8, "big"), text, hashlib.sha256).digest()
        return (int.from_bytes(code[:8], "big") >> 11) / 2**53
