"""The target model behind ``core.ports.TargetModel``: one pass for many sessions, reduced to numbers per position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from sdcp_mono.core.messages import Rule, SessionId
from sdcp_mono.core.ports import Logprobs, ModelCard, Scored, ScoreFailure, ScoreRequest, TokenLogprob
from sdcp_mono.runners.paged import Feed, PagedModel, Totals
from sdcp_mono.runners.rows import QRows
from sdcp_mono.runners.sampling import best, best_ids, distribution, log_probabilities

LONGEST_PROPOSAL: Final = 64
"""The contract's bound on M (4.1)."""

UNSCORED: Final = Scored(argmax=-1, extra=-1, p=0.0, q=1.0)
"""A position past the end of the context: it refuses its token, and nothing of it can be emitted (AMB-126)."""


class TargetRunner:
    """Scores proposals. ``model`` is taken over; ``card`` describes it and may state a shorter context."""

    def __init__(self, card: ModelCard, model: PagedModel) -> None:
        if card.vocab_size != model.decoder.vocab_size:
            raise ValueError(f"vocab_size: {card.vocab_size} on the card, {model.decoder.vocab_size} in the model")
        if card.context > model.decoder.context:
            raise ValueError(f"context: {card.context} on the card, {model.decoder.context} in the model")
        if model.decode_budget <= LONGEST_PROPOSAL:
            raise ValueError(f"token_budget: {model.token_budget} is too small for {LONGEST_PROPOSAL + 1} rows")
        self.card = card
        self.kv = model  # as the tiers below the device see it
        self._model = model

    @property
    def totals(self) -> Totals:
        """What the model has done since it started."""
        return self._model.totals

    @property
    def block_tokens(self) -> int:
        """Tokens of one KV block."""
        return self._model.block_size

    @property
    def longest(self) -> int:
        """The longest session in tokens that there could ever be room for."""
        return min(self.card.context, self._model.longest)

    @property
    def free_tokens(self) -> int:
        return self._model.free_tokens

    def admit(self, session: SessionId, tokens: int, *, scope: bytes | None = None) -> bool:
        """Reserve room for ``tokens`` tokens; False if there is none now. Raises ``ValueError`` if they never fit."""
        if tokens > self.card.context:
            raise ValueError(f"a session of {tokens} tokens does not fit a context of {self.card.context}")
        return self._model.admit(session, tokens, scope=scope)

    def release(self, session: SessionId) -> None:
        self._model.release(session)

    def cached_tokens(self, session: SessionId) -> int:
        """Prompt tokens that the prefix cache saved."""
        return self._model.cached_tokens(session)

    def step(self, requests: Sequence[ScoreRequest]) -> list[Sequence[Scored] | ScoreFailure | None]:
        """One pass (6.3 step 6). Always M+1 positions; those past the context are ``UNSCORED``."""
        results: list[Sequence[Scored] | ScoreFailure | None] = []
        work = []
        for request in requests:
            refusal = self._refusal(request)
            results.append(refusal)
            if refusal is None:
                tokens = request.tokens[: self._room(request)]
                work.append(Feed(request.session, request.prefix, request.length, tokens, len(tokens) + 1))
        answers = iter(self._model.feed(work))
        for index, request in enumerate(requests):
            if results[index] is None:
                logits = next(answers)
                if request.session in self._model.failed:
                    results[index] = ScoreFailure("the model's logits are not finite")
                elif logits is not None:
                    scored = _score(request, logits)
                    results[index] = scored + [UNSCORED] * (len(request.tokens) + 1 - len(scored))
        return results

    def _room(self, request: ScoreRequest) -> int:
        """How many proposed tokens there is a place for; the rest is ``UNSCORED``."""
        return self.longest - request.length

    def _refusal(self, request: ScoreRequest) -> ScoreFailure | None:
        """What only a caller's mistake can bring about; its neighbours are not to suffer from it."""
        room = self._model.capacity(request.session)
        if request.length > room or min(request.length + len(request.tokens), self.longest) > room:
            return ScoreFailure("the session has no room for its KV", permanent=True)
        if request.rule == Rule.SPECULATIVE_SAMPLING:
            if request.uniforms is None:
                return ScoreFailure("rule 2 without random values", permanent=True)
            if request.tokens and not isinstance(request.rows, QRows):
                return ScoreFailure("rule 2 without the rows of the proposal", permanent=True)
        return None


def _score(request: ScoreRequest, logits: torch.Tensor) -> list[Scored]:
    """The scored positions of one request from its rows of logits, (n, V), n <= M+1."""
    argmax = best(logits).tolist()
    count, proposed = len(argmax), list(request.tokens[: len(argmax)])
    extra, p, q = list(argmax), [0.0] * count, [0.0] * count  # position M+1 has no proposed token
    if request.rule == Rule.SPECULATIVE_SAMPLING:
        assert request.uniforms is not None
        rows = logits.cpu().numpy()
        for i in range(count):
            weights = distribution(rows[i], request.sampling)
            if i < len(proposed):
                p[i], q[i] = weights.of(proposed[i]), request.rows.of(i, proposed[i])
                weights = request.rows.residual(i, weights)
            extra[i] = weights.draw(request.uniforms.extra[i])
    logprobs: list[Logprobs] | list[None] = [None] * count
    if request.top_logprobs >= 0:
        logprobs = _logprobs(logits, [*proposed, *extra[len(proposed) :]], extra, request.top_logprobs)
    return [Scored(*position) for position in zip(argmax, extra, p, q, logprobs, strict=True)]


def _logprobs(logits: torch.Tensor, proposed: list[int], extra: list[int], top: int) -> list[Logprobs]:
    found = []
    for row, x, y in zip(log_probabilities(logits).numpy(), proposed, extra, strict=True):
        ids = best_ids(row, min(top, len(row))) if top else np.empty(0, np.int64)
        order = ids[np.argsort(-row[ids], kind="stable")]
        best_of = tuple(TokenLogprob(int(token), float(row[token])) for token in order)
        found.append(Logprobs(float(row[x]), float(row[y]), best_of))
    return found
