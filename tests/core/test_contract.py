"""The session contract (4.1) and the profile in force (6.6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sdcp_mono.core import cbor
from sdcp_mono.core.contract import low_ratio, policy_at, sampling_of, self_decode_permitted, validate
from sdcp_mono.core.messages import UNSET, Assignment, Contract, Sampling, SessionOpen
from sdcp_mono.core.ports import ModelCard
from sdcp_mono.core.problems import BadContract

OTHER_HASH = bytes(32)


@pytest.fixture
def card(make_contract: Any) -> ModelCard:
    contract = make_contract()
    return ModelCard(name="m", target=contract.target, tokenizer=contract.tokenizer, vocab_size=100, context=1000)


def refused(contract: Contract, member: str, *args: Any) -> None:
    with pytest.raises(BadContract, match=f"contract.*{member}") as caught:
        validate(contract, *args)
    assert caught.value.status == 422
    assert caught.value.type == "https://iana.org/assignments/sdcp#sdcp-bad-contract"


@pytest.mark.vectors("contracts")
def test_sdcp_011_valid_contracts(case: dict[str, Any]) -> None:
    contract = cbor.decode(bytes.fromhex(case["cbor_hex"]), Contract)
    assert msgspec.to_builtins(contract, builtin_types=(bytes,)) == {
        key: tuple(value) if isinstance(value, list) else value for key, value in case["contract"].items()
    }
    if case["contract"]["max_new"] >= 2**32:
        refused(contract, "max_new")  # AMB-130: right to encode, not to serve
    else:
        validate(contract)


@pytest.mark.vectors("bad_contracts")
def test_sdcp_028_bad_contracts(case: dict[str, Any], message_values: dict[str, Any]) -> None:
    """Each alone and as the contract member of a session-open."""
    body = bytes.fromhex(case["cbor_hex"])
    opening = {key: value for key, value in message_values["session-open"].items() if key != "contract"}
    whole = bytes([0xA0 + len(opening) + 1]) + b"".join(
        cbor.encode_value(key) + cbor.encode_value(value) for key, value in opening.items()
    ) + b"\x68contract" + body  # fmt: skip
    for attempt in (lambda: cbor.decode(body, Contract), lambda: cbor.decode(whole, SessionOpen).contract):
        with pytest.raises(BadContract) as caught:
            validate(attempt())
        assert caught.value.status == case["expect"]["status"]
        assert caught.value.type == case["expect"]["type"]
        assert "contract" in caught.value.detail


@pytest.mark.parametrize("member", ["target", "tokenizer"])
@pytest.mark.parametrize("value", [bytes(31), bytes(33), "a" * 32])
def test_sdcp_012_013_model_hashes(make_contract: Any, member: str, value: Any) -> None:
    refused(make_contract(**{member: value}), member)


def test_sdcp_014_drafters(make_contract: Any) -> None:
    refused(make_contract(drafters=()), "drafters")
    refused(make_contract(drafters=(bytes(31),)), "drafters")
    validate(make_contract(drafters=(OTHER_HASH, OTHER_HASH)))  # AMB-015
    assert make_contract().drafters is UNSET


@pytest.mark.parametrize("rule", [0, 3, 191, 200, -1, "1", True, 1.0])
def test_sdcp_015_rule(make_contract: Any, rule: Any) -> None:
    refused(make_contract(rule=rule), "rule")


@pytest.mark.parametrize("rule", [1, 2])
def test_sdcp_015_registered_rules(make_contract: Any, rule: int) -> None:
    validate(make_contract(rule=rule))


@pytest.mark.parametrize("m_max", [0, 65, -1, 2**64 - 1])
def test_sdcp_017_m_max(make_contract: Any, m_max: int) -> None:
    refused(make_contract(m_max=m_max), "m_max")


@pytest.mark.parametrize("m_max", [1, 64])
def test_sdcp_017_m_max_bounds(make_contract: Any, m_max: int) -> None:
    validate(make_contract(m_max=m_max))


@pytest.mark.parametrize("max_new", [-1, 2**32, 2**64])
def test_sdcp_018_max_new(make_contract: Any, max_new: int) -> None:
    refused(make_contract(max_new=max_new), "")


def test_sdcp_018_max_new_bounds(make_contract: Any) -> None:
    validate(make_contract(max_new=0))  # AMB-017
    validate(make_contract(max_new=2**32 - 1))


def test_sdcp_019_stop(make_contract: Any, card: ModelCard) -> None:
    validate(make_contract(stop=()), card)
    validate(make_contract(stop=(2, 2)), card)
    validate(make_contract(stop=(2**32 - 1,)), card)  # beyond the vocabulary: never matches (AMB-019)
    refused(make_contract(stop=(2, 2**32)), "stop")
    refused(make_contract(stop=(-1,)), "stop")


def test_sdcp_020_021_023_024_ladder_numbers(make_contract: Any) -> None:
    refused(make_contract(low_rounds=0), "low_rounds")
    refused(make_contract(low_ratio=101), "low_ratio")
    refused(make_contract(self_load=101), "self_load")
    refused(make_contract(self_max=-1), "self_max")
    validate(make_contract(low_rounds=1, low_ratio=100, self_load=100, self_max=0))


@pytest.mark.parametrize("fallback", [(), (0,), (4,), (6,), (1, "2"), (1, 200), (1, True)])
def test_sdcp_022_144_fallback(make_contract: Any, fallback: Any) -> None:
    refused(make_contract(fallback=fallback), "fallback")


@pytest.mark.parametrize("fallback", [(1, 2, 3, 5), (5,), (3, 3)])
def test_sdcp_022_ladders(make_contract: Any, fallback: tuple[int, ...]) -> None:
    validate(make_contract(fallback=fallback))


@pytest.mark.parametrize("octets", [15, 17])
def test_sdcp_025_scope(make_contract: Any, octets: int) -> None:
    refused(make_contract(scope=bytes(octets)), "scope")
    validate(make_contract(scope=bytes(16)))


@pytest.mark.parametrize(
    ("member", "value"),
    [("top_p_milli", 1001), ("top_p_milli", -1), ("temperature_milli", -1), ("temperature_milli", 0.5), ("top_k", 1.0),
     ("top_k", True), ("seed", -1), ("seed", "1")],
)  # fmt: skip
def test_sdcp_026_sampling_members(make_contract: Any, member: str, value: Any) -> None:
    refused(make_contract(sampling=Sampling(**{member: value})), f"sampling.{member}")


def test_sdcp_026_seed_is_64_bits(make_contract: Any) -> None:
    validate(make_contract(sampling=Sampling(seed=2**64 - 1)))
    refused(make_contract(sampling=Sampling(seed=2**64)), "")  # would be a bignum on the wire (AMB-020)


def test_sdcp_026_rule_1_with_a_profile_and_rule_2_without(make_contract: Any) -> None:
    validate(make_contract(rule=1, sampling=Sampling(temperature_milli=800, seed=0)))  # AMB-029
    validate(make_contract(rule=2, sampling=None))  # AMB-030


def test_sdcp_035_refuse_target(make_contract: Any, card: ModelCard) -> None:
    validate(make_contract(), card)
    flipped = bytes([card.target[0] ^ 1]) + card.target[1:]
    refused(make_contract(target=flipped), "target", card)
    refused(make_contract(tokenizer=OTHER_HASH), "tokenizer", card)  # AMB-032


def test_sdcp_018_prompt_and_max_new_fit_the_context(make_contract: Any, card: ModelCard) -> None:
    validate(make_contract(max_new=256), card, 744)
    refused(make_contract(max_new=256), "max_new.*745.*256.*1001.*1000", card, 745)  # AMB-018
    refused(make_contract(max_new=1001), "max_new", card)


def test_sdcp_021_low_ratio_absent_is_zero(make_contract: Any) -> None:
    assert low_ratio(make_contract()) == low_ratio(make_contract(low_ratio=0)) == 0
    assert low_ratio(make_contract(low_ratio=50)) == 50


def test_sdcp_016_absent_sampling_is_an_empty_profile(make_contract: Any) -> None:
    assert sampling_of(make_contract()) == Sampling() == sampling_of(make_contract(sampling=Sampling()))
    assert sampling_of(make_contract(sampling=Sampling(seed=0))).seed == 0  # AMB-021


def test_sdcp_151_self_decode_permitted(make_contract: Any) -> None:
    assert not self_decode_permitted(make_contract(), 0)
    assert self_decode_permitted(make_contract(self_load=50), 50)
    assert not self_decode_permitted(make_contract(self_load=50), 51)
    assert self_decode_permitted(make_contract(self_load=0), 0)


def test_sdcp_161_policy_timeline(vectors: dict[str, Any]) -> None:
    timeline = vectors["policy_timeline"]
    policies = {int(key): Sampling(**value) for key, value in timeline["policies"].items()}
    base = Sampling(**timeline["contract_sampling"])
    assert len(timeline["effective"]) == 7
    for round_, expected in timeline["effective"].items():
        assert policy_at(base, policies, int(round_)) == Sampling(**expected)
    assert policy_at(base, {}, 5) == base


@pytest.mark.vectors("bad_contracts")
def test_sdcp_028_bad_contract_in_an_assignment(case: dict[str, Any], message_values: dict[str, Any]) -> None:
    good = cbor.encode_value(message_values["assignment"])
    old = cbor.encode_value(message_values["assignment"]["contract"])
    assert good.count(old) == 1
    with pytest.raises(BadContract):
        validate(cbor.decode(good.replace(old, bytes.fromhex(case["cbor_hex"])), Assignment).contract)
