"""Models in memory, and the one thread that owns them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import structs

from sdcp_mono.core.kv import HoldsKv
from sdcp_mono.core.ports import DraftModel, ModelCard, TargetModel
from sdcp_mono.core.speculation import CostTable
from sdcp_mono.models.identity import ModelFolder
from sdcp_mono.models.source import resolve
from sdcp_mono.models.tokenizer import Tokenizer
from sdcp_mono.settings import DrafterSettings, DraftSettings, ModelSettings, Settings, VerifierSettings

Progress = Callable[[str, int, int], None]

SWITCH_SECONDS: Final = 0.0005  # a busy Python thread otherwise adds 5 ms to every turn of the event loop


@dataclass(frozen=True, slots=True)
class Loaded:
    """Models in memory, owned by ``thread``; what a node is made of. ``instant`` drafters run on the event loop."""

    settings: Any  # that it was loaded with: Settings, or a role's
    folder: ModelFolder
    card: ModelCard
    tokenizer: Tokenizer
    target: TargetModel
    drafts: tuple[tuple[DraftModel, bool], ...]
    thread: ThreadPoolExecutor
    seconds: float
    costs: Mapping[str, CostTable] = field(default_factory=dict)  # of a pass, by model, measured once loaded
    kv: Mapping[str, HoldsKv] = field(default_factory=dict)  # of the models that have KV of their own
    borrows: frozenset[str] = frozenset()  # drafters that read the target's
    fault: Callable[[], str] = str  # why the target can't be used any more; empty while it can
    closing: Callable[[], object] = bool  # on the models' thread, before it ends

    def close(self) -> None:
        """End what the models have started, and their thread."""
        self.thread.submit(self.closing).result()
        self.thread.shutdown()


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """Draft models of a drafter that is a process of its own."""

    card: ModelCard  # of the target they draft for
    drafts: tuple[tuple[DraftModel, bool], ...]
    thread: ThreadPoolExecutor
    kv: Mapping[str, HoldsKv]


def load(settings: Settings, progress: Progress) -> Loaded:
    """Fetch, convert and load target and drafters; raises ``ModelError`` or ``ValueError`` with what to do next."""
    return _load(settings, progress, settings)


def load_target(settings: ModelSettings, progress: Progress) -> Loaded:
    """The target alone."""
    return _load(settings, progress, None)


def load_drafters(settings: DrafterSettings, progress: Progress) -> LoadedDrafters:
    """The drafters alone, each with KV of its own."""
    sys.setswitchinterval(SWITCH_SECONDS)
    folder = resolve(settings.model, settings.data_dir, progress, dtype=settings.dtype)
    thread = ThreadPoolExecutor(1, thread_name_prefix="models")

    def work() -> tuple[tuple[DraftModel, bool], ...]:
        return tuple(_load_drafts(settings, settings, folder, folder.card, None, Tokenizer(folder.path), progress))

    drafts = thread.submit(work).result()
    return LoadedDrafters(folder.card, drafts, thread, _kv_of([(draft.name, draft) for draft, _ in drafts]))


def _load(settings: Settings | ModelSettings, progress: Progress, drafting: Settings | None) -> Loaded:
    started = time.perf_counter()
    sys.setswitchinterval(SWITCH_SECONDS)
    folder = resolve(settings.model, settings.data_dir, progress, dtype=settings.dtype)
    thread = ThreadPoolExecutor(1, thread_name_prefix="models")
    tokenizer = Tokenizer(folder.path)
    decoder, target, drafts = thread.submit(_load_models, settings, drafting, folder, tokenizer, progress).result()
    costs = thread.submit(_measure, target, drafts).result()
    named: list[tuple[str, Any]] = [("target", target), *((draft.name, draft) for draft, _ in drafts)]
    borrows = frozenset(name for name, model in named if getattr(model, "borrows", False))
    seconds = time.perf_counter() - started
    return Loaded(
        settings, folder, target.card, tokenizer, target, drafts, thread, seconds, costs, _kv_of(named), borrows,
        **_ranks(decoder),
    )  # fmt: skip


def _ranks(decoder: Any) -> dict[str, Any]:
    """How to tell that a decoder of several ranks has failed, and to end them; nothing for any other decoder."""
    if not hasattr(decoder, "fault"):
        return {}
    return {"fault": lambda: decoder.fault, "closing": decoder.close}


def _kv_of(named: Sequence[tuple[str, Any]]) -> dict[str, HoldsKv]:
    return {name: model.kv for name, model in named if getattr(model, "kv", None) is not None}


def _measure(target: TargetModel, drafts: tuple[tuple[DraftModel, bool], ...]) -> dict[str, CostTable]:
    from sdcp_mono.runners.calibration import drafting_costs, pass_costs

    return {
        "target": pass_costs(target),
        **{model.name: drafting_costs(model, target) for model, instant in drafts if not instant},
    }


def _load_models(
    settings: ModelSettings, drafting: Settings | None, folder: ModelFolder, tokenizer: Tokenizer, progress: Progress
) -> tuple[Any, TargetModel, tuple[tuple[DraftModel, bool], ...]]:
    """On the thread that owns them from now on. Imports torch, which a router never needs."""
    from sdcp_mono.runners.blocks import BLOCK_SIZE
    from sdcp_mono.runners.loading import load_decoder
    from sdcp_mono.runners.paged import PagedModel
    from sdcp_mono.runners.target import TargetRunner

    def show(done: int, total: int) -> None:
        progress("Loading the target", done, total)

    ranks = settings.tensor_parallel if isinstance(settings, VerifierSettings) else 1
    decoder = load_decoder(folder.path, settings.dtype, settings.engine, settings.threads, show, ranks)
    context = min(settings.max_context or folder.card.context, folder.card.context, decoder.context)
    card = structs.replace(folder.card, context=context)
    identity = card.target + settings.dtype.encode()  # KV of other weights or another dtype is other KV
    blocks = settings.kv_memory_mb * 2**20 // (BLOCK_SIZE * decoder.kv_bytes_per_token)
    paged = PagedModel(decoder, identity, blocks=blocks, token_budget=settings.token_budget)
    if drafting is None:
        return decoder, TargetRunner(card, paged), ()
    lender = paged if drafting.share_kv else None
    drafts = tuple(_load_drafts(settings, drafting, folder, card, lender, tokenizer, progress))
    return decoder, TargetRunner(card, paged), drafts


def _load_drafts(
    settings: ModelSettings,
    drafting: DraftSettings,
    folder: ModelFolder,
    card: ModelCard,
    lender: Any,
    tokenizer: Tokenizer,
    progress: Progress,
) -> Iterator[tuple[DraftModel, bool]]:
    """The drafters in the order in which they are asked, with whether they are instant.

    ``lender``: the target whose KV a drafter may read, None where it isn't in this process.
    """
    from sdcp_mono.drafters import parse
    from sdcp_mono.drafters.detached import check_vocabulary, load_detached
    from sdcp_mono.drafters.ngram import MIN_MATCH, MIN_MATCH_BESIDE_MODEL, NgramDraft
    from sdcp_mono.drafters.quantized import can_share, load_beside, load_quantized
    from sdcp_mono.kernels import native

    # Without the compiled kernels an int4 pass isn't faster than the target's, so n-gram alone is the best default.
    specs = drafting.draft or (("ngram", "quantized") if native.available() else ("ngram",))
    kv_bytes = settings.kv_memory_mb * 2**20
    for spec, draft in [(spec, parse(spec)) for spec in specs]:  # a wrong one is told before any is loaded

        def show(done: int, total: int, spec: str = spec) -> None:
            progress(f"Loading drafter {spec}", done, total)

        if draft.kind == "ngram":
            yield NgramDraft(card.vocab_size, min_match=MIN_MATCH if len(specs) == 1 else MIN_MATCH_BESIDE_MODEL), True
        elif draft.kind == "quantized" and lender is not None and can_share(lender, settings.dtype):
            yield load_beside(lender, folder.path, card.target, threads=settings.threads, progress=show), False
        elif draft.kind == "quantized":
            yield load_quantized(
                folder.path, card.target, kv_bytes=kv_bytes, token_budget=settings.token_budget,
                engine=settings.engine, threads=settings.threads, progress=show,
            ), False  # fmt: skip
        elif draft.folder is not None:
            other = resolve(str(draft.folder), settings.data_dir, progress, dtype=settings.dtype)
            check_vocabulary(other.card, Tokenizer(other.path), card, tokenizer)
            yield load_detached(
                other.path, other.card, weights=settings.dtype, kv_bytes=kv_bytes, token_budget=settings.token_budget,
                engine=settings.engine, threads=settings.threads, progress=show,
            ), False  # fmt: skip
