"""The compiled matmul: values against float64, and one row's result whatever surrounds it."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sdcp_mono.kernels import native
from sdcp_mono.kernels.native import FORMATS, Buffer, Format, Weight

pytestmark = pytest.mark.skipif(not native.available(), reason="the kernels aren't compiled here")

Floats = npt.NDArray[np.float32]
ISAS = ("", "amx", "avx512bf16", "avx2", "generic")  # "": the machine's best; one it lacks falls to what it has
SHAPES = ((1, 1), (5, 40), (33, 31), (97, 100), (64, 96), (131, 577), (32, 1536))  # n, k
ROWS = (*range(1, 34), 47, 64)


@pytest.fixture(params=ISAS)
def lib(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """A copy of the library of its own, since it chooses its instruction set when it is loaded."""
    if request.param:
        monkeypatch.setenv("SDCP_ISA", request.param)
    path = tmp_path / "kernels.so"
    shutil.copy(native.LIBRARY, path)
    lib = ctypes.CDLL(str(path))
    native._declare(lib)
    lib.sdcp_pool_start(3)
    yield lib
    lib.sdcp_pool_stop()


def aligned(size: int) -> npt.NDArray[np.uint8]:
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class Packed:
    def __init__(self, lib: ctypes.CDLL, format: Format, w: Floats) -> None:
        (self.n, self.k), self.lib, self.code = w.shape, lib, FORMATS[format]
        self.memory = aligned(lib.sdcp_packed_bytes(self.code, self.n, self.k))
        lib.sdcp_pack(self.code, w.ctypes.data, self.n, self.k, self.memory.ctypes.data)
        self.weight = Weight(self.code, self.n, self.k, 0, self.memory.ctypes.data)

    def unpack(self) -> Floats:
        out = np.empty((self.n, self.k), np.float32)
        for row in range(self.n):
            self.lib.sdcp_unpack_row(self.weight, row, out[row].ctypes.data)
        return out

    def __call__(self, x: Floats) -> Floats:
        x = np.ascontiguousarray(x)
        y = np.full((len(x), self.n), np.nan, np.float32)
        assert self.lib.sdcp_matmul(self.weight, x.ctypes.data, y.ctypes.data, len(x)) == 0
        return y

    def parts(self, x: Floats, threads: int, residual: Floats | None = None) -> Floats:
        """The parts of all threads one after another, into a y with a margin that must stay as it is."""
        rows = len(x)
        scratch = aligned(max(self.lib.sdcp_scratch_bytes(self.code, self.k, rows), 64))
        y = np.full((rows, self.n + 3), 7, np.float32)
        if residual is not None:
            y[:, : self.n] = residual
        for t in range(threads):
            self.lib.sdcp_prepare_part(self.code, x.ctypes.data, self.k, self.k, rows, scratch.ctypes.data, t, threads)
        part = self.lib.sdcp_matmul_part if residual is None else self.lib.sdcp_matmul_add_part
        for t in range(threads):
            part(self.weight, x.ctypes.data, self.k, y.ctypes.data, self.n + 3, rows, scratch.ctypes.data, t, threads)
        assert (y[:, self.n :] == 7).all()
        return y[:, : self.n]


def bfloat16(x: Floats) -> Floats:
    """To nearest even, by integer arithmetic."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def int8_rows(x: Floats) -> npt.NDArray[np.float64]:
    out = np.zeros(x.shape)
    for start in range(0, x.shape[1], 32):
        group = x[:, start : start + 32]
        largest = np.abs(group).max(axis=1, keepdims=True)
        q = np.rint(group * (np.float32(127) / largest))
        out[:, start : start + 32] = q.astype(np.float64) * (largest / np.float32(127))
    return out


