"""Deterministic out, strict in (4.1, 5.2, RFC 8949)."""

from __future__ import annotations

import re
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import (
    CommitRecord,
    Contract,
    FenceRecord,
    Message,
    SessionOpen,
    SessionState,
    Status,
    Token,
    Verdict,
)
from sdcp_mono.core.problems import BadContract, Malformed, Refusal, TooLarge

STATUS: dict[str, Any] = {"instance": "d", "role": 1, "load": 20, "queue": 0, "ttl_ms": 3000}
Tokens = tuple[Token, ...]


def item(value: Any) -> bytes:
    return cbor2.dumps(value)


def map_of(*pairs: tuple[bytes, bytes]) -> bytes:
    return bytes([0xA0 + len(pairs)]) + b"".join(key + value for key, value in pairs)


def status_with(*pairs: tuple[bytes, bytes]) -> bytes:
    return map_of(*((item(key), item(value)) for key, value in STATUS.items()), *pairs)


def test_sdcp_030_key_order(vectors: dict[str, Any]) -> None:
    group = vectors["contracts"]
    full = bytes.fromhex(next(c for c in group["cases"] if c["name"] == "all_optional_members")["cbor_hex"])
    contract = cbor.decode(full, Contract)
    decoded = cbor2.loads(cbor.encode(contract))
    assert list(decoded) == group["key_order_all_members"]
    assert list(decoded["sampling"]) == group["nested_sampling_key_order"]
    shuffled = item(dict(sorted(decoded.items(), reverse=True)))
    assert shuffled != full
    assert cbor.encode(cbor.decode(shuffled, Contract)) == full


def test_sdcp_030_canonical_order_is_that_of_4_2_1_for_text_keys_only() -> None:
    """cbor2 sorts length-first: the keys of RFC 8949 4.2.1's example come in the order of 4.2.3."""
    keys = [10, 100, -1, "z", "aa", (100,), (-1,), False]
    length_first = [10, -1, False, 100, "z", (-1,), "aa", (100,)]
    encoded = b"\xa8" + b"".join(cbor2.dumps(key) + b"\x00" for key in length_first)
    assert cbor2.dumps(dict.fromkeys(keys, 0), canonical=True) == encoded


@given(st.dictionaries(st.text(max_size=30), st.integers(0, 2**64 - 1), max_size=12))
def test_sdcp_030_text_keys_are_sorted_bytewise(value: dict[str, int]) -> None:
    expected = sorted(value, key=lambda key: cbor2.dumps(key))
    assert list(cbor2.loads(cbor.encode_value(value))) == expected


@pytest.mark.parametrize("value", [{1: 2}, [{b"a": 1}], {"a": {"b": ({None: 1},)}}])
def test_sdcp_030_only_text_keys_are_encoded(value: Any) -> None:
    with pytest.raises(TypeError, match="text"):
        cbor.encode_value(value)


def test_sdcp_030_members_of_every_message_are_text_and_maps_are_messages() -> None:
    for message in Message.__subclasses__():
        assert all(isinstance(name, str) for name in message.__struct_encode_fields__)
        assert not re.search(r"\bdict\b|Mapping", str(message.__annotations__))


@pytest.mark.parametrize(
    ("value", "hex"),
    [(0, "00"), (23, "17"), (24, "1818"), (255, "18ff"), (256, "190100"), (65535, "19ffff"), (65536, "1a00010000"),
     (2**32 - 1, "1affffffff"), (2**32, "1b0000000100000000"), (2**64 - 1, "1bffffffffffffffff"), ([], "80"),
     ([1, [2]], "82018102"), (False, "f4"), ({"b": 1, "aa": 2}, "a261620162616102")],
)  # fmt: skip
def test_sdcp_030_shortest_forms(value: Any, hex: str) -> None:
    assert cbor.encode_value(value).hex() == hex


