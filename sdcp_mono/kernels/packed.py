"""Inference-only replacement of ``nn.Linear`` over packed weights.

What is guaranteed: with the compiled kernels a row's result is the same to the bit alone, among any other rows, at any
place among them and with any number of threads. With the torch fallback every matmul has the same shape (``TILE_ROWS``
rows, padded with zeros), so a row's result depends on nothing else either as far as torch's matmul treats the rows of
one shape alike: its backends sum each element over k in an order that the shape decides, but they don't promise it.

Numerics of both: float32 accumulation; ``bfloat16`` rounds weights and activations to bfloat16; ``int8`` and ``int4``
hold ``scale * q + minimum`` per 32 weights (q of 8 or 4 bits, float16 scale and minimum) and round activations to int8
with one scale per row and 32 values. The two differ by the order of sums only: 1e-5 of the result's norm.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdcp_mono.kernels import native
from sdcp_mono.kernels.native import FORMATS, Buffer, Format, Weight, available

__all__ = ["FORMATS", "Format", "PackedLinear", "available", "pack_linears"]

GROUP: Final = 32  # weights or activations that share a scale (SDCP_GROUP)
TILE_ROWS: Final = 16  # fallback: rows of every matmul. One row pays for 16, which cost a CPU about 1.5 times one


def _groups(x: Tensor) -> Tensor:
    """[rows, k] as [rows, groups, 32], the last group padded with its last value: that changes no extreme."""
    missing = -x.shape[-1] % GROUP
    if missing:
        x = torch.cat([x, x[:, -1:].expand(-1, missing)], dim=1)
    return x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP)  # no -1: there may be no rows


def round_weight(weight: Tensor, format: Format) -> Tensor:
    """What a packed weight [n, k] multiplies with, as float32: ``sdcp_pack`` in torch."""
    weight = weight.detach().float()
    if format == "float32":
        return weight.clone()
    if format == "bfloat16":
        return weight.bfloat16().float()
    levels = 255 if format == "int8" else 15
    grouped = _groups(weight)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale, minimum = ((high - low) / levels).half().float(), low.half().float()
    q = torch.where(scale > 0, ((grouped - minimum) / scale).round(), 0.0).clamp(0, levels)
    return (scale * q + minimum).flatten(1)[:, : weight.shape[1]].contiguous()


def round_activations(x: Tensor, format: Format) -> Tensor:
    """What the kernels multiply with instead of x [rows, k], as float32: ``sdcp_prepare_rows`` in torch."""
    if format == "float32":
        return x
    if format == "bfloat16":
        return x.bfloat16().float()
    grouped = _groups(x)
    largest = grouped.abs().amax(-1, keepdim=True)
    q = torch.where(largest > 0, (grouped * (127.0 / largest)).round(), 0.0)
    return (q * (largest / 127.0)).flatten(1)[:, : x.shape[1]]


class PackedLinear(nn.Module):
    """y = x W^T + bias for W [out_features, in_features] packed once in ``format``. No gradients, no state dict.

    x is [..., in_features] in any floating dtype; y has x's leading shape and dtype, rounded from float32 after the
    bias. ``buffer`` and ``offset`` place the weight in memory shared with others (``native.packed_bytes``).
    Raises ``ValueError`` for a format that doesn't exist or a weight that isn't a matrix of floats on the CPU.
    """

    bias: Tensor | None
    _packed: Weight | None  # with the compiled kernels
    _rounded: Tensor | None  # without

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        format: Format = "bfloat16",
        *,
        buffer: Buffer | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__()
        if format not in FORMATS:
            raise ValueError(f"format: {format!r} is none of {', '.join(FORMATS)}")
        if weight.ndim != 2 or 0 in weight.shape or not weight.is_floating_point() or weight.device.type != "cpu":
            found = f"{tuple(weight.shape)} {weight.dtype} on {weight.device}"
            raise ValueError(f"weight: {found} is not a matrix of floats on the CPU")
        self.out_features, self.in_features = weight.shape
        self.format: Format = format
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)
        self._packed = self._rounded = None
        if available():
            self._packed = self._pack(weight.detach(), buffer, offset)
        else:
            self._rounded = round_weight(weight, format)

    def _pack(self, weight: Tensor, buffer: Buffer | None, offset: int) -> Weight:
        lib = native.library()
        self._buffer = buffer or Buffer(native.packed_bytes(self.format, self.out_features, self.in_features))
        packed = Weight(FORMATS[self.format], self.out_features, self.in_features, 0, self._buffer.address + offset)
        if weight.dtype != torch.bfloat16:
            weight = weight.float()
        weight = weight.contiguous()
        pack = lib.sdcp_pack_bf16 if weight.dtype == torch.bfloat16 else lib.sdcp_pack
        pack(packed.format, weight.data_ptr(), packed.n, packed.k, packed.data)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x: last dimension {x.shape[-1]} is not in_features {self.in_features}")
        rows = x.detach().reshape(-1, self.in_features).float().contiguous()
        y = self._native(rows, self._packed) if self._packed is not None else self._fallback(rows)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _native(self, x: Tensor, packed: Weight) -> Tensor:
        y = torch.empty(x.shape[0], self.out_features)
        if len(x) and native.library().sdcp_matmul(ctypes.byref(packed), x.data_ptr(), y.data_ptr(), x.shape[0]):
            raise MemoryError(f"scratch for {x.shape[0]} rows of {self.in_features}")
        return y

    def _fallback(self, x: Tensor) -> Tensor:
        assert self._rounded is not None
        count = x.shape[0]
        x = F.pad(round_activations(x, self.format), (0, 0, 0, -count % TILE_ROWS))
        y = torch.empty(len(x), self.out_features)
        for start in range(0, len(x), TILE_ROWS):
            y[start : start + TILE_ROWS] = F.linear(x[start : start + TILE_ROWS], self._rounded)
        return y[:count]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


def pack_linears(model: nn.Module, format: Format) -> int:
    """Replace every ``nn.Linear`` inside ``model`` in place; returns how many there were.

    A head that shares its weight with the embedding is packed too and the embedding keeps its own. One module used in
    two places stays one. Subclasses of ``nn.Linear`` (adapters, other quantisers) are left alone.
    """
    if format not in FORMATS:
        raise ValueError(f"format: {format!r} is none of {', '.join(FORMATS)}")
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    # One buffer: every buffer takes whole huge pages, of 2 MiB.
    sizes = [native.packed_bytes(format, m.out_features, m.in_features) if available() else 0 for m in linears]
    buffer = Buffer(sum(sizes)) if available() and linears else None
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {linear: [] for linear in linears}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in places:
                places[child].append((parent, name))
    count, offset = len(linears), 0
    while linears:
        linear = linears.pop()
        packed = PackedLinear(linear.weight, linear.bias, format, buffer=buffer, offset=offset)
        packed.train(linear.training)
        for parent, name in places.pop(linear):
            setattr(parent, name, packed)  # frees the old weight, so that both copies never exist in full
        offset += sizes.pop()
    return count
