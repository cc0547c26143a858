"""Every message on the wire (5.2): vectors, round trips, the CDDL, and refusals that name the member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cbor2
import msgspec
import pycddl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec import inspect as mi

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import (
    Action,
    Assignment,
    CommitRecord,
    Decline,
    Event,
    FenceRecord,
    Message,
    Output,
    Policy,
    Proposal,
    Resume,
    Role,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
    action_of,
)
from sdcp_mono.core.problems import BadContract, Malformed

# ---- what is what ------------------------------------------------------------------------------------

TYPES: dict[str, type[Message]] = {
    "session-open": SessionOpen,
    "session-state": SessionState,
    "assignment": Assignment,
    "proposal": Proposal,
    "verdict": Verdict,
    "output": Output,
    "status": Status,
    "event": Event,
    "policy": Policy,
}
EXTENSIONS = (Decline, CommitRecord, FenceRecord)  # not in the draft's CDDL
EXTENSION_MEMBERS = {"models", "tokenizer", "base"}  # of status (AMB-033)


def type_of(case_name: str) -> type[Message]:
    return next(type for name, type in TYPES.items() if case_name.startswith(name))


@pytest.fixture(scope="session")
def schemas(cddl: str) -> dict[type[Message], pycddl.Schema]:
    # pycddl 0.6.4 tries only the first choice of a named one within an array; written in place it tries all.
    assert cddl.count("[+ ladder]") == 1
    cddl = cddl.replace("[+ ladder]", "[+ (1 / 2 / 3 / 5)]")
    return {type: pycddl.Schema(f"root = {name}\n{cddl}") for name, type in TYPES.items()}


@pytest.mark.vectors("messages")
def test_sdcp_056_to_068_vectors(case: dict[str, Any], schemas: dict[type[Message], pycddl.Schema]) -> None:
    body = bytes.fromhex(case["cbor_hex"])
    type = type_of(case["name"])
    message = cbor.decode(body, type)
    assert cbor.encode(message) == body
    assert cbor2.loads(body) == case["value"]
    schemas[type].validate_cbor(body)
    for member, value in case["value"].items():
        seen = getattr(message, "from_" if member == "from" else member)
        if not isinstance(value, dict):
            assert seen == (tuple(value) if isinstance(value, list) else value)
    absent = set(message.__struct_encode_fields__) - case["value"].keys()
    assert all(getattr(message, name) is UNSET for name in absent)


def test_sdcp_185_stale_base_state_equals_the_wire_form(vectors: dict[str, Any]) -> None:
    """The session_state of the problem document names the same members as session-state."""
    state = vectors["messages"]["stale_base_problem"]["body"]["session_state"]
    assert set(state) <= set(SessionState.__struct_encode_fields__)


# ---- round trips -----------------------------------------------------------------------------------

REFERENCE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=30).map("mlc:".__add__)
OVERRIDES: Mapping[str, st.SearchStrategy[Any]] = {
    "action": st.sampled_from(sorted(Action)).map(int),
    "kind": st.sampled_from(sorted(Action)).map(int),
    "finish": st.sampled_from(sorted(Action)).map(int),
    "fallback": st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=4).map(tuple),
    **dict.fromkeys(("prompt_kv", "commit_log", "committed_tokens", "target_kv", "q_rows", "draft_kv"), REFERENCE),
    "prompt": REFERENCE | st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
}


def values(type: mi.Type) -> st.SearchStrategy[Any]:
    match type:
        case mi.IntType(ge=low, le=high):
            return st.integers(low if low is not None else -(2**63), high if high is not None else 2**64 - 1)
        case mi.BoolType():
            return st.booleans()
        case mi.StrType():
            return st.text(max_size=20)
        case mi.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=high)
        case mi.VarTupleType(item_type=item, min_length=low):
            return st.lists(values(item), min_size=low or 0, max_size=4).map(tuple)
        case mi.StructType(cls=cls):
            return messages(cls)
        case mi.UnionType(types=types):
            return st.one_of(*(st.just(UNSET) if isinstance(one, mi.UnsetType) else values(one) for one in types))
    raise NotImplementedError(type)


def messages(cls: type[Message]) -> st.SearchStrategy[Any]:
    members: dict[str, st.SearchStrategy[Any]] = {}
    for field in mi.type_info(cls).fields:  # type: ignore[attr-defined]
        strategy = OVERRIDES[field.encode_name] if field.encode_name in OVERRIDES else values(field.type)
        if not field.required:
            strategy = st.just(UNSET) | strategy
        members[field.name] = strategy
    return st.fixed_dictionaries(members).map(lambda chosen: cls(**chosen))


ALL = [*TYPES.values(), *EXTENSIONS]


@pytest.mark.parametrize("type", ALL, ids=lambda type: type.__name__)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_round_trip(type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(type))
    body = cbor.encode(message)
    assert cbor.decode(body, type) == message
    assert cbor2.dumps(cbor2.loads(body), canonical=True) == body


@pytest.mark.parametrize("type", TYPES.values(), ids=TYPES.keys())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sdcp_056_to_068_what_we_emit_matches_the_cddl(
    type: type[Message], schemas: dict[type[Message], pycddl.Schema], data: st.DataObject
) -> None:
    message = data.draw(messages(type))
    if isinstance(message, Status | Proposal):
        status = message if isinstance(message, Status) else message.status
        status = msgspec.structs.replace(status, **dict.fromkeys(EXTENSION_MEMBERS, UNSET))
        message = status if type is Status else msgspec.structs.replace(message, status=status)
    schemas[type].validate_cbor(cbor.encode(message))


def test_members_are_those_of_the_cddl(cddl: str, vectors: dict[str, Any]) -> None:
    """No member more or less than the draft defines, extensions named."""
    for name, type in TYPES.items():
        rule = cddl[cddl.index(f"\n{name} = {{") :]
        rule = rule[: rule.index("\n}")]
        rule = rule.replace(rule[rule.find("resume: {") + 9 : rule.find("  }")], "") if "resume: {" in rule else rule
        defined = {line.split(":")[0].strip(" ?") for line in rule.split("\n")[2:] if ":" in line.split(";")[0]}
        extensions = EXTENSION_MEMBERS if type is Status else set()
        assert set(type.__struct_encode_fields__) - extensions == defined, name


# ---- refusals ---------------------------------------------------------------------------------------

REQUIRED = [
    (name, field.encode_name)
    for name, type in TYPES.items()
    for field in mi.type_info(type).fields  # type: ignore[attr-defined]
    if field.required
]
EXAMPLES = {"session-state": "session-state after open", "output": "output from=2", "event": "event switch"}


def example(values: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return dict(values[EXAMPLES.get(name, name)])


def refused(value: Any, type: type[Message], member: str) -> None:
    with pytest.raises(Malformed, match=member) as caught:
        cbor.decode(cbor2.dumps(value), type)
    assert (caught.value.status, caught.value.type) == (400, "about:blank")


@pytest.mark.parametrize(("name", "member"), REQUIRED)
def test_sdcp_056_to_068_each_required_member(name: str, member: str, message_values: dict[str, Any]) -> None:
    value = example(message_values, name)
    del value[member]
    if member == "contract":
        with pytest.raises(BadContract, match="contract"):
            cbor.decode(cbor2.dumps(value), TYPES[name])
    else:
        refused(value, TYPES[name], member)


@pytest.mark.parametrize(
    ("name", "member"),
    [
        (name, member)
        for name, type in TYPES.items()
        for member in type.__struct_encode_fields__
        if member != "contract"
    ],
)
@pytest.mark.parametrize("wrong", [None, 1.5, -1, cbor2.CBORSimpleValue(99), [[1]]], ids=repr)
def test_sdcp_056_to_068_each_member_of_a_wrong_type(
    name: str, member: str, wrong: Any, message_values: dict[str, Any]
) -> None:
    refused(example(message_values, name) | {member: wrong}, TYPES[name], member)


@pytest.mark.parametrize(("name", "type"), TYPES.items())
def test_sdcp_056_to_068_types_that_python_would_mix_up(
    name: str, type: type[Message], message_values: dict[str, Any]
) -> None:
    value = example(message_values, name)
    for field in mi.type_info(type).fields:  # type: ignore[attr-defined]
        kinds = field.type.types if isinstance(field.type, mi.UnionType) else (field.type,)
        member = field.encode_name
        if any(isinstance(kind, mi.IntType) for kind in kinds):
            for wrong in (True, 1.0, "1", b"1"):
                refused(value | {member: wrong}, type, member)
        if any(isinstance(kind, mi.BytesType) for kind in kinds):
            for wrong in (bytes(15), bytes(17), bytes(31), bytes(33), "A" * 22, "A" * 32, "A" * 44):
                refused(value | {member: wrong}, type, member)
        if any(isinstance(kind, mi.StrType) for kind in kinds):
            refused(value | {member: b"https://x/"}, type, member)
        if any(isinstance(kind, mi.BoolType) for kind in kinds):
            for wrong in (0, 1):
                refused(value | {member: wrong}, type, member)  # SDCP-065


@pytest.mark.parametrize("octets", [0, 15, 17])
@pytest.mark.parametrize("name", [name for name, type in TYPES.items() if type is not Status])
def test_sdcp_006_session_id_is_16_octets(name: str, octets: int, message_values: dict[str, Any]) -> None:
    refused(example(message_values, name) | {"session": bytes(octets)}, TYPES[name], "session")


@pytest.mark.parametrize("member", ["round", "committed", "digest", "committed_tokens"])
def test_sdcp_057_resume(member: str, message_values: dict[str, Any]) -> None:
    value = dict(message_values["session-open resume"])
    resume = dict(value["resume"])
    assert cbor.decode(cbor2.dumps(value), SessionOpen).resume == Resume(**resume)
    refused(value | {"resume": {key: item for key, item in resume.items() if key != member}}, SessionOpen, member)
    refused(value | {"resume": resume | {"digest": bytes(31)}}, SessionOpen, "resume.digest")


def test_sdcp_060_both_prompt_forms(message_values: dict[str, Any]) -> None:
    for name in ("session-open", "assignment"):
        value = example(message_values, name)
        by_reference = cbor.decode(cbor2.dumps(value | {"prompt": "mlc://c/-/prompt/1"}), TYPES[name])
        assert by_reference.prompt == "mlc://c/-/prompt/1"  # type: ignore[attr-defined]
        inline = cbor.decode(cbor2.dumps(value | {"prompt": []}), TYPES[name])
        assert inline.prompt == ()  # type: ignore[attr-defined]
        for wrong in ([2**32], [-1], [1, True], [1.0], ["1"], b"\1", {}):
            refused(value | {"prompt": wrong}, TYPES[name], "prompt")


def test_sdcp_061_proposal(message_values: dict[str, Any]) -> None:
    value = example(message_values, "proposal")
    refused(value | {"tokens": []}, Proposal, "tokens")
    refused(value | {"tokens": [[7, 9], [11]]}, Proposal, "tokens")  # SDCP-004: a chain, never a tree
    refused(value | {"status": {}}, Proposal, "status")
    refused(value | {"status": value["status"] | {"load": 101}}, Proposal, r"status\.load")
    assert cbor.decode(cbor2.dumps(value | {"tokens": [2**64 - 1]}), Proposal).tokens == (2**64 - 1,)  # AMB-083


@pytest.mark.parametrize("load", [-1, 101, 2**64 - 1])
def test_sdcp_063_verdict_load_is_a_percentage(load: int, message_values: dict[str, Any]) -> None:
    refused(example(message_values, "verdict") | {"load": load}, Verdict, "load")


@pytest.mark.parametrize(
    ("member", "wrong"), [("role", 0), ("role", 3), ("load", 101), ("accept_milli", 1001), ("models", [bytes(31)])]
)
def test_sdcp_066_status_limits(member: str, wrong: Any, message_values: dict[str, Any]) -> None:
    refused(example(message_values, "status") | {member: wrong}, Status, member)


def test_sdcp_068_policy_sampling_is_checked(message_values: dict[str, Any]) -> None:
    value = example(message_values, "policy")
    refused(value | {"sampling": {"top_p_milli": 2000}}, Policy, r"sampling\.top_p_milli")  # AMB-177
    assert cbor.decode(cbor2.dumps(value | {"sampling": {"min_p": 1}}), Policy).sampling.seed is UNSET  # AMB-011


REFERENCES = [
    ("session-open", "prompt"), ("session-open", "prompt_kv"), ("session-open", "commit_log"), ("assignment", "prompt"),
    ("assignment", "committed_tokens"), ("proposal", "q_rows"), ("proposal", "draft_kv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "member"), REFERENCES)
@pytest.mark.parametrize(
    "wrong", ["", "log/1", "/log/1", "//cache/log/1", "mlc:", "a b:c", "https://x/ y", "é://x", "x:\n"]
)
def test_sdcp_069_cache_ref_is_an_absolute_uri(
    name: str, member: str, wrong: str, message_values: dict[str, Any]
) -> None:
    refused(example(message_values, name) | {member: wrong}, TYPES[name], member)


def test_sdcp_069_cache_refs_of_resume_and_length(message_values: dict[str, Any]) -> None:
    value = dict(message_values["session-open resume"])
    for member in ("committed_tokens", "target_kv"):
        refused(value | {"resume": value["resume"] | {member: "tok/1"}}, SessionOpen, f"resume: {member}")
    refused(value | {"commit_log": "mlc:" + "x" * 2045}, SessionOpen, "commit_log")


@pytest.mark.parametrize("ref", ["http://169.254.169.254/x", "file:///etc/passwd", "urn:x", "mlc://c/-/q/1"])
def test_sdcp_069_any_absolute_uri_is_wellformed(ref: str, message_values: dict[str, Any]) -> None:
    """Whether it may be fetched is decided later, with another answer (AMB-137)."""
    assert cbor.decode(cbor2.dumps(example(message_values, "proposal") | {"q_rows": ref}), Proposal).q_rows == ref


@pytest.mark.vectors("messages")
@pytest.mark.parametrize("key", ["zz", 99, -1, b"zz"], ids=repr)
def test_sdcp_070_unknown_keys_are_ignored(case: dict[str, Any], key: Any) -> None:
    type, value = type_of(case["name"]), case["value"]
    expected = cbor.decode(bytes.fromhex(case["cbor_hex"]), type)
    assert cbor.decode(cbor2.dumps(value | {key: 1}), type) == expected
    for member in ("resume", "status", "sampling"):
        if member in value:
            nested = value | {member: value[member] | {key: [{"a": None}]}}
            assert cbor.decode(cbor2.dumps(nested), type) == expected


@pytest.mark.parametrize(("name", "member"), [("verdict", "action"), ("event", "kind"), ("output", "finish")])
def test_sdcp_071_unknown_actions_mean_fail(name: str, member: str, message_values: dict[str, Any]) -> None:
    for value in (6, 77, 192, 255, 2**64 - 1):
        message = cbor.decode(cbor2.dumps(example(message_values, name) | {member: value}), TYPES[name])
        assert action_of(getattr(message, member)) is Action.FAIL  # AMB-013
    assert [action_of(code) for code in range(6)] == list(Action)


def test_sdcp_027_action_and_role_codes() -> None:
    assert {action.name.lower(): action.value for action in Action} == {
        "continue": 0, "reduce": 1, "switch": 2, "self_decode": 3, "finish": 4, "fail": 5,
    }  # fmt: skip
    assert (Role.DRAFTER, Role.VERIFIER) == (1, 2)


def test_messages_are_frozen(message_values: dict[str, Any]) -> None:
    state = cbor.decode(cbor2.dumps(example(message_values, "session-state")), SessionState)
    with pytest.raises(AttributeError):
        state.round = 1  # type: ignore[misc]


def test_details_hold_no_tokens(message_values: dict[str, Any]) -> None:
    """A refusal is logged and sent on: it names the member, never its content."""
    secret = 4_294_967_296
    for name, member in (("session-open", "prompt"), ("verdict", "emitted")):
        with pytest.raises(Malformed) as caught:
            cbor.decode(cbor2.dumps(example(message_values, name) | {member: [7, secret]}), TYPES[name])
        assert str(secret) not in caught.value.detail
