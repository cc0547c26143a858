"""Certificates and reference roles on loopback; the reference modules of this folder are imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sdcp_mono import certs

BASE = "https://127.0.0.1:9/"  # identities are names, nobody connects to them


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    roles = ("router", "verifier", "verifier-b", "drafter", "drafter-b", "frontend")
    certs.init(folder, roles={role: f"{BASE}{role}/" for role in roles})
    return folder