@pytest.mark.parametrize(
    "wire",
    [
        b"\xbf" + status_with()[1:] + b"\xff",  # indefinite-length map
        b"\xb8\x05" + status_with()[1:],  # length of the map in two octets
        status_with().replace(item("load") + b"\x14", item("load") + b"\x1b" + (20).to_bytes(8, "big")),
        status_with().replace(item("d") + item("role"), b"\x7f\x61d\xff" + item("role")),  # text in chunks
        status_with().replace(item("load"), b"\x78\x04load"),
    ],
)
def test_sdcp_030_other_wellformed_encodings_are_accepted(wire: bytes) -> None:
    assert cbor.decode(wire, Status) == Status(**STATUS)  # AMB-004


@pytest.mark.parametrize(
    "pair",
    [
        (item("zz"), item(1)),
        (item(99), item(1)),
        (item(-1), item(1)),
        (item(b"load"), item(1)),
        (item(None), item(1)),
        (item(1.5), item(1)),
        (item("zz"), item({"a": [{"b": b"c"}, None, 1.5, {7: 8}]})),
    ],
)
def test_sdcp_070_unknown_keys_are_ignored(pair: tuple[bytes, bytes]) -> None:
    assert cbor.decode(status_with(pair), Status) == Status(**STATUS)


def test_sdcp_070_unknown_keys_of_both_kinds_at_once() -> None:
    body = status_with((item("zz"), item(1)), (item(7), item(1)), (item(8), item(1)))
    assert cbor.decode(body, Status) == Status(**STATUS)


@pytest.mark.parametrize("key", ["x", 99, b"x", "<key that is not text>"])
@pytest.mark.parametrize("nested", [False, True])
def test_sdcp_028_unknown_keys_of_the_contract_tree(key: Any, nested: bool, message_values: dict[str, Any]) -> None:
    contract = dict(message_values["session-open"]["contract"])
    if nested:
        contract["sampling"] = {"seed": 1, key: 1}
    else:
        contract[key] = 1
    with pytest.raises(BadContract, match="contract"):
        cbor.decode(item(message_values["session-open"] | {"contract": contract}), SessionOpen)
    with pytest.raises(BadContract, match="contract"):
        cbor.decode(item(contract), Contract)


