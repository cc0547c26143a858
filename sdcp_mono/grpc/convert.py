"""Structs to protobuf messages and back, exactly (``core/messages.py``, ``core/ports.py``).

A struct and its message have the same name and the same fields. The rules, worked out once for each struct:

- ``UNSET`` and ``None`` are an absent field, which has explicit presence; anything else is there, zero or not.
- A tuple is repeated; one that may be absent is a message whose ``items`` are.
- ``tokens | reference`` is a oneof of ``<name>_tokens`` and ``<name>_ref``; literals are enums.

What arrives is checked as ``core/cbor.py`` checks it: shapes, lengths, bounds. Fields that a newer peer has added are
ignored, except in a contract, which both sides must understand whole (4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import NODEFAULT, UNSET, Struct
from msgspec import inspect as mi

from sdcp_mono.core.messages import CommitRecord, Contract, FenceRecord
from sdcp_mono.core.problems import BadContract, Malformed
from sdcp_mono.grpc.pb import sdcp_pb2 as pb

S = TypeVar("S", bound=Struct)

UNDERSTOOD_WHOLE: Final = ("Contract", "Contract.sampling")


def to_pb(value: Struct) -> Any:
    """The message of the same name. Raises ``ValueError`` for a number that it has no room for."""
    return _codec(type(value)).write(value)


def from_pb(type: type[S], message: Message) -> S:
    """Raises ``Malformed``, or ``BadContract`` where the contract is at fault, naming the field."""
    raw = _codec(type).read(message)
    try:
        return msgspec.convert(raw, type, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        text = str(error)
        kind = BadContract if type is Contract or "`$.contract" in text or "field `contract`" in text else Malformed
        raise kind(f"{type.__name__}: {text}") from error


def record_to_pb(record: CommitRecord | FenceRecord) -> pb.LogRecord:
    """One record of a commit log, which may be of either kind."""
    if isinstance(record, FenceRecord):
        return pb.LogRecord(fence=to_pb(record))
    return pb.LogRecord(commit=to_pb(record))


def record_from_pb(message: pb.LogRecord) -> CommitRecord | FenceRecord:
    match message.WhichOneof("record"):
        case "commit":
            return from_pb(CommitRecord, message.commit)
        case "fence":
            return from_pb(FenceRecord, message.fence)
    raise Malformed("LogRecord: of a kind that is not known here")


def octets(value: bytes, length: int, name: str) -> bytes:
    """A field that isn't part of a struct, checked for its length; raises ``Malformed``."""
    if len(value) != length:
        raise Malformed(f"{name}: expected {length} octets")
    return value


@dataclass(frozen=True, slots=True)
class _Field:
    """``name`` in the struct, ``key`` in its plain form; ``write`` answers the message's field and its value."""

    name: str
    key: str
    write: Callable[[Any], tuple[str, Any]]
    read: Callable[[Any], Any]  # UNSET: absent


@dataclass(frozen=True, slots=True)
class _Codec:
    message: Callable[..., Message]
    fields: Sequence[_Field]
    whole: bool  # nothing in it may be unknown

    def write(self, struct: Struct) -> Message:
        members = {}
        for field in self.fields:
            value = getattr(struct, field.name)
            if value is not UNSET and value is not None:
                name, written = field.write(value)
                members[name] = written
        return self.message(**members)

    def read(self, message: Message) -> dict[str, Any]:
        if self.whole and len(UnknownFieldSet(message)):
            raise BadContract(f"contract: a field that is not known here in {message.DESCRIPTOR.name}")
        raw = {}
        for field in self.fields:
            value = field.read(message)
            if value is not UNSET:
                raw[field.key] = value
        return raw


