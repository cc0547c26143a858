"""A CBOR reader of thirty lines and the draft's digests, independent of the kit and of the server."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import cbor2


class Defect(Exception):
    """Not one well-formed, untagged data item; ``contract`` says whether the fault lies inside the contract."""

    def __init__(self, what: str, contract: bool = False) -> None:
        super().__init__(what)
        self.contract = contract


class Reader:
    """Strict: no tags, no duplicate keys, no trailing bytes; indefinite lengths and long integers are fine."""

    def __init__(self, body: bytes, *, duplicates: bool = False, tags: bool = False, definite: bool = False) -> None:
        self.body, self.at = body, 0
        self.duplicates, self.tags, self.definite = duplicates, tags, definite

    def whole(self, *, trailing: bool = False) -> Any:
        value = self.item(False)
        if self.at != len(self.body) and not trailing:
            raise Defect("trailing bytes")
        return value

    def take(self, count: int) -> bytes:
        piece = self.body[self.at : self.at + count]
        if len(piece) < count:
            raise Defect("truncated")
        self.at += count
        return piece

    def head(self) -> tuple[int, int | None]:
        (first,) = self.take(1)
        major, info = first >> 5, first & 31
        if info < 24:
            return major, info
        if info < 28:
            return major, int.from_bytes(self.take(1 << (info - 24)), "big")
        if info == 31 and not self.definite:
            return major, None
        raise Defect("a reserved or indefinite length")

    def item(self, contract: bool) -> Any:
        start = self.at
        major, number = self.head()
        match major:
            case 0 if number is not None:
                return number
            case 1 if number is not None:
                return -1 - number
            case 2 | 3 if number is not None:
                piece = self.take(number)
                return piece if major == 2 else piece.decode()
            case 4:
                items = []
                while not self.over(number, len(items)):
                    items.append(self.item(contract))
                return items
            case 5:
                pairs: dict[Any, Any] = {}
                count = 0
                while not self.over(number, count):
                    key = self.item(contract)
                    inner = contract or key == "contract"
                    value = self.item(inner)
                    if key in pairs and not self.duplicates:
                        raise Defect("a duplicate key", contract)
                    pairs[key] = value
                    count += 1
                return pairs
            case 7 if number is not None:
                return self.simple(start, number, contract)
        if major == 6 and self.tags:
            self.at = start
            return self.lenient()
        raise Defect("a tag or a length without end", contract)

    def over(self, number: int | None, count: int) -> bool:
        if number is not None:
            return count >= number
        if self.body[self.at : self.at + 1] == b"\xff":
            self.at += 1
            return True
        return False

    def simple(self, start: int, number: int, contract: bool) -> Any:
        size = self.at - start - 1
        if size == 0 and number in (20, 21, 22):
            return {20: False, 21: True, 22: None}[number]
        if size in (2, 4, 8):
            return struct.unpack({2: ">e", 4: ">f", 8: ">d"}[size], number.to_bytes(size, "big"))[0]
        raise Defect("a simple value", contract)

    def lenient(self) -> Any:
        import io

        stream = io.BytesIO(self.body[self.at :])
        value = cbor2.CBORDecoder(stream).decode()
        self.at += stream.tell()
        return value


def encode(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def u32(value: int, order: str = "big") -> bytes:
    return value.to_bytes(4, order)  # type: ignore[arg-type]


def is_uint(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_octets(size: int) -> Any:
    return lambda value: isinstance(value, bytes) and len(value) == size


def is_uints(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_uint, value))


def is_reference(value: Any) -> bool:
    return isinstance(value, str) and "://" in value and " " not in value


def up_to(limit: int) -> Any:
    return lambda value: is_uint(value) and value <= limit


def is_map(value: Any) -> bool:
    return isinstance(value, dict)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


OPEN = {
    "session": is_octets(16), "epoch": is_uint, "prompt": lambda v: is_uints(v) or is_reference(v),
    "commit_log": is_reference, "resume?": is_map, "prompt_kv?": is_reference,
}  # fmt: skip
RESUME = {"round": is_uint, "committed": is_uint, "digest": is_octets(32), "committed_tokens": is_reference}
ASSIGNMENT = {
    "session": is_octets(16), "epoch": is_uint, "contract": is_map, "verifier": is_text, "drafter": is_text,
    "prompt": lambda v: is_uints(v) or is_reference(v), "round": is_uint, "committed": is_uint,
    "digest": is_octets(32), "m_init": is_uint,
}  # fmt: skip
PROPOSAL = {
    "session": is_octets(16), "epoch": is_uint, "round": is_uint, "drafter": is_text, "base": is_uint,
    "base_digest": is_octets(32), "tokens": lambda v: is_uints(v) and bool(v), "q_rows?": is_text, "status": is_map,
}  # fmt: skip
STATUS = {
    "instance": is_text, "role": lambda v: v in (1, 2), "load": up_to(100), "queue": is_uint,
    "accept_milli?": up_to(1000), "ttl_ms": is_uint,
}  # fmt: skip
POLICY = {"session": is_octets(16), "from_round": is_uint, "sampling": is_map}
EVENT = {"session": is_octets(16), "epoch": is_uint, "kind": is_uint, "committed": is_uint, "digest": is_octets(32)}
SAMPLING = {"temperature_milli?": is_uint, "top_k?": is_uint, "top_p_milli?": up_to(1000), "seed?": is_uint}
LADDER = (1, 2, 3, 5)
CONTRACT = {
    "target": is_octets(32), "tokenizer": is_octets(32),
    "drafters?": lambda v: isinstance(v, list) and bool(v) and all(map(is_octets(32), v)),
    "rule": lambda v: is_uint(v) and v in (1, 2), "sampling?": is_map, "m_max": lambda v: is_uint(v) and 0 < v <= 64,
    "max_new": up_to(2**32 - 1), "stop": lambda v: is_uints(v) and all(t < 2**32 for t in v),
    "low_rounds": lambda v: is_uint(v) and v > 0, "low_ratio?": up_to(100),
    "fallback": lambda v: is_uints(v) and bool(v) and all(e in LADDER for e in v), "self_load?": up_to(100),
    "self_max?": is_uint, "scope?": is_octets(16),
}  # fmt: skip


def fault(message: Any, schema: dict[str, Any], unchecked: tuple[str, ...] = ()) -> str | None:
    """The member at fault; None where the message is as it should be."""
    if not isinstance(message, dict):
        return "message"
    for name, test in schema.items():
        key = name.rstrip("?")
        if key in unchecked or (key not in message and name.endswith("?")):
            continue
        if key not in message or not test(message[key]):
            return key
    return None
