"""The committed stubs are what the proto file says, and so are the ports."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.core import ports
from sdcp_mono.grpc import cache_client, client
from sdcp_mono.grpc.pb import sdcp_pb2 as pb

ROOT = Path(__file__).parents[2]
STUBS = Path("sdcp_mono/grpc/pb")


def test_stubs_are_generated_from_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    made_by = version("grpcio-tools")
    assert f"GRPC_GENERATED_VERSION = '{made_by}'" in (ROOT / STUBS / "sdcp_pb2_grpc.py").read_text()
    command = ["-I", "proto", *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python"))]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *command, f"proto/{STUBS}/sdcp.proto"], cwd=ROOT, check=True
    )
    made = {path.name: path.read_text() for path in (tmp_path / STUBS).iterdir()}
    assert made.keys() == {"sdcp_pb2.py", "sdcp_pb2.pyi", "sdcp_pb2_grpc.py"}
    for name, text in made.items():
        assert (ROOT / STUBS / name).read_text() == text, f"{name}: make proto"


def methods(port: type) -> set[str]:
    return {name for name, member in inspect.getmembers(port, callable) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("service", "port", "more", "made"),
    [
        ("Verifier", ports.VerifierPort, {"card", "follow"}, client.VerifierClient),
        ("Drafter", ports.DrafterPort, set(), client.DrafterClient),
        ("Router", ports.RouterPort, set(), client.RouterClient),
        ("ObjectStore", ports.ObjectStore, set(), cache_client.ObjectStoreClient),
        ("CommitLog", ports.CommitLog, {"names"}, cache_client.CommitLogClient),
    ],
)
def test_a_service_has_the_methods_of_its_port(service: str, port: type, more: set[str], made: Any) -> None:
    offered = {method.name for method in pb.DESCRIPTOR.services_by_name[service].methods}
    camel = {"".join(part.title() for part in name.split("_")) for name in methods(port) | more}
    assert offered == camel
    assert methods(made) == methods(port) | more
