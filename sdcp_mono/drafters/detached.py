"""Any Hugging Face model with the target's vocabulary and tokenizer as its drafter (``--draft model:DIR``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sdcp_mono.core.ports import ModelCard
from sdcp_mono.drafters.paged_draft import PagedDraft
from sdcp_mono.kernels.native import Format
from sdcp_mono.runners.loading import Engine, load_decoder


class Vocabulary(Protocol):
    """What is asked of a tokenizer here; ``models.tokenizer.Tokenizer`` is one."""

    def first_difference(self, other: Any) -> int | None:
        """The smallest id that names another token in ``other``, or a token in only one of the two."""

    def token(self, token_id: int) -> str | None: ...


def check_vocabulary(
    draft: ModelCard, draft_tokenizer: Vocabulary, target: ModelCard, target_tokenizer: Vocabulary
) -> None:
    """Refuse a draft model whose ids don't mean what the target's do (C-36); raises ``ValueError``."""
    different = draft_tokenizer.first_difference(target_tokenizer)
    if different is not None:
        mine, theirs = _quoted(draft_tokenizer, different), _quoted(target_tokenizer, different)
        raise ValueError(
            f"draft: {draft.name} has another tokenizer than {target.name}: id {different} is {mine} in the draft, "
            f"{theirs} in the target. Choose a draft model with the target's tokenizer."
        )
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft: {draft.name} has {draft.vocab_size} logits, {target.name} {target.vocab_size}: id "
            f"{min(draft.vocab_size, target.vocab_size)} is in only one of them. Choose a draft model of the target's "
            "family and vocabulary width."
        )


def load_detached(
    folder: Path,
    card: ModelCard,
    *,
    weights: Format = "bfloat16",
    kv_bytes: int,
    token_budget: int,
    engine: Engine = "auto",
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PagedDraft:
    """The drafter for the model in ``folder``, described by ``card``; ``check_vocabulary`` comes first.

    Raises ``ValueError`` as ``load_decoder``, or if the weights aren't as wide as the card says.
    """
    decoder = load_decoder(folder, weights, engine, threads, progress)
    if decoder.vocab_size != card.vocab_size:
        raise ValueError(f"draft: {card.name} has {decoder.vocab_size} logits, not {card.vocab_size} as it says")
    return PagedDraft.over(decoder, f"model:{card.name}", card.target, kv_bytes=kv_bytes, token_budget=token_budget)


def _quoted(tokenizer: Vocabulary, token_id: int) -> str:
    token = tokenizer.token(token_id)
    return "missing" if token is None else repr(token)
