"""q rows: bytes, look-up, residual, and what is refused (5.2, AMB-133 to 135)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdcp_mono.core.ports import RowsProblem
from sdcp_mono.runners.rows import QRows
from sdcp_mono.runners.sampling import Weights

# The q_rows vector: struct "<f" per value at offset (k * V + v) * 4.
ROWS = [[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]
HEX = "0000003f0000803e0000003e0000003ecdcccc3dcdcc4c3e9a99993ecdcccc3e"


def test_sdcp_072_m_rows_of_v_little_endian_binary32() -> None:
    rows = QRows.from_bytes(bytes.fromhex(HEX), 2, 4)
    assert rows.of(1, 2) == 0.30000001192092896
    assert rows.dense(0).tolist() == ROWS[0]
    assert rows.to_bytes().hex() == HEX
    assert QRows.dense_rows(torch.tensor(ROWS)).to_bytes().hex() == HEX
    rows.check([0, 3], 4)


@pytest.mark.parametrize(
    ("data", "tokens", "unavailable"),
    [
        ("0000003f0000803e0000003e0000003e", [0, 1], True),
        (HEX + "0000003f", [0, 1], False),
        ("0000003f0000803e0000003e0000003e0000c07f0000003f0000803e0000803e", [0, 1], False),
        ("0000003f0000803e0000003e0000003e0000003f000000000000803e0000803e", [0, 1], False),
        ("0000003f0000803e0000003e0000003e000080be0000403f0000803e0000803e", [0, 1], False),
        ("0000003f0000803e0000003e0000003e0000003f0000003f0000003f0000003f", [0, 1], False),
        ("", [0, 1], True),
        ("0000003f0000803e0000003e0000003e0000807f000000000000000000000000", [0, 0], False),
        ("0000003f0000803e0000003e0000003e0000003f0000003f0000c07f00000000", [0, 0], False),
        ("0000003f0000803e0000003e0000003e0000807f000080ff0000003f0000003f", [0, 2], False),
        ("0000003f0000803e0000003e0000003e0000003f0000003f0000003f000000bf", [0, 0], False),
    ],
    ids=[
        "short",
        "long",
        "nan at token",
        "zero at token",
        "negative",
        "sum 2",
        "empty",
        "infinite",
        "nan elsewhere",
        "infinite both ways",
        "negative elsewhere, sum 1",
    ],
)
def test_amb_133_134_rows_that_no_token_was_drawn_from(data: str, tokens: list[int], unavailable: bool) -> None:
    with pytest.raises(RowsProblem) as caught:
        QRows.from_bytes(bytes.fromhex(data), 2, 4).check(tokens, 4)
    assert caught.value.unavailable is unavailable


def test_sdcp_193_rows_know_their_size_without_being_bytes() -> None:
    """So that in one process nothing is copied (``cache/memory.py`` counts by it)."""
    for rows in (QRows.dense_rows(torch.tensor(ROWS)), QRows.point_masses([2, 0, 1], 4)):
        assert rows.nbytes == len(rows.to_bytes())


def test_rows_in_process_are_checked_for_number_and_width() -> None:
    rows = QRows.dense_rows(torch.tensor(ROWS))
    for tokens, v, unavailable in (([0, 0, 0], 4, True), ([0], 4, False), ([0, 0], 5, False), ([0, 4], 4, False)):
        with pytest.raises(RowsProblem) as caught:
            rows.check(tokens, v)
        assert caught.value.unavailable is unavailable


def test_amb_133_a_row_sums_to_1_within_a_thousandth() -> None:
    QRows.dense_rows(torch.tensor([[0.5, 0.5009]])).check([0], 2)
    with pytest.raises(RowsProblem):
        QRows.dense_rows(torch.tensor([[0.5, 0.5011]])).check([0], 2)


def test_point_masses_equal_their_dense_rows() -> None:
    points = QRows.point_masses([2, 0], 4)
    dense = QRows.from_bytes(points.to_bytes(), 2, 4)
    assert len(points) == len(dense) == 2
    assert dense.rows is not None
    assert dense.rows.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    p = [Weights(np.asarray([0.1, 0.2, 0.3, 0.4])), Weights(np.asarray([1.0, 0.0, 0.0, 0.0]))]
    want = [[0.1, 0.2, 0.0, 0.4], [1.0, 0.0, 0.0, 0.0]]  # AMB-140 in the second row
    for rows in (points, dense):
        assert [rows.residual(i, p[i]).values.tolist() for i in range(2)] == want
    few = Weights(np.asarray([0.25, 0.75]), np.asarray([2, 3]))  # what top-k 2 leaves
    for rows in (points, dense):
        assert rows.residual(0, few).values.tolist() == [0.0, 0.75]
        assert rows.residual(1, few).values.tolist() == [0.25, 0.75]
    assert [points.of(i, t) for i in range(2) for t in range(4)] == [0, 0, 1, 0, 1, 0, 0, 0]
    assert points.dense(0).tolist() == [0, 0, 1, 0]
    points.check([2, 0], 4)
    with pytest.raises(RowsProblem, match="token 2"):
        points.check([2, 1], 4)


def test_residual_where_nothing_is_left_is_p() -> None:
    """AMB-140: false q, larger than p everywhere."""
    p = Weights(np.asarray([0.5, 0.5]))
    assert QRows(2, torch.tensor([[0.75, 0.75]])).residual(0, p) is p
    assert QRows(2, torch.tensor([[0.25, 0.75]])).residual(0, p).values.tolist() == [0.25, 0.0]
