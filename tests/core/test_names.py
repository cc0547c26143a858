"""Session ids in paths (5.1), base URIs (AMB-040), MLC URIs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.core.names import (
    Bases,
    MlcUri,
    format_session,
    is_member,
    normalise_base,
    normalise_pattern,
    parse_session,
)
from sdcp_mono.core.problems import Malformed

SCOPE = bytes.fromhex("a0a1a2a3a4a5a6a7a8a9aaabacadaeaf")


@pytest.mark.vectors("session_id_paths")
def test_sdcp_055_session_path(case: dict[str, Any]) -> None:
    session = bytes.fromhex(case["session_hex"])
    assert format_session(session) == case["id"]
    assert parse_session(case["id"]) == session
    assert case["output_path"] == f"sessions/{format_session(session)}/output?from=0"


def test_sdcp_055_invalid_ids(vectors: dict[str, Any]) -> None:
    invalid = vectors["session_id_paths"]["invalid_ids"]
    assert len(invalid) == 5
    for text in [*invalid, "", "A" * 22 + "\n", "é" * 22, "AAAAAAAAAAAAAAAAAAAAA%"]:
        with pytest.raises(Malformed, match="session id"):
            parse_session(text)


@given(st.binary(min_size=16, max_size=16))
def test_sdcp_055_one_text_per_session(session: bytes) -> None:
    text = format_session(session)
    assert len(text) == 22
    assert parse_session(text) == session


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("https://D:443/x", "https://d/x/"),
        ("https://d/x/", "https://d/x/"),
        ("HTTPS://Verifier.Example", "https://verifier.example/"),
        ("https://d:8443/a/b//", "https://d:8443/a/b/"),
        ("http://d:80", "http://d/"),
        ("http://d:443", "http://d:443/"),
        ("https://d/X%2f", "https://d/X%2f/"),
        ("https://[2001:DB8::1]:443/x", "https://[2001:db8::1]/x/"),
        ("https://[::1]:8443", "https://[::1]:8443/"),
    ],
)
def test_sdcp_041_base_uris_compare_after_normalisation(uri: str, expected: str) -> None:
    assert normalise_base(uri) == expected
    assert normalise_base(expected) == expected


@pytest.mark.parametrize(
    "uri",
    ["", "d/x", "/x", "https://", "https:///x", "https://u@d/", "https://d/?a", "https://d/#f", "https://d/ x",
     "https://d/\n", "\thttps://d/", "https://d:99999/", "https://d:x/", "https://[::1/", "https://dé/", "mailto:a@b",
     "https://*.d.example/"],
)  # fmt: skip
def test_sdcp_041_other_base_uris_are_refused(uri: str) -> None:
    with pytest.raises(Malformed, match="base URI"):
        normalise_base(uri)


POOL = "https://drafter.ns.svc:9443/"


@pytest.mark.parametrize(
    ("base", "member"),
    [
        ("https://10-1-2-3.drafter.ns.svc:9443/", True),
        ("https://drafter-0.drafter.ns.svc:9443/", True),
        (POOL, False),  # the pool itself is nobody
        ("https://a.b.drafter.ns.svc:9443/", False),
        ("https://xdrafter.ns.svc:9443/", False),
        ("https://a.drafter.ns.svc:9444/", False),
        ("https://a.drafter.ns.svc/", False),
        ("http://a.drafter.ns.svc:9443/", False),
        ("https://a.drafter.ns.svc:9443/x/", False),
        ("https://.drafter.ns.svc:9443/", False),
        ("https://*.drafter.ns.svc:9443/", False),
        ("https://-a.drafter.ns.svc:9443/", False),
        ("https://a.drafter.ns.svc.evil.example:9443/", False),
        ("urn:a.drafter.ns.svc:9443/", False),
        ("", False),
    ],
)
def test_an_instance_of_a_pool_is_exactly_one_label_below_it(base: str, member: bool) -> None:
    assert is_member(base, POOL) is member
    assert (base in Bases.of([normalise_pattern("https://*.Drafter.ns.svc:9443")])) is member


def test_addresses_and_single_labels_are_no_pools() -> None:
    assert not is_member("https://127.0.0.1:9443/", "https://0.0.1:9443/")
    assert not is_member("https://evil.svc/", "https://svc/")


def test_a_list_names_instances_and_pools() -> None:
    bases = Bases.of(map(normalise_pattern, ["https://A.example:443", "https://*.drafter.ns.svc/d"]))
    assert "https://a.example/" in bases
    assert "https://x.drafter.ns.svc/d/" in bases
    assert "https://x.a.example/" not in bases
    assert (bases.named, bases.pools) == ({"https://a.example/"}, {"https://drafter.ns.svc/d/"})


@pytest.mark.parametrize(
    "text",
    ["https://*/", "https://*.svc/", "https://*.127.0.0.1:9443/", "https://*.[::1]/", "https://*.*.ns.svc/",
     "https://a-*.ns.svc/", "https://a.*.ns.svc/", "*.ns.svc", "https://*.ns.svc:x/", "*"],
)  # fmt: skip
def test_other_patterns_are_refused(text: str) -> None:
    with pytest.raises(Malformed, match="base URI"):
        normalise_pattern(text)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("mlc://local/-/log/abc", MlcUri("local", None, "log", "abc")),
        (f"mlc://cache.example:8443/{SCOPE.hex()}/q/s-1.2_3", MlcUri("cache.example:8443", SCOPE, "q", "s-1.2_3")),
        ("mlc://10.0.0.1/-/kv/" + "f" * 64, MlcUri("10.0.0.1", None, "kv", "f" * 64)),
    ],
)  # fmt: skip
def test_mlc_uri_round_trip(text: str, uri: MlcUri) -> None:
    assert MlcUri.parse(text) == uri
    assert str(uri) == text


@pytest.mark.parametrize(
    "text",
    ["", "mlc://", "mlc://a/-/k", "mlc://a/-/k/", "mlc://a/-/k/n/m", "mlc:///-/k/n", "MLC://a/-/k/n", "mlc://A/-/k/n",
     "mlc://a/-/K/n", "mlc://a/-/k/.", "mlc://a/-/k/..", "mlc://a/-/k/.hidden", "mlc://a/../k/n", "mlc://a/-/k/a%2Fb",
     "mlc://a/-/k/n?x", "mlc://a/-/k/n#x", "mlc://a/-/k/n\n", "mlc://u@a/-/k/n", "mlc://a:/-/k/n", "mlc://a:123456/-/k/n",
     "mlc://a/" + "a" * 31 + "/k/n", "mlc://a/" + "A" * 32 + "/k/n", "mlc://a/" + "a" * 34 + "/k/n",
     "mlc://a/-/k/" + "n" * 201, "mlc://" + "a" * 254 + "/-/k/n", "mlc://a/-/" + "k" * 33 + "/n", "https://a/-/k/n",
     "mlc://a/-/k/n\\m", "mlc://a/-/k/é"],
)  # fmt: skip
def test_mlc_uri_has_one_spelling(text: str) -> None:
    with pytest.raises(Malformed, match="MLC URI"):
        MlcUri.parse(text)


@pytest.mark.parametrize(
    "parts",
    [("a", b"short", "k", "n"), ("a", bytes(17), "k", "n"), ("a", None, "k", "../n"), ("a/b", None, "k", "n"),
     ("a", None, "k/j", "n"), ("", None, "k", "n"), ("a", None, "k", "")],
)  # fmt: skip
def test_mlc_uri_made_of_parts_is_checked_too(parts: tuple[str, bytes | None, str, str]) -> None:
    with pytest.raises(Malformed, match="MLC URI"):
        MlcUri(*parts)
