"""CBOR, the only place that touches ``cbor2``: deterministic out (RFC 8949 4.2.1), strict in.

In: one data item of bounded size and depth, no duplicate keys, no tags (hence no bignums), integers of major type 0 or
1 only. Indefinite lengths and long integers are well-formed and accepted (AMB-004). Unknown keys are ignored, keys that
are not text among them (5.2), except in the contract tree, where any such key is refused (4.1, AMB-011).
A defect inside the contract is a ``BadContract``, any other a ``Malformed`` (AMB-007).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar

import cbor2
import msgspec

from sdcp_mono.core.messages import CommitRecord, Contract, FenceRecord, Message, Sampling
from sdcp_mono.core.problems import BadContract, Malformed, Refusal, TooLarge

M = TypeVar("M", bound=Message)
T = TypeVar("T")

MAX_BODY: Final = 16 * 2**20  # octets; an inline prompt is the largest thing a message carries (AMB-010)
MAX_DEPTH: Final = 8  # nested containers; session-open needs 3, the rest is for unknown keys
_SECOND_LOOK: Final = 2**18  # octets; a refused body is searched for the reason in Python, about 0.1 s at this size

_NOT_TEXT: Final = "<key that is not text>"  # stands for such keys, so that the contract refuses it as unknown
_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+")  # absolute, printable ASCII (RFC 3986, 4.3)
_REFERENCES: Final = ("prompt", "prompt_kv", "commit_log", "committed_tokens", "target_kv", "q_rows", "draft_kv")
# Every tag that cbor2 6 decodes itself; a test enumerates the library's.
_BUILT_IN_TAGS: Final = (
    *range(6), 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799,
)  # fmt: skip


def encode(message: Message) -> bytes:
    """Deterministic encoding; members that are ``UNSET`` are left out.

    cbor2's canonical order is length-first, which equals 4.2.1 for text keys; the members of a message are text.
    """
    return cbor2.dumps(msgspec.to_builtins(message, builtin_types=(bytes,)), canonical=True)


def encode_value(value: Any) -> bytes:
    """Deterministic encoding of a plain value, such as an array of token ids (AMB-037). Map keys must be text."""
    _assert_text_keys(value)
    return cbor2.dumps(value, canonical=True)


def decode(body: bytes, type: type[M]) -> M:
    """Read one message; raises ``Malformed``, ``BadContract`` or ``TooLarge``, naming the member at fault."""
    name = _wire_name(type)
    if len(body) > MAX_BODY:
        raise TooLarge(f"{name}: more than {MAX_BODY} octets")
    try:
        raw = _read(body)
    except cbor2.CBORDecodeError as error:
        problem: Refusal = Malformed(f"{name}: {error}")
        if _at_fault_is_contract(body, type):
            problem = BadContract(f"contract: {error}")
        raise problem from error
    if type is Contract:
        return _contract(raw)  # type: ignore[return-value]  # M is Contract
    if isinstance(raw, dict):
        if "contract" in type.__struct_fields__:
            raw["contract"] = _contract(raw.get("contract", msgspec.UNSET))
        _check_references(raw, name)
    return _convert(raw, type, name)


def decode_value(body: bytes, type: type[T]) -> T:
    """Read one plain value of a type that msgspec knows, e.g. ``tuple[Token, ...]``; raises ``Malformed``."""
    if len(body) > MAX_BODY:
        raise TooLarge(f"value: more than {MAX_BODY} octets")
    try:
        raw = _read(body)
    except cbor2.CBORDecodeError as error:
        raise Malformed(f"value: {error}") from error
    return _convert(raw, type, "value")


def encode_record(record: CommitRecord | FenceRecord) -> bytes:
    """One item of the CBOR sequence that is a commit log (6.8, AMB-148)."""
    return encode(record)


def decode_records(log: bytes) -> tuple[tuple[CommitRecord | FenceRecord, ...], int]:
    """The whole records of a commit log and the octets they take.

    Reading stops at a record whose end is missing (a torn append); any other defect raises ``Malformed``.
    """
    records: list[CommitRecord | FenceRecord] = []
    at = 0
    while at < len(log):
        name = f"commit log record {len(records)}"
        try:
            end = _end_of_item(log, at)
            if end > len(log):
                break
            raw = _read(log[at:end])
        except IndexError:
            break
        except (cbor2.CBORDecodeError, ValueError) as error:
            raise Malformed(f"{name}: {error}") from error
        # A fence is a map with exactly the key epoch.
        is_fence = isinstance(raw, dict) and raw.keys() == {"epoch"}
        records.append(_convert(raw, FenceRecord, name) if is_fence else _convert(raw, CommitRecord, name))
        at = end
    return tuple(records), at


def _read(body: bytes) -> Any:
    """One well-formed item, maps reduced to their text keys; raises ``CBORDecodeError``."""
    try:
        return _decode_item(body, strict_hashable_types=True)
    except cbor2.CBORDecodeError:
        # Keys of other types are allowed but rare. Tuples can be made to collide in a dict, so those stay refused.
        if len(body) > _SECOND_LOOK or not _has_simple_keys(body):
            raise
        return _decode_item(body, strict_hashable_types=False)


def _decode_item(body: bytes, *, strict_hashable_types: bool) -> Any:
    stream = io.BytesIO(body)
    value = cbor2.CBORDecoder(
        stream,
        max_depth=MAX_DEPTH,
        allow_duplicate_keys=False,
        strict_hashable_types=strict_hashable_types,
        semantic_decoders=_REFUSED_TAGS,
        tag_hook=_refuse_tag,
        object_hook=_text_keys,
    ).decode()
    if stream.tell() != len(body):
        raise cbor2.CBORDecodeError("octets after the data item")  # AMB-008
    return value


def _refuse_tag(*_: Any) -> NoReturn:
    raise ValueError("tags are not allowed")  # AMB-006


_REFUSED_TAGS: Final = dict.fromkeys(_BUILT_IN_TAGS, _refuse_tag)


def _text_keys(map: Mapping[Any, Any], _: bool) -> Mapping[Any, Any]:
    if all(type(key) is str for key in map):
        return map
    return {key: value for key, value in map.items() if type(key) is str} | {_NOT_TEXT: None}


def _assert_text_keys(value: Any) -> None:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("map keys must be text")  # otherwise the order would not be that of 4.2.1
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, dict | list | tuple):
                _assert_text_keys(item)


def _contract(raw: Any) -> Contract:
    if raw is msgspec.UNSET:
        raise BadContract("contract: missing")
    try:
        contract = msgspec.convert(raw, Contract, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise BadContract(f"contract: {error}") from error
    unknown = raw.get("sampling", {}).keys() - set(Sampling.__struct_fields__)
    if unknown:
        raise BadContract(f"contract.sampling: unknown key {min(unknown)!r}")  # AMB-011
    return contract


def _convert(raw: Any, type: type[T], name: str) -> T:
    try:
        return msgspec.convert(raw, type, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise Malformed(f"{name}: {error}") from error


def _check_references(raw: Mapping[str, Any], name: str) -> None:
    """A cache-ref is an absolute URI (5.2)."""
    for field in _REFERENCES:
        value = raw.get(field)
        if isinstance(value, str) and not _URI.fullmatch(value):
            raise Malformed(f"{name}: {field} is not an absolute URI")
    if isinstance(resume := raw.get("resume"), dict):
        _check_references(resume, f"{name}.resume")


def _wire_name(type: type[Message]) -> str:
    """SessionOpen -> session-open, as in the CDDL."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type.__name__).lower()