MALFORMED = {
    "empty": b"",
    "reserved": b"\xff",
    "break in a map": b"\xbf\x61a\xff",
    "cut off": status_with()[:-1],
    "trailing octet": status_with() + b"\0",  # AMB-008
    "two items": status_with() * 2,
    "duplicate key": status_with((item("load"), item(20))),  # AMB-005
    "duplicate unknown key": status_with((item("x"), item(1)), (item("x"), item(1))),
    "duplicate key in an unknown map": status_with((item("x"), b"\xa2\x61a\x01\x61a\x02")),
    "duplicate integer key": status_with((item(7), item(1)), (item(7), item(1))),
    "map as key": status_with((b"\xa0", item(1))),
    "array as key": status_with((b"\x81\x01", item(1))),
    "tag 2 bignum": status_with().replace(item("load") + b"\x14", item("load") + b"\xc2\x41\x14"),  # AMB-006
    "tagged map": b"\xd9\xd9\xf7" + status_with(),
    "float": status_with().replace(item("load") + b"\x14", item("load") + b"\xf9\x4d\x00"),
    "bool": status_with().replace(item("load") + b"\x14", item("load") + b"\xf5"),
    "null": status_with().replace(item("load") + b"\x14", item("load") + b"\xf6"),
    "undefined": status_with().replace(item("load") + b"\x14", item("load") + b"\xf7"),
    "simple value": status_with().replace(item("load") + b"\x14", item("load") + b"\xf0"),
    "negative": status_with().replace(item("load") + b"\x14", item("load") + b"\x33"),
    "text for a number": status_with().replace(item("load") + b"\x14", item("load") + b"\x6220"),
    "invalid UTF-8": status_with().replace(item("d"), b"\x61\xff"),
    "null for an optional member": status_with((item("accept_milli"), b"\xf6")),
    "too deep": status_with((item("x"), b"\x81" * 8 + b"\0")),
    "array": item([1, 2]),
    "number": item(1),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_amb_007_malformed_bodies(body: bytes) -> None:
    with pytest.raises(Malformed, match="status") as caught:
        cbor.decode(body, Status)
    assert (caught.value.status, caught.value.type) == (400, "about:blank")


def test_every_tag_is_refused() -> None:
    for tag in [*range(300), 1004, 43000, 55799, 65535, 2**32, 2**64 - 1]:
        head = cbor2.dumps(cbor2.CBORTag(tag, 0))[:-1]
        for payload in (item(0), item("a"), item(b"a"), item([1, 2]), item({}), item([])):
            with pytest.raises(Malformed):
                cbor.decode_value(head + payload, Any)  # type: ignore[arg-type]


def test_built_in_tags_are_those_of_the_library() -> None:
    """A release that decodes further tags itself must be noticed: this one leaves all others to the hook."""
    seen: list[int] = []

    def hook(tag: cbor2.CBORTag, *_: Any) -> None:
        seen.append(tag.tag)

    for tag in range(66000):
        try:
            cbor2.loads(cbor2.dumps(cbor2.CBORTag(tag, 0)), tag_hook=hook)
        except cbor2.CBORDecodeError:
            continue
    built_in = set(range(66000)) - set(seen)
    assert built_in == set(cbor._BUILT_IN_TAGS)


def test_nested_tags_and_containers_end_early() -> None:
    for body in (b"\xc2" * 100_000, b"\x81" * 100_000, b"\xa1" * 100_000, b"\x9f" * 100_000, b"\xbf\x00" * 50_000):
        with pytest.raises(Malformed):
            cbor.decode(body, Status)
        with pytest.raises(BadContract):
            cbor.decode(body, Contract)
        with pytest.raises(Malformed):
            cbor.decode(b"\xa1\x68contract" + body, SessionOpen)


def test_lengths_that_are_lies_end_early() -> None:
    for body in (b"\x9b" + b"\xff" * 8, b"\xbb" + b"\xff" * 8, b"\x5b" + b"\xff" * 8, b"\x7b" + b"\xff" * 8):
        with pytest.raises(Malformed):
            cbor.decode(body, Status)
        with pytest.raises(Malformed):
            cbor.decode(b"\xa1\x68contract" + body, SessionOpen)


def test_amb_010_body_limit() -> None:
    with pytest.raises(TooLarge) as caught:
        cbor.decode(bytes(cbor.MAX_BODY + 1), Status)
    assert caught.value.status == 413
    with pytest.raises(TooLarge):
        cbor.decode_value(bytes(cbor.MAX_BODY + 1), int)


def test_amb_007_defects_beside_the_contract_stay_malformed(message_values: dict[str, Any]) -> None:
    opening = message_values["session-open"]
    body = item(opening)
    for wrong in (body + b"\0", body[:-1], body.replace(item("epoch"), item("session")), b"\xc2" + body):
        with pytest.raises(Malformed):
            cbor.decode(wrong, SessionOpen)
    with pytest.raises(BadContract, match="contract: missing"):
        cbor.decode(item({key: value for key, value in opening.items() if key != "contract"}), SessionOpen)
    for value in (None, 1, [], "x", {}):
        with pytest.raises(BadContract):
            cbor.decode(item(opening | {"contract": value}), SessionOpen)


def test_amb_005_duplicate_key_in_a_contract_that_stands_anywhere(message_values: dict[str, Any]) -> None:
    opening = dict(message_values["session-open"])
    contract = item(opening.pop("contract"))
    twice = bytes([contract[0] + 1]) + contract[1:] + item("m_max") + item(8)
    rest = [(item(key), item(value)) for key, value in opening.items()]
    for at in range(len(rest) + 1):
        for key in (b"\x68contract", b"\x78\x08contract"):
            pairs = [*rest[:at], (key, twice), *rest[at:]]
            with pytest.raises(BadContract, match="m_max"):
                cbor.decode(map_of(*pairs), SessionOpen)
            with pytest.raises(BadContract, match="m_max"):
                cbor.decode(b"\xbf" + map_of(*pairs)[1:] + b"\xff", SessionOpen)


def test_amb_037_token_arrays() -> None:
    tokens = (0, 1, 2**32 - 1)
    body = cbor.encode_value(tokens)
    assert body.hex() == "830001" + "1affffffff"
    assert cbor.decode_value(body, Tokens) == tokens
    assert cbor.decode_value(b"\x80", Tokens) == ()
    assert cbor.decode_value(b"\x9f\x01\xff", Tokens) == (1,)
    for wrong in (
        item([2**32]),
        item([-1]),
        item([1.0]),
        item([True]),
        item([[1]]),
        item("x"),
        body + b"\0",
        body[:-1],
    ):
        with pytest.raises(Malformed, match="value"):
            cbor.decode_value(wrong, Tokens)


# ---- commit log (6.8) --------------------------------------------------------------------------------


def records_of(vectors: dict[str, Any]) -> list[CommitRecord | FenceRecord]:
    return [
        FenceRecord(**raw) if raw.keys() == {"epoch"} else CommitRecord(**raw | {"emitted": tuple(raw["emitted"])})
        for raw in vectors["commit_log"]["records"]
    ]


def test_sdcp_174_log_bytes(vectors: dict[str, Any]) -> None:
    records = records_of(vectors)
    log = bytes.fromhex(vectors["commit_log"]["object_hex"])
    assert b"".join(cbor.encode_record(record) for record in records) == log
    assert cbor.decode_records(log) == (tuple(records), len(log))
    assert cbor.decode_records(b"") == ((), 0)


def test_sdcp_174_a_torn_record_is_left_out(vectors: dict[str, Any]) -> None:
    records = records_of(vectors)
    ends = [0]
    for record in records:
        ends.append(ends[-1] + len(cbor.encode_record(record)))
    log = bytes.fromhex(vectors["commit_log"]["object_hex"])
    for cut in range(len(log) + 1):
        whole = max(index for index, end in enumerate(ends) if end <= cut)
        assert cbor.decode_records(log[:cut]) == (tuple(records[:whole]), ends[whole])


def test_sdcp_172_fence_is_a_map_with_exactly_one_key(vectors: dict[str, Any]) -> None:
    first = vectors["commit_log"]["records"][0]
    log = item(first | {"session": bytes(16), 7: 8}) + item({"epoch": 3})
    records, _ = cbor.decode_records(log)
    assert records == (records_of(vectors)[0], FenceRecord(epoch=3))  # extension keys are ignored (AMB-148)
    for not_a_fence in ({"epoch": 3, "x": 1}, {"epoch": 3, 7: 1}, {}, {"Epoch": 3}):
        with pytest.raises(Malformed, match="record 1"):
            cbor.decode_records(item(first) + item(not_a_fence))


def test_amb_062_final_record() -> None:
    record = CommitRecord(epoch=1, round=3, emitted=(), committed=2, digest=bytes(32), final=5)
    assert cbor.decode_records(cbor.encode_record(record))[0] == (record,)


@pytest.mark.parametrize(
    "damage", [b"\0", b"\xff", b"\x80", b"\xa1\x65epoch\xf5", b"\xa1\x65epoch\xc2\x41\x01", b"\x1c"]
)
def test_sdcp_174_damage_is_not_silently_dropped(damage: bytes, vectors: dict[str, Any]) -> None:
    log = bytes.fromhex(vectors["commit_log"]["object_hex"])
    with pytest.raises(Malformed, match="commit log record 3"):
        cbor.decode_records(log + damage + log)


# ---- anything at all ------------------------------------------------------------------------------------

ANY_TYPE = st.sampled_from([SessionOpen, SessionState, Verdict, Status, Contract])


@given(st.binary(max_size=200), ANY_TYPE)
def test_random_bodies_raise_refusals_only(body: bytes, type: type[Message]) -> None:
    with pytest.raises(Refusal):
        cbor.decode(body, type)


@given(st.data())
def test_mutated_bodies_raise_refusals_only(vectors: dict[str, Any], data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(vectors["messages"]["cases"]))
    body = bytearray.fromhex(case["cbor_hex"])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    for type in (SessionOpen, Verdict, Status, Contract):
        try:
            message = cbor.decode(bytes(body), type)
        except Refusal:
            continue
        assert cbor.decode(cbor.encode(message), type) == message
