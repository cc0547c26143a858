"""Contract digest and prefix chain (4.1, 4.2)."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.core import cbor, digest
from sdcp_mono.core.messages import UINT32_MAX, Contract

TOKENS = st.lists(st.integers(0, UINT32_MAX), max_size=40)


def test_sdcp_210_appendix_a(vectors: dict[str, Any]) -> None:
    published = vectors["appendix_a"]
    body = bytes.fromhex(published["contract_hex"])
    contract = cbor.decode(body, Contract)
    assert len(body) == published["contract_octets"] == 143
    assert cbor.encode(contract) == body
    expected = {name: bytes.fromhex(value) for name, value in published["published_digests_verified"].items()}
    of_contract = digest.contract_digest(contract)
    assert of_contract == expected["contract_digest"]
    d0 = digest.prefix_digest(of_contract, [1, 2, 3, 4])
    assert d0 == expected["d[0]"]
    assert digest.extend(d0, [17]) == expected["d[1]"]
    assert digest.extend(d0, [17, 42]) == expected["d[2]"]


@pytest.mark.vectors("contracts")
def test_sdcp_029_contract_digest(case: dict[str, Any]) -> None:
    contract = msgspec.convert(case["contract"], Contract, builtin_types=(bytes,))
    assert cbor.encode(contract).hex() == case["cbor_hex"]
    assert len(bytes.fromhex(case["cbor_hex"])) == case["octets"]
    assert digest.contract_digest(contract).hex() == case["contract_digest"]


def test_sdcp_016_021_digest_as_created(vectors: dict[str, Any]) -> None:
    digests = {case["name"]: case["contract_digest"] for case in vectors["contracts"]["cases"]}
    assert digests["low_ratio_absent"] != digests["low_ratio_explicit_0"]  # AMB-014
    assert len(set(digests.values())) == len(digests)


def test_sdcp_030_digest_of_a_non_deterministic_wire_form(vectors: dict[str, Any]) -> None:
    form = vectors["contracts"]["non_deterministic_wire_form"]
    contract = cbor.decode(bytes.fromhex(form["hex"]), Contract)
    assert digest.contract_digest(contract).hex() == form["contract_digest"]


@pytest.mark.vectors("digest_chains")
def test_sdcp_036_037_chain(case: dict[str, Any]) -> None:
    expected = [bytes.fromhex(link) for link in case["d"]]
    assert len(expected) == len(case["output"]) + 1
    link = digest.prefix_digest(bytes.fromhex(case["contract_digest"]), case["prompt"])
    chain = [link]
    for token in case["output"]:
        chain.append(link := digest.extend(link, [token]))
    assert chain == expected
    assert digest.extend(chain[0], case["output"]) == expected[-1]


def test_sdcp_037_one_round_or_one_by_one(vectors: dict[str, Any]) -> None:
    before = bytes.fromhex(vectors["appendix_a"]["published_digests_verified"]["d[2]"])
    d5 = vectors["appendix_a"]["example_round"]["digest"]
    assert digest.extend(before, (7, 9, 13)).hex() == d5
    assert digest.extend(digest.extend(digest.extend(before, [7]), [9]), [13]).hex() == d5


@pytest.mark.parametrize("token", [-1, 2**32])
def test_sdcp_038_uint32(token: int) -> None:
    with pytest.raises(OverflowError):
        digest.prefix_digest(bytes(32), [1, token])
    with pytest.raises(OverflowError):
        digest.extend(bytes(32), [1, token])


@given(st.binary(min_size=32, max_size=32), TOKENS, TOKENS)
def test_sdcp_036_chain_as_the_draft_writes_it(of_contract: bytes, prompt: list[int], output: list[int]) -> None:
    text = b"SDCP-PREFIX-1" + b"\0" + of_contract + len(prompt).to_bytes(4, "big")
    expected = hashlib.sha256(text + b"".join(token.to_bytes(4, "big") for token in prompt)).digest()
    assert digest.prefix_digest(of_contract, prompt) == digest.prefix_digest(of_contract, tuple(prompt)) == expected
    for token in output:
        expected = hashlib.sha256(expected + token.to_bytes(4, "big")).digest()
    assert digest.extend(digest.prefix_digest(of_contract, prompt), output) == expected


@given(TOKENS, st.integers(0, 39), st.integers(1, UINT32_MAX))
def test_sdcp_039_one_early_token_changes_every_later_digest(output: list[int], index: int, change: int) -> None:
    if output:
        other = list(output)
        other[index % len(output)] ^= change
        assert digest.extend(bytes(32), output) != digest.extend(bytes(32), other)
