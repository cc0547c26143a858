"""``sdcp-mono`` whose models answer at once, so that all that is left of a round is everything else.

    python -m benchmarks.no_model serve|router|verifier|drafter|cache …

The tokenizer and its vocabulary are those of the model that settings name.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.rounds import NoDraft, NoTarget
from sdcp_mono import cli, compose
from sdcp_mono.compose import roles
from sdcp_mono.compose.models import Loaded, LoadedDrafters
from sdcp_mono.models.source import resolve
from sdcp_mono.models.tokenizer import Tokenizer


def load(settings: Any, progress: Any, drafts: tuple[Any, ...] = ()) -> Loaded:
    folder = resolve(settings.model, settings.data_dir, progress, dtype=settings.dtype)
    target, thread = NoTarget(), ThreadPoolExecutor(1)
    target.card = folder.card
    return Loaded(settings, folder, folder.card, Tokenizer(folder.path), target, drafts, thread, 0.0)


def load_drafters(settings: Any, progress: Any) -> LoadedDrafters:
    loaded = load(settings, progress, (drafter(settings, progress),))
    return LoadedDrafters(loaded.card, loaded.drafts, loaded.thread, {})


def load_all(settings: Any, progress: Any) -> Loaded:
    return load(settings, progress, (drafter(settings, progress),))


def drafter(settings: Any, progress: Any) -> tuple[Any, bool]:
    draft = NoDraft()
    draft.vocab_size = resolve(settings.model, settings.data_dir, progress, dtype=settings.dtype).card.vocab_size
    return draft, False


if __name__ == "__main__":
    roles.load_target, roles.load_drafters = load, load_drafters
    compose.serving.load = load_all  # type: ignore[attr-defined]
    cli.main()
