"""Host memory for GPUs: which models get it, and what a refusal is; the copying itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sdcp_mono.cache.host import anonymous
from sdcp_mono.compose.storage import _memory
from sdcp_mono.runners.pinned import pinned


@pytest.mark.parametrize(("on_gpu", "memory"), [([], anonymous), ([False, False], anonymous), ([False, True], pinned)])
def test_host_memory_is_pinned_where_a_model_is_on_a_gpu(on_gpu: list[bool], memory: Any) -> None:
    models: dict[str, Any] = {str(number): SimpleNamespace(on_gpu=there) for number, there in enumerate(on_gpu)}
    assert _memory(models) is memory


def test_what_can_not_be_pinned_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the host tier takes as a refusal: it goes on with what it has."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(MemoryError, match="out of memory"):
        pinned(4096)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_memory_is_whole_pages_that_can_be_written() -> None:
    memory = pinned(1 << 20)
    array = np.frombuffer(memory, np.uint8)
    assert (len(memory), memory.readonly, array.ctypes.data % 4096) == (1 << 20, False, 0)