def sample(seed: int, n: int, k: int, rows: int) -> tuple[Floats, Floats]:
    random = np.random.default_rng(seed)
    w = random.standard_normal((n, k), dtype=np.float32) * np.float32(0.05)
    x = random.standard_normal((rows, k), dtype=np.float32)
    return w, x * np.exp(random.standard_normal((rows, 1), dtype=np.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matmul_equals_float64_on_the_rounded_operands(lib: ctypes.CDLL, format: Format, n: int, k: int) -> None:
    w, x = sample(n, n, k, 19)
    packed = Packed(lib, format, w)
    operand = {"float32": x, "bfloat16": bfloat16(x)}.get(format)
    expected = (int8_rows(x) if operand is None else operand).astype(np.float64) @ packed.unpack().astype(np.float64).T
    assert np.linalg.norm(packed(x) - expected) <= 2e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(("format", "most"), [("float32", 0.0), ("bfloat16", 0.0017), ("int8", 0.005), ("int4", 0.08)])
def test_packing_keeps_the_weights(lib: ctypes.CDLL, format: Format, most: float) -> None:
    w, _ = sample(1, 100, 330, 1)
    error = np.linalg.norm(Packed(lib, format, w).unpack() - w) / np.linalg.norm(w)
    assert error <= most
    if format == "bfloat16":
        assert (Packed(lib, format, w).unpack() == bfloat16(w)).all()


def test_int4_keeps_q4_1_weights_exactly(lib: ctypes.CDLL) -> None:
    """GGUF's Q4_1 is float16 scale * q + float16 minimum per 32, its quantiser uses q = 0 and q = 15 in each group."""
    random = np.random.default_rng(2)
    q = random.integers(0, 16, (40, 3, 32))
    q[:, :, 0], q[:, :, 1] = 0, 15
    scale = np.float16(random.uniform(0.001, 0.02, (40, 3, 1))).astype(np.float32)
    minimum = np.float16(random.uniform(-0.1, -0.01, (40, 3, 1))).astype(np.float32)
    w = np.ascontiguousarray((q.astype(np.float32) * scale + minimum).reshape(40, 96))
    assert np.abs(Packed(lib, "int4", w).unpack() - w).max() <= 2e-8


def test_bfloat16_source_packs_as_its_float32(lib: ctypes.CDLL) -> None:
    w, x = sample(3, 70, 100, 4)
    w = bfloat16(w)
    source = (w.view(np.uint32) >> 16).astype(np.uint16)
    for format, code in FORMATS.items():
        packed = Packed(lib, format, w)
        expected = packed(x)
        packed.memory[:] = 0
        lib.sdcp_pack_bf16(code, source.ctypes.data, 70, 100, packed.memory.ctypes.data)
        assert (packed(x) == expected).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_batch_invariance_rows_alone_and_together(lib: ctypes.CDLL, format: Format, n: int, k: int) -> None:
    w, x = sample(k, n, k, 521)
    packed = Packed(lib, format, w)
    whole = packed(x)
    for rows in ROWS:
        for start in (0, 5, 521 - rows):
            assert (packed(x[start : start + rows]) == whole[start : start + rows]).all(), rows


@pytest.mark.parametrize("format", FORMATS)
def test_batch_invariance_over_threads(lib: ctypes.CDLL, format: Format) -> None:
    w, x = sample(4, 289, 200, 9)
    packed = Packed(lib, format, w)
    one = packed.parts(x, 1)
    assert (packed(x) == one).all()
    for threads in (2, 3, 7, 16):  # 10 panels: some threads have none
        assert (packed.parts(x, threads) == one).all()


@pytest.mark.parametrize("format", FORMATS)
def test_add_part_adds_the_rounded_product(lib: ctypes.CDLL, format: Format) -> None:
    w, x = sample(5, 77, 130, 14)
    residual = sample(6, 14, 77, 1)[0]
    packed = Packed(lib, format, w)
    assert (packed.parts(x, 2, residual) == residual + packed(x)).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_spoils_no_other(lib: ctypes.CDLL, format: Format, value: float) -> None:
    w, x = sample(7, 50, 64, 8)
    packed = Packed(lib, format, w)
    expected = packed(x)
    x[3, 11] = value
    y = packed(x)
    assert not np.isfinite(y[3]).any()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert (y[others] == expected[others]).all()


def test_zero_rows_and_constant_groups(lib: ctypes.CDLL) -> None:
    w = np.full((3, 40), 0.25, np.float32)
    w[1] = 0
    for format in FORMATS:
        packed = Packed(lib, format, w)
        x = np.ones((2, 40), np.float32)
        x[1] = 0
        assert packed(x).tolist() == [[pytest.approx(10, rel=1e-6), 0, pytest.approx(10, rel=1e-6)], [0, 0, 0]]


def test_isa_is_lowered_by_the_environment(lib: ctypes.CDLL) -> None:
    lowered = os.environ.get("SDCP_ISA")
    chosen = [lib.sdcp_isa(code).decode() for code in FORMATS.values()]
    if lowered in ("avx2", "generic"):
        assert set(chosen) <= {"avx2", "generic"}
    if lowered == "generic":
        assert set(chosen) == {"generic"}
    assert lowered != "avx512bf16" or "amx" not in chosen


def test_buffer_is_zeroed_and_aligned() -> None:
    buffer = Buffer(3_000_000)
    assert buffer.address % (2 << 20) == 0
    assert not any(ctypes.string_at(buffer.address, 3_000_000))
