"""Random and mutated input to everything that reads what a peer sent; ``fuzz/`` does the same for minutes, guided."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILE = Path(__file__).parents[2] / "fuzz" / "fuzz_cbor.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_cbor", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = _load()
SEEDS = sorted(fuzz.seeds().items())


@pytest.mark.parametrize(("name", "data"), SEEDS, ids=[name for name, _ in SEEDS])
def test_valid_input_is_read(name: str, data: bytes) -> None:
    fuzz.check(data)


@st.composite
def mutated(draw: Any) -> bytes:
    """A valid input with some octets changed, a part repeated, or the end cut off."""
    data = bytearray(draw(st.sampled_from([data for _, data in SEEDS])))
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 40))
    data[at:at] = bytes(data[at : at + length]) * draw(st.integers(0, 3))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated() | st.binary(max_size=300))
def test_input_is_answered_within_the_problem_table(data: bytes) -> None:
    fuzz.check(data)
