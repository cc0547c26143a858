"""The drafter's distributions for one proposal: what ``q_rows`` names (section 5.2).

Either dense rows or *point masses*: a drafter that always proposes the same token after the same prefix (n-gram) has
q = 1 there and 0 elsewhere, which needs no V numbers per position.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sdcp_mono.core.ports import RowsProblem
from sdcp_mono.runners.sampling import Weights

SUM_TOLERANCE: Final = 1e-3
"""How far a row's sum may be from 1 (AMB-133)."""


@dataclass(frozen=True, slots=True, eq=False)
class QRows:
    """M rows over V tokens: ``rows`` (M, V) float32 on the host, or None for point masses on ``points``."""

    vocab_size: int
    rows: torch.Tensor | None = None
    points: tuple[int, ...] = ()

    @classmethod
    def dense_rows(cls, rows: torch.Tensor) -> QRows:
        """From (M, V) probabilities; rounded to binary32, which is then what must be drawn from."""
        return cls(rows.shape[1], rows.detach().to("cpu", torch.float32).contiguous())

    @classmethod
    def point_masses(cls, tokens: Sequence[int], vocab_size: int) -> QRows:
        return cls(vocab_size, None, tuple(tokens))

    @classmethod
    def from_bytes(cls, data: bytes, m: int, v: int) -> QRows:
        """Row-major little-endian binary32. Raises ``RowsProblem``: too short is unavailable, too long is bad."""
        expected = m * v * 4
        if len(data) != expected:
            raise RowsProblem(
                f"q_rows: {len(data)} octets, expected {expected} for {m} rows of {v}", unavailable=len(data) < expected
            )
        return cls(v, torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32).reshape(m, v)))

    def __len__(self) -> int:
        return len(self.points) if self.rows is None else self.rows.shape[0]

    @property
    def nbytes(self) -> int:
        """Of ``to_bytes``, without making them."""
        return len(self) * self.vocab_size * 4

    def of(self, i: int, token: int) -> float:
        """q[i](token), i from 0."""
        return float(self.points[i] == token) if self.rows is None else float(self.rows[i, token])

    def dense(self, i: int) -> torch.Tensor:
        """Row i, (V,) float32."""
        if self.rows is not None:
            return self.rows[i]
        row = torch.zeros(self.vocab_size)
        row[self.points[i]] = 1.0
        return row

    def residual(self, i: int, p: Weights) -> Weights:
        """max(0, p - q[i]), not normalised; p itself where nothing is left (AMB-140)."""
        if self.rows is None:
            tokens = np.arange(self.vocab_size) if p.ids is None else p.ids
            left = np.where(tokens == self.points[i], 0.0, p.values)  # p - 1 <= 0
        else:
            row = self.rows[i].numpy()
            left = np.maximum(p.values - (row if p.ids is None else row[p.ids]), 0.0)
        return Weights(left, p.ids) if left.any() else p

    def to_bytes(self) -> bytes:
        """Row-major little-endian binary32, M * V * 4 octets."""
        if self.rows is None:
            row = bytes(self.vocab_size * 4)
            one = struct.pack("<f", 1.0)
            return b"".join(row[: t * 4] + one + row[t * 4 + 4 :] for t in self.points)
        return self.rows.numpy().astype("<f4", copy=False).tobytes()

    def check(self, tokens: Sequence[int], v: int) -> None:
        """Refuse rows that can't be the ones these tokens were drawn from; raises ``RowsProblem``."""
        if v != self.vocab_size or len(self) > len(tokens):
            raise RowsProblem(
                f"q_rows: {len(self)} rows of {self.vocab_size}, expected {len(tokens)} of {v}", unavailable=False
            )
        if len(self) < len(tokens):  # AMB-134
            raise RowsProblem(f"q_rows: {len(self)} rows for {len(tokens)} tokens", unavailable=True)
        if self.rows is not None:  # AMB-133; NaN fails both comparisons, infinity the second
            rows = self.rows.numpy()
            with np.errstate(invalid="ignore"):  # infinity minus infinity is a finding, not news for the log
                sums = rows.sum(-1, dtype=np.float64)
            fine = (rows.min(-1, initial=0.0) >= 0.0) & (np.abs(sums - 1.0) <= SUM_TOLERANCE)
            if not fine.all():
                raise RowsProblem(f"q_rows: row {int(np.argmin(fine)) + 1} is not a distribution", unavailable=False)
        for i, token in enumerate(tokens):
            if not (0 <= token < v and self.of(i, token) > 0.0):
                raise RowsProblem(f"q_rows: token {i + 1} has q = 0 in its own row", unavailable=False)
