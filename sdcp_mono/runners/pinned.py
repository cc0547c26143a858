"""Host memory that a GPU reads and writes by itself; of other memory the driver makes a copy first."""

from __future__ import annotations

from typing import Any

import torch


def pinned(size: int) -> memoryview:
    """``size`` writable bytes from a page boundary on, page-locked until nothing refers to them any more.

    Raises ``MemoryError`` where the system has no more that may be locked.
    """
    try:
        pages: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        raise MemoryError(f"pinned memory: {error}") from error
    return memoryview(pages)
