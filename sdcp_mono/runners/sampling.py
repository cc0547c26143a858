"""From logits to tokens: the sampling profile as a distribution, and draws from it (sections 4.1 and 6.4).

Every step maps a distribution to a distribution: temperature, then top-k, then top-p (AMB-026). Ties go to the smallest
id (AMB-024). All of it is float64 on the host (AMB-027), from the model's float32 logits, which must be finite. Edges:

- ``temperature_milli`` absent or 1000: softmax (AMB-022); 0: the single best token.
- ``top_k`` absent, 0 or >= V: all tokens (AMB-023).
- ``top_p_milli`` absent or 1000: all tokens; else the smallest set of best tokens with at least that mass, at least one
  token (AMB-025). ``SLACK`` of rounding is allowed for, so that a boundary hit exactly in theory is hit here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from sdcp_mono.core.messages import UNSET, Sampling

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Row = npt.NDArray[np.floating[Any]]  # (V,) logits

SLACK: Final = 1e-12
CANDIDATES: Final = 1024
"""How many of the best tokens are sorted first: top-p usually ends among them, otherwise everything is sorted."""


def best(logits: torch.Tensor) -> Ids:
    """The most probable token of each row of (R, V) logits, the smallest id on ties."""
    # Both take the first maximum; on a CPU numpy's is 5 to 30 times as fast.
    found: Ids = logits.numpy().argmax(-1) if logits.device.type == "cpu" else logits.argmax(-1).cpu().numpy()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of tokens, float64 and not negative: a distribution where they sum to 1.

    ``ids`` ascend; None stands for all tokens. What top-k and top-p leave is a few hundred of V tokens, so that
    everything after them costs next to nothing.
    """

    values: Floats
    ids: Ids | None = None

    def of(self, token: int) -> float:
        if self.ids is None:
            return float(self.values[token])
        at = int(np.searchsorted(self.ids, token))
        return float(self.values[at]) if at < len(self.ids) and self.ids[at] == token else 0.0

    def draw(self, u: float) -> int:
        """The smallest id whose cumulative weight exceeds u * total, u in [0, 1) (AMB-128)."""
        sums = np.cumsum(self.values)
        at = int(np.searchsorted(sums, u * sums[-1], side="right"))
        if at == len(sums):  # u * total was rounded up to the total
            at = int(np.flatnonzero(self.values)[-1])
        return at if self.ids is None else int(self.ids[at])


def distribution(row: Row, sampling: Sampling) -> Weights:
    """p of one row of finite logits, (V,), under a profile."""
    inverse = _inverse_temperature(sampling)
    kept = _kept(row, sampling, inverse)
    weights = _exponentials(row if kept is None else row[kept], row.max(), inverse)
    weights /= weights.sum()
    return Weights(weights, kept)


def distributions(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """p of every row of (R, V) logits under that row's profile: (R, V) float64 on the host; rows sum to 1."""
    p = np.zeros(logits.shape)
    for target, row, sampling in zip(p, logits.detach().cpu().numpy(), samplings, strict=True):
        found = distribution(row, sampling)
        target[slice(None) if found.ids is None else found.ids] = found.values
    return torch.from_numpy(p)


def draw(weights: torch.Tensor, u: Sequence[float]) -> Ids:
    """One token per row of (R, V) weights, each from one uniform value in [0, 1); rows needn't sum to 1."""
    rows = weights.double().numpy()
    return np.asarray([Weights(row).draw(value) for row, value in zip(rows, u, strict=True)], np.int64)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Natural logarithms of the model's own probabilities, before any profile: (R, V) float64 on the host."""
    return torch.log_softmax(logits.detach().cpu().double(), dim=-1)


def best_ids(row: Row, count: int) -> Ids:
    """The ``count`` largest entries' ids, ascending; among equal entries the smallest ids."""
    return _at_least(row, _descending(row, count)[-1], count)


def _kept(row: Row, sampling: Sampling, inverse: float) -> Ids | None:
    """Ids that the profile leaves, ascending; None where it leaves all.

    Order is that of the logits: temperature doesn't change it, and tokens are tied only where their logits are equal.
    """
    if sampling.temperature_milli == 0:
        return np.asarray([row.argmax()])
    size = len(row)
    k = size if sampling.top_k is UNSET or not 0 < sampling.top_k < size else sampling.top_k
    if sampling.top_p_milli is UNSET or sampling.top_p_milli == 1000:
        return None if k == size else best_ids(row, k)
    top = _descending(row, k if k < size else min(size, CANDIDATES))
    mass = np.cumsum(_exponentials(top, top[0], inverse))
    # top-p is relative to what top-k left (AMB-026): to everything where there is no top-k.
    total = mass[-1] if k < size else _exponentials(row, top[0], inverse).sum()
    wanted = (sampling.top_p_milli / 1000 - SLACK) * total
    if mass[-1] < wanted:
        top = _descending(row, size)
        mass = np.cumsum(_exponentials(top, top[0], inverse))
    count = min(int(np.searchsorted(mass, wanted)) + 1, k)
    return _at_least(row, top[count - 1], count)


def _inverse_temperature(sampling: Sampling) -> float:
    milli = 1000 if sampling.temperature_milli is UNSET else sampling.temperature_milli
    return 1000.0 / milli if milli else 1.0


def _descending(row: Row, count: int) -> Row:
    """The ``count`` largest entries in descending order."""
    largest = row if count == len(row) else np.partition(row, len(row) - count)[len(row) - count :]
    return np.sort(largest)[::-1]


def _exponentials(row: Row, largest: Any, inverse: float) -> Floats:
    values = row.astype(np.float64)
    values -= largest  # <= 0, so that no exponential overflows
    values *= inverse
    return np.exp(values, out=values)


def _at_least(row: Row, threshold: Any, count: int) -> Ids:
    """Ids of ``count`` entries >= threshold, ascending; entries equal to it are taken from the smallest id on."""
    ids = np.flatnonzero(row >= threshold)
    if len(ids) > count:
        tied = row[ids] == threshold
        surplus = ids[tied][count - int((~tied).sum()) :]
        ids = ids[~np.isin(ids, surplus)]
    return ids


def finite_rows(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Which rows of (R, V) logits hold neither NaN nor an infinity."""
    if logits.device.type == "cpu":  # numpy's reductions are an order of magnitude faster than torch's here
        values = logits.numpy()
        return np.asarray(np.isfinite(values.max(-1)) & np.isfinite(values.min(-1)))
    low, high = torch.aminmax(logits, dim=-1)
    return np.asarray((torch.isfinite(low) & torch.isfinite(high)).cpu().numpy())