def _at_fault_is_contract(body: bytes, type: type[Message]) -> bool:
    """Whether a body that could not be decoded is well-formed with a defect (duplicate key, tag) in its contract."""
    if type is Contract:
        return True
    if "contract" not in type.__struct_fields__ or len(body) > _SECOND_LOOK:
        return False
    try:
        span = _contract_span(body)
        if span is not None:
            _read(body[span])
    except (IndexError, ValueError):
        return False
    except cbor2.CBORDecodeError:
        return True
    return False


def _contract_span(body: bytes) -> slice | None:
    """Where the value of the top-level key ``contract`` is; raises as ``_end_of_item`` does."""
    major, size, at = _head(body, 0)
    if major != 5 or _end_of_item(body, 0) > len(body):
        return None
    left = -1 if size is None else size
    while left != 0 and body[at] != 0xFF:
        key, _, text = _head(body, at)
        value = _end_of_item(body, at)
        end = _end_of_item(body, value)
        if key == 3 and body[text:value] == b"contract":
            return slice(value, end)
        at, left = end, left - 1
    return None


def _has_simple_keys(body: bytes) -> bool:
    try:
        _end_of_item(body, 0, simple_keys=True)
    except (IndexError, ValueError):
        return False
    return True


def _head(body: bytes, at: int) -> tuple[int, int | None, int]:
    """Major type, argument (None for indefinite length) and position after the head (RFC 8949, 3)."""
    major, info = body[at] >> 5, body[at] & 31
    at += 1
    if info < 24:
        return major, info, at
    if info < 28:
        width = 1 << (info - 24)
        if at + width > len(body):
            raise IndexError("head is cut off")
        return major, int.from_bytes(body[at : at + width], "big"), at + width
    if info == 31 and major in (2, 3, 4, 5):
        return major, None, at
    raise ValueError("not well-formed")


def _end_of_item(body: bytes, at: int, depth: int = 0, simple_keys: bool = False) -> int:
    """Position after the item at ``at``, without decoding it.

    Raises ``IndexError`` where the body ends first (or answers a position beyond it) and ``ValueError`` for what is
    not well-formed, too deep, or, if ``simple_keys``, a map key that is a container or tagged.
    """
    major, size, at = _head(body, at)
    while major == 6:
        major, size, at = _head(body, at)
    if major in (0, 1, 7):
        return at
    if major in (2, 3) and size is not None:
        return at + size
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    left = -1 if size is None else size * (2 if major == 5 else 1)
    is_key = major == 5
    while left != 0:
        if left < 0 and body[at] == 0xFF:
            return at + 1
        if simple_keys and is_key and body[at] >> 5 in (4, 5, 6):
            raise ValueError("map key is a container")
        at = _end_of_item(body, at, depth + 1, simple_keys)
        left, is_key = left - 1, major == 5 and not is_key
    return at
