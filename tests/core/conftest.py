"""The published vectors: ``@pytest.mark.vectors(group)`` runs a test once for every case of that group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdcp_mono.core.messages import Contract

VECTORS = Path(__file__).parent.parent / "vectors"


def _with_bytes(value: Any) -> Any:
    """{"hex": ...} is a byte string."""
    if isinstance(value, dict):
        if value.keys() == {"hex"}:
            return bytes.fromhex(value["hex"])
        return {key: _with_bytes(item) for key, item in value.items()}
    return [_with_bytes(item) for item in value] if isinstance(value, list) else value


_ALL: dict[str, Any] = _with_bytes(json.loads((VECTORS / "sdcp.json").read_text()))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vectors(group): one test per case of a group of tests/vectors/sdcp.json")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("vectors")
    if marker is not None:
        cases = _ALL[marker.args[0]]["cases"]
        names = [str(case.get("name", index)).replace(" ", "-") for index, case in enumerate(cases)]
        metafunc.parametrize("case", cases, ids=names)


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    return _ALL


@pytest.fixture(scope="session")
def cddl() -> str:
    return (VECTORS / "sdcp.cddl").read_text()


@pytest.fixture(scope="session")
def message_values() -> dict[str, dict[str, Any]]:
    """The plain value of every message vector, by name."""
    return {case["name"]: case["value"] for case in _ALL["messages"]["cases"]}


MakeContract = Callable[..., Contract]


@pytest.fixture(scope="session")
def make_contract() -> MakeContract:
    """The contract of Appendix A with some members replaced; None takes a member out. Shapes are not checked."""
    members = _ALL["contracts"]["cases"][0]["contract"]
    base = msgspec.convert(members, Contract, builtin_types=(bytes,))

    def make(**changes: Any) -> Contract:
        return msgspec.structs.replace(
            base, **{name: msgspec.UNSET if value is None else value for name, value in changes.items()}
        )

    return make
