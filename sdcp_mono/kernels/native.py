"""The compiled kernels (``csrc/sdcp_kernels.h``) through ctypes: loading, threads, packed weights.

ctypes releases the GIL for the length of each call.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache
from pathlib import Path
from typing import Final, Literal

Format = Literal["float32", "bfloat16", "int8", "int4"]
FORMATS: Final[dict[Format, int]] = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}

ENVIRONMENT: Final = "SDCP_KERNELS"  # "torch": behave as if the library hadn't been built
LIBRARY: Final = Path(__file__).with_name("_sdcp_kernels.so")


class Weight(ctypes.Structure):
    """``sdcp_weight``: a packed weight [n, k]; the memory behind ``data`` belongs to a ``Buffer``."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    )


def _declare(lib: ctypes.CDLL) -> None:
    integer, size, pointer, weight = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(Weight)
    for name, result, arguments in (
        ("sdcp_pool_start", integer, (integer,)),
        ("sdcp_pool_threads", integer, ()),
        ("sdcp_alloc", pointer, (size,)),
        ("sdcp_free", None, (pointer, size)),
        ("sdcp_packed_bytes", size, (integer, integer, integer)),
        ("sdcp_pack", None, (integer, pointer, integer, integer, pointer)),
        ("sdcp_pack_bf16", None, (integer, pointer, integer, integer, pointer)),
        ("sdcp_unpack_row", None, (weight, integer, pointer)),
        ("sdcp_scratch_bytes", size, (integer, integer, integer)),
        ("sdcp_prepare_part", None, (integer, pointer, integer, integer, integer, pointer, integer, integer)),
        ("sdcp_matmul_part", None, (weight, pointer, integer, pointer, *(integer,) * 2, pointer, *(integer,) * 2)),
        ("sdcp_matmul_add_part", None, (weight, pointer, integer, pointer, *(integer,) * 2, pointer, *(integer,) * 2)),
        ("sdcp_matmul", integer, (weight, pointer, pointer, integer)),
        ("sdcp_isa", ctypes.c_char_p, (integer,)),
        ("sdcp_measure_read", ctypes.c_double, (pointer, size)),
        ("sdcp_measure_pass", ctypes.c_double, (weight, integer, pointer, pointer, integer)),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


def default_threads() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _load() -> ctypes.CDLL | None:
    try:
        lib = ctypes.CDLL(str(LIBRARY))
        _declare(lib)
    except (OSError, AttributeError):  # not built, built for another machine, or left over from another version
        return None
    lib.sdcp_pool_start(default_threads())
    return lib


def available() -> bool:
    """Whether the compiled kernels are used: they are built and ``SDCP_KERNELS=torch`` isn't set."""
    return os.environ.get(ENVIRONMENT) != "torch" and _load() is not None


def library() -> ctypes.CDLL:
    """The library, its pool started with ``default_threads()``. Raises ``RuntimeError`` if it isn't ``available()``."""
    lib = _load() if available() else None
    if lib is None:
        raise RuntimeError(f"kernels unavailable: {LIBRARY.name} can't be loaded or {ENVIRONMENT}=torch is set")
    return lib


def set_threads(threads: int) -> int:
    """Size of the process-wide pool, its caller included; returns what the system granted. Results don't depend on it.

    Meant for start-up; later it waits for the pass that runs. Raises ``ValueError`` below 1.
    """
    if threads < 1:
        raise ValueError(f"threads: {threads} is less than 1")
    granted: int = library().sdcp_pool_start(threads)
    return granted


def threads() -> int:
    """Size of the pool."""
    count: int = library().sdcp_pool_threads()
    return count


def isa(format: Format) -> str:
    """The instruction set in use for a format: "amx", "avx512bf16", "avx512vnni", "avx512", "avx2" or "generic"."""
    name: bytes = library().sdcp_isa(FORMATS[format])
    return name.decode()


def packed_bytes(format: Format, n: int, k: int) -> int:
    """Bytes of a packed [n, k] weight, a multiple of 64."""
    size: int = library().sdcp_packed_bytes(FORMATS[format], n, k)
    return size


class Buffer:
    """Zeroed memory on huge pages. Freed with the last reference; whoever keeps an address keeps the buffer."""

    def __init__(self, size: int) -> None:
        lib = library()
        address: int | None = lib.sdcp_alloc(max(size, 1))
        if address is None:
            raise MemoryError(f"{size} bytes for packed weights")
        self.address = address
        self.size = size
        self._free = weakref.finalize(self, lib.sdcp_free, address, max(size, 1))
        self._free.atexit = False  # a pass may still run in another thread; the system frees it
