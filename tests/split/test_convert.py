"""Structs through protobuf and its bytes: exact both ways, every field of every struct, checked on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import NODEFAULT, UNSET, structs
from msgspec import inspect as mi

from sdcp_mono.core import messages, ports
from sdcp_mono.core.messages import CommitRecord, Contract, FenceRecord, Output, Sampling, SessionOpen, Status
from sdcp_mono.core.ports import Chunk, OpenOptions, TokenInfo
from sdcp_mono.core.problems import BadContract, Malformed
from sdcp_mono.grpc.convert import from_pb, record_from_pb, record_to_pb, to_pb
from sdcp_mono.grpc.pb import sdcp_pb2 as pb

STAYS = {  # what never leaves a process, or crosses in another form
    "Uniforms", "Logprobs", "Scored", "ScoreRequest", "ScoreFailure", "PassCost", "DraftRequest", "Draft",  # models
    "GenerateRequest",  # the front end lives with its router
    "Lease",  # its end is on one machine's clock: LeaseReply
    "Got",  # streamed in pieces: GetPart
}  # fmt: skip


def structs_of(module: Any) -> dict[str, type[msgspec.Struct]]:
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and cls.__module__ == module.__name__
    }


CROSSING = {
    name: cls
    for name, cls in (structs_of(messages) | structs_of(ports)).items()
    if name not in STAYS and name != "Message"
}


def test_every_struct_is_accounted_for() -> None:
    """A new one needs a message, or a reason to stay."""
    assert structs_of(ports).keys() & STAYS == STAYS
    assert {name for name in CROSSING if not hasattr(pb, name)} == set()


@pytest.mark.parametrize("cls", CROSSING.values(), ids=CROSSING.keys())
def test_every_field_has_its_field(cls: type[msgspec.Struct]) -> None:
    """Read off the descriptors, not through the converter."""
    descriptor = getattr(pb, cls.__name__).DESCRIPTOR
    oneofs = {oneof.name for oneof in descriptor.oneofs if not oneof.name.startswith("_")}
    plain = {field.name for field in descriptor.fields if field.containing_oneof is None}
    optional = {
        field.name
        for field in descriptor.fields
        if field.containing_oneof is not None and field.containing_oneof.name not in oneofs
    }
    assert plain | optional | oneofs == set(cls.__struct_fields__)
    for field in _fields(cls):
        if field.name not in oneofs:
            written = descriptor.fields_by_name[field.name]
            assert written.has_presence == (_absent(field) or isinstance(field.type, mi.StructType)), field.name


# ---- round trips -----------------------------------------------------------------------------------


def _fields(cls: type[msgspec.Struct]) -> tuple[mi.Field, ...]:
    info = mi.type_info(cls)
    assert isinstance(info, mi.StructType)
    return info.fields


def _absent(field: mi.Field) -> bool:
    """May be UNSET (msgspec then tells no default) or None."""
    return (not field.required and field.default is NODEFAULT and field.default_factory is NODEFAULT) or (
        isinstance(field.type, mi.UnionType) and any(isinstance(one, mi.NoneType) for one in field.type.types)
    )


# Token ids that were scored or committed fit 32 bits (core/messages.py); the ports' structs don't say so themselves.
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
OVERRIDES: Mapping[tuple[str, str], st.SearchStrategy[Any]] = {
    ("Chunk", "tokens"): TOKENS,
    ("RoundInfo", "emitted"): TOKENS,
    ("TokenLogprob", "token"): st.integers(0, 2**32 - 1),
    ("OpenOptions", "top_logprobs"): st.integers(-1, 20),
}


def values(type: mi.Type) -> st.SearchStrategy[Any]:
    match type:
        case mi.IntType(ge=low, le=high):
            return st.sampled_from([low or 0, high or 2**64 - 1]) | st.integers(low or 0, high or 2**64 - 1)
        case mi.FloatType():
            return st.sampled_from([0.0, -0.0]) | st.floats(allow_nan=False)
        case mi.BoolType():
            return st.booleans()
        case mi.StrType(min_length=low):
            return st.text(st.characters(exclude_categories=("Cs",)), min_size=low or 0, max_size=20)
        case mi.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=high)
        case mi.LiteralType(values=words):
            return st.sampled_from(words)
        case mi.VarTupleType(item_type=item, min_length=low):
            return st.lists(values(item), min_size=low or 0, max_size=4).map(tuple)
        case mi.StructType(cls=cls):
            return instances(cls)
        case mi.NoneType():
            return st.none()
        case mi.UnionType(types=types):
            return st.one_of(*map(values, types))
    raise NotImplementedError(type)


def instances(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    members = {}
    for field in _fields(cls):
        override = OVERRIDES.get((cls.__name__, field.name))
        strategy = values(field.type) if override is None else override
        unset = not field.required and field.default is NODEFAULT
        members[field.name] = st.just(UNSET) | strategy if unset else strategy
    return st.fixed_dictionaries(members).map(lambda chosen: cls(**chosen))


@pytest.mark.parametrize("cls", CROSSING.values(), ids=CROSSING.keys())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_round_trip(cls: type[msgspec.Struct], data: st.DataObject) -> None:
    value = data.draw(instances(cls))
    message = to_pb(value)
    again = from_pb(cls, type(message).FromString(message.SerializeToString()))
    assert again == value
    assert repr(again) == repr(value)  # -0.0, True and 1, UNSET and None: equal and yet different


@given(record=instances(CommitRecord) | instances(FenceRecord))
def test_round_trip_of_records(record: CommitRecord | FenceRecord) -> None:
    message = pb.LogRecord.FromString(record_to_pb(record).SerializeToString())
    assert record_from_pb(message) == record
    assert type(record_from_pb(message)) is type(record)


def test_absent_and_zero_differ() -> None:
    for sampling in (Sampling(), Sampling(temperature_milli=0), Sampling(top_k=0), Sampling(top_p_milli=0)):
        assert from_pb(Sampling, to_pb(sampling)) == sampling
    assert to_pb(Sampling()).SerializeToString() == b""
    assert to_pb(Sampling(seed=0)).SerializeToString() == b"\x20\x00"  # field 4, zero
    status = Status(instance="i", role=1, load=0, queue=0, ttl_ms=0)
    empty = structs.replace(status, models=())
    assert (from_pb(Status, to_pb(status)).models, from_pb(Status, to_pb(empty)).models) == (UNSET, ())
    assert from_pb(Chunk, to_pb(Chunk(0, 0, (), (), False, 0))).finish == 0
    assert from_pb(TokenInfo, to_pb(TokenInfo("self", 0.0, 0.0))).logprob is None
    assert from_pb(OpenOptions, to_pb(OpenOptions())).top_logprobs == -1


# ---- what arrives ------------------------------------------------------------------------------------


def test_lengths_and_bounds_are_checked(kit: Any) -> None:
    good = to_pb(kit.OPENING)
    for change, kind, name in (
        ({"session": b"short"}, Malformed, "session"),
        ({"commit_log": ""}, Malformed, "commit_log"),
        ({"contract": pb.Contract()}, BadContract, "target"),
        ({"prompt_ref": ""}, Malformed, "prompt"),
        ({"resume": pb.Resume()}, Malformed, "resume"),
    ):
        message = pb.SessionOpen()
        message.CopyFrom(good)
        for field, value in change.items():
            message.ClearField(field)  # type: ignore[arg-type]
            if isinstance(value, pb.Contract | pb.Resume):
                getattr(message, field).CopyFrom(value)
                getattr(message, field).SetInParent()
            else:
                setattr(message, field, value)
        with pytest.raises(kind, match=name):
            from_pb(SessionOpen, message)
    message = pb.SessionOpen()
    message.CopyFrom(good)
    message.ClearField("contract")
    with pytest.raises(BadContract, match="contract"):
        from_pb(SessionOpen, message)
    message.CopyFrom(good)
    message.ClearField("prompt_tokens")
    with pytest.raises(Malformed, match="prompt"):
        from_pb(SessionOpen, message)


def test_what_a_newer_peer_has_added_is_ignored_but_not_in_a_contract(kit: Any) -> None:
    """AMB-011. Field 1000, a varint, at the end of a message is what an added field looks like."""
    added = b"\xc0\x3e\x01"
    opening = pb.SessionOpen.FromString(to_pb(kit.OPENING).SerializeToString() + added)
    assert from_pb(SessionOpen, opening) == kit.OPENING
    sampling = pb.Sampling.FromString(added)
    assert from_pb(Sampling, sampling) == Sampling()
    contract = pb.Contract.FromString(to_pb(kit.CONTRACT).SerializeToString() + added)
    with pytest.raises(BadContract, match="not known"):
        from_pb(Contract, contract)
    opening.contract.CopyFrom(contract)
    with pytest.raises(BadContract, match="not known"):
        from_pb(SessionOpen, opening)
    within = to_pb(structs.replace(kit.CONTRACT, sampling=Sampling()))
    assert from_pb(Contract, within).sampling == Sampling()
    within.sampling.MergeFromString(added)
    with pytest.raises(BadContract, match="Sampling"):
        from_pb(Contract, within)
    opening.contract.CopyFrom(within)
    with pytest.raises(BadContract, match="Sampling"):
        from_pb(SessionOpen, opening)


def test_an_unknown_origin_or_record_is_malformed() -> None:
    with pytest.raises(Malformed, match="origin"):
        from_pb(TokenInfo, pb.TokenInfo.FromString(b"\x08\x09"))  # origin 9
    with pytest.raises(Malformed, match="LogRecord"):
        record_from_pb(pb.LogRecord())


def test_tokens_never_reach_a_detail() -> None:
    output = Output(session=bytes(16), epoch=1, from_=0, tokens=(7,), final=False)
    message = to_pb(output)
    message.session = b"x"
    with pytest.raises(Malformed) as caught:
        from_pb(Output, message)
    assert "7" not in caught.value.detail
