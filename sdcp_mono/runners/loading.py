"""Which decoder runs a checkpoint: our own fused pass for the shapes it knows, transformers for everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from sdcp_mono.kernels import native
from sdcp_mono.runners import fused
from sdcp_mono.runners.decoder import Decoder

Engine = Literal["auto", "fused", "hf"]


def load_decoder(
    folder: Path,
    weights: native.Format,
    engine: Engine = "auto",
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
    ranks: int = 1,
) -> Decoder:
    """The decoder for a Hugging Face folder, its weights in the given format. ``threads`` 0: one a core.

    ``ranks`` > 1: a ``ParallelDecoder``, which is to be closed. Raises ``ValueError`` for a model that can't be run, or
    not by the engine or the ranks that were asked for.
    """
    if ranks > 1:
        return _load_parallel(folder, weights, engine, threads, ranks)
    known = fused.supports(json.loads((folder / "config.json").read_text()))
    if engine == "fused" and not (known and native.available()):
        why = "the kernels were not built" if known else "its architecture isn't one the fused pass knows"
        raise ValueError(f"engine: {folder.name} can't be run fused: {why}; use engine auto")
    threads = threads or native.default_threads()
    if known and engine != "hf" and native.available():
        torch.set_num_threads(1)  # the kernels have a pool of their own; two busy pools fight for the cores
        return fused.FusedDecoder.from_pretrained(folder, weights, threads, progress)
    from sdcp_mono.runners.hf import HfDecoder  # transformers takes seconds and memory: only where it is needed

    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    if native.available():
        torch.set_num_threads(1)
        native.set_threads(threads)
        return HfDecoder.load(folder, dtype=dtype, pack=weights)
    torch.set_num_threads(threads)
    if weights in ("int8", "int4"):
        return HfDecoder.load(folder, dtype=dtype, pack=weights)
    return HfDecoder.load(folder, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")


def _load_parallel(folder: Path, weights: native.Format, engine: Engine, threads: int, ranks: int) -> Decoder:
    if engine == "fused":
        raise ValueError("engine: the fused pass has one rank; use engine auto")
    if weights not in ("float32", "bfloat16"):
        raise ValueError(f"weights: {weights} is for one rank; several take float32 or bfloat16")
    from sdcp_mono.runners.parallel import ParallelDecoder

    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    return ParallelDecoder(folder, ranks=ranks, dtype=dtype, threads=threads or native.default_threads())