@lru_cache(128)  # more than there are structs
def _codec(type: type[Struct], path: str = "") -> _Codec:
    """Raises ``TypeError`` where struct and message differ: a field was forgotten."""
    message: Any = getattr(pb, type.__name__)
    path = path or type.__name__
    known = {field.name: field for field in message.DESCRIPTOR.fields}
    fields, used = [], set[str]()
    for field in _fields(type):
        names = [field.name] if field.name in known else [f"{field.name}_tokens", f"{field.name}_ref"]
        if not known.keys() >= set(names):
            raise TypeError(f"{path}.{field.name}: not in the message")
        used.update(names)
        write, read = _field(field, [known[name] for name in names], path)
        fields.append(_Field(field.name, field.encode_name, write, read))
    if used != known.keys():
        raise TypeError(f"{path}: fields of the message only: {sorted(known.keys() - used)}")
    return _Codec(message, tuple(fields), path in UNDERSTOOD_WHOLE)


def _fields(type: type[Struct]) -> Sequence[mi.Field]:
    info = mi.type_info(type)
    assert isinstance(info, mi.StructType)
    return info.fields


def _field(
    field: mi.Field, known: Sequence[FieldDescriptor], path: str
) -> tuple[Callable[[Any], tuple[str, Any]], Callable[[Any], Any]]:
    if len(known) == 2:
        return _tokens_or_reference(known[0].name, known[1].name)
    name, absent = known[0].name, _may_be_absent(field)
    type = _present(field.type)
    repeated = isinstance(type, mi.VarTupleType)
    if absent and repeated:
        return (
            lambda value: (name, {"items": value}),
            lambda message: list(getattr(message, name).items) if message.HasField(name) else UNSET,
        )
    if (absent or isinstance(type, mi.StructType)) != known[0].has_presence:
        raise TypeError(f"{path}.{name}: presence differs")
    one = type.item_type if isinstance(type, mi.VarTupleType) else type
    write, read = _value(one, known[0], f"{path}.{name}")
    if repeated:
        return (
            lambda value: (name, value if write is None else [write(item) for item in value]),
            lambda message: [item if read is None else read(item) for item in getattr(message, name)],
        )

    def read_one(message: Any) -> Any:
        if known[0].has_presence and not message.HasField(name):
            return UNSET
        value = getattr(message, name)
        return value if read is None else read(value)

    return lambda value: (name, value if write is None else write(value)), read_one


def _tokens_or_reference(tokens: str, reference: str) -> tuple[Callable[[Any], tuple[str, Any]], Callable[[Any], Any]]:
    def write(value: Any) -> tuple[str, Any]:
        return (reference, value) if isinstance(value, str) else (tokens, {"items": value})

    def read(message: Any) -> Any:
        if message.HasField(reference):
            return getattr(message, reference)
        return list(getattr(message, tokens).items) if message.HasField(tokens) else UNSET

    return write, read


def _value(
    type: mi.Type, known: FieldDescriptor, path: str
) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """How one value is written and read; None where it is the same on both sides."""
    match type:
        case mi.StructType(cls=cls):
            codec = _codec(cls, path if path in UNDERSTOOD_WHOLE else "")
            return codec.write, codec.read
        case mi.LiteralType() if known.enum_type is not None:
            return _enum(known.enum_type)
        case mi.IntType() | mi.FloatType() | mi.BoolType() | mi.StrType() | mi.BytesType():
            return None, None
    raise TypeError(f"{path}: {type} has no form in a message")


def _enum(enum: EnumDescriptor) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """``ORIGIN_SELF`` of ``Origin`` is "self"; what isn't known is left for the check to refuse."""
    prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in enum.name)[1:] + "_"
    numbers = {value.name.removeprefix(prefix).lower(): value.number for value in enum.values if value.number}
    words = {number: word for word, number in numbers.items()}
    return numbers.__getitem__, lambda number: words.get(number, "unspecified")


def _may_be_absent(field: mi.Field) -> bool:
    """msgspec tells a default of UNSET only by a field that is not required and yet has no default."""
    unset = not field.required and field.default is NODEFAULT and field.default_factory is NODEFAULT
    return unset or (isinstance(field.type, mi.UnionType) and field.type.includes_none)


def _present(type: mi.Type) -> mi.Type:
    """The type of a value that is there."""
    if not isinstance(type, mi.UnionType):
        return type
    (one,) = (t for t in type.types if not isinstance(t, mi.NoneType))
    return one


__all__ = ["from_pb", "octets", "record_from_pb", "record_to_pb", "to_pb"]
