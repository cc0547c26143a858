"""Who a node's peers are, as its operator says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sdcp_mono.compose import node
from sdcp_mono.settings import RouterSettings, Settings

LISTS = ("routers", "verifiers", "drafters", "caches", "trusted_drafters")


@pytest.mark.parametrize("name", LISTS)
def test_peers_are_listed_with_commas_and_compared_in_one_spelling(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"SDCP_{name.upper()}", "https://A.example:443/x,https://b.example/y/")
    assert getattr(Settings(), name) == ("https://a.example/x/", "https://b.example/y/")
    monkeypatch.setenv(f"SDCP_{name.upper()}", "a.example")
    with pytest.raises(ValidationError, match=name):
        Settings()


def test_only_roles_of_a_split_take_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDCP_DRAFTERS", "https://*.Drafter.ns.svc:9443,https://d.example/")
    monkeypatch.setenv("SDCP_BASE", "https://10-0-0-1.router.ns.svc:9443/")
    assert RouterSettings().drafters == ("https://*.drafter.ns.svc:9443/", "https://d.example/")
    with pytest.raises(ValidationError, match="drafters"):
        Settings()
    monkeypatch.setenv("SDCP_BASE", "https://*.router.ns.svc:9443/")
    with pytest.raises(ValidationError, match="base"):
        RouterSettings()


def test_the_kit_is_a_peer_with_the_development_ca_only() -> None:
    """Section 9: nobody is a peer, or trusted, that no operator named; here it is his own disk that holds the keys."""
    assert node._plays(Settings(), gateway=True)
    assert not node._plays(Settings(certs_dir=Path("certs")), gateway=True)
    assert not node._plays(Settings(kit_port=0), gateway=True)
    assert not node._plays(Settings(kit_port=8443), gateway=True)  # these are our own names
    assert not node._plays(Settings(), gateway=False)
