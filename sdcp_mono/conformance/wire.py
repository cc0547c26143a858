"""The draft's bytes, written a second time: encoding, digests, draws, paths, schemas (4, 5.1, 5.2, 6.4, 7)."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import cbor2

Message: TypeAlias = dict[Any, Any]

MEDIA_TYPE: Final = "application/sdcp+cbor"
PROBLEM_TYPE: Final = "application/problem+json"
PREFIX: Final = "https://iana.org/assignments/sdcp#"
STALE_EPOCH, STALE_BASE, Q_UNAVAILABLE, BAD_CONTRACT, LIMIT, CLOSED, BAD_PROPOSAL, NOT_ASSIGNED = (
    (409, PREFIX + "sdcp-stale-epoch"),
    (409, PREFIX + "sdcp-stale-base"),
    (409, PREFIX + "sdcp-q-unavailable"),
    (422, PREFIX + "sdcp-bad-contract"),
    (422, PREFIX + "sdcp-limit"),
    (410, PREFIX + "sdcp-session-closed"),
    (422, PREFIX + "sdcp-bad-proposal"),
    (403, PREFIX + "sdcp-not-assigned"),
)
CONTINUE, REDUCE, SWITCH, SELF_DECODE, FINISH, FAIL = range(6)
GREEDY, SPECULATIVE_SAMPLING = 1, 2


def encode(value: object) -> bytes:
    """Deterministic for maps with text keys: shortest forms, keys by length, then bytewise (RFC 8949, 4.2.1)."""
    return cbor2.dumps(value, canonical=True)


def loose(value: object) -> bytes:
    """The same value in an encoding that is well-formed but not deterministic: indefinite maps, 8-octet integers."""
    match value:
        case bool() | str() | bytes():
            return cbor2.dumps(value)
        case int():
            return bytes((0x1B,)) + value.to_bytes(8, "big")
        case list() | tuple():
            return b"\x9f" + b"".join(loose(item) for item in value) + b"\xff"
        case dict():
            pairs = reversed(list(value.items()))
            return b"\xbf" + b"".join(loose(key) + loose(item) for key, item in pairs) + b"\xff"
    raise TypeError(type(value))


def decode(body: bytes) -> Any:
    return cbor2.loads(body)


def sequence(body: bytes) -> list[Any]:
    """The items of a CBOR sequence (RFC 8742), which is what a commit log is."""
    import io

    stream = io.BytesIO(body)
    items = []
    while stream.tell() < len(body):
        items.append(cbor2.CBORDecoder(stream).decode())
    return items


def session_path(session: bytes) -> str:
    """{id}: base64url without padding (5.1)."""
    return urlsafe_b64encode(session).decode().rstrip("=")


def unpath(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def contract_digest(contract: Message) -> bytes:
    return hashlib.sha256(b"SDCP-CONTRACT-1\0" + encode(contract)).digest()


def first_digest(contract: Message, prompt: Sequence[int]) -> bytes:
    """d[0] (4.2)."""
    tokens = b"".join(token.to_bytes(4, "big") for token in prompt)
    head = b"SDCP-PREFIX-1\0" + contract_digest(contract) + len(prompt).to_bytes(4, "big")
    return hashlib.sha256(head + tokens).digest()


def next_digest(digest: bytes, tokens: Iterable[int]) -> bytes:
    """d[k] from d[k-1], one link per token (4.2)."""
    for token in tokens:
        digest = hashlib.sha256(digest + token.to_bytes(4, "big")).digest()
    return digest


def uniform(seed: int, session: bytes, round_: int, i: int, purpose: int) -> float:
    """The verifier's random value: purpose 0 the acceptance test, 1 the additional token; i from 1 (6.4)."""
    message = b"SDCP-VERIFY-1\0" + session + struct.pack(">IIB", round_, i, purpose)
    return (int.from_bytes(hmac.digest(seed.to_bytes(8, "big"), message, "sha256")[:8], "big") >> 11) / 2**53


def rows(values: Iterable[Mapping[int, float]], vocab_size: int) -> bytes:
    """A q_rows object (5.2) from sparse rows; key -1 is the value of all other tokens."""
    out = bytearray()
    for row in values:
        dense = bytearray(struct.pack("<f", row.get(-1, 0.0)) * vocab_size)
        for token, value in row.items():
            if token >= 0:
                dense[4 * token : 4 * token + 4] = struct.pack("<f", value)
        out += dense
    return bytes(out)


def problem(body: bytes) -> Message:
    """A problem document; empty where the body is none."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# ---- schemas (5.2) -------------------------------------------------------------------------------

Test: TypeAlias = Callable[[Any], bool]


def uint(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def below(limit: int) -> Test:
    return lambda value: uint(value) and value <= limit


def octets(size: int) -> Test:
    return lambda value: isinstance(value, bytes) and len(value) == size


def uints(value: Any) -> bool:
    return isinstance(value, list) and all(uint(item) for item in value)


def text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def prompt(value: Any) -> bool:
    return uints(value) or text(value)


def mapping(value: Any) -> bool:
    return isinstance(value, dict)


def boolean(value: Any) -> bool:
    return isinstance(value, bool)


def role(value: Any) -> bool:
    return uint(value) and value in (1, 2)


HASH, SESSION = octets(32), octets(16)

# member -> test; a name that ends in "?" is optional.
SCHEMAS: Final[dict[str, dict[str, Test]]] = {
    "session-open": {
        "session": SESSION, "epoch": uint, "contract": mapping, "prompt": prompt, "prompt_kv?": text,
        "commit_log": text, "resume?": mapping,
    },
    "session-state": {
        "session": SESSION, "epoch": uint, "round": uint, "committed": uint, "digest": HASH, "state?": uint,
    },
    "assignment": {
        "session": SESSION, "epoch": uint, "contract": mapping, "verifier": text, "drafter": text, "prompt": prompt,
        "round": uint, "sampling?": mapping, "committed": uint, "digest": HASH, "committed_tokens?": text,
        "m_init": uint,
    },
    "proposal": {
        "session": SESSION, "epoch": uint, "round": uint, "drafter": text, "base": uint, "base_digest": HASH,
        "tokens": lambda value: uints(value) and bool(value), "q_rows?": text, "draft_kv?": text, "status": mapping,
    },
    "verdict": {
        "session": SESSION, "epoch": uint, "round": uint, "accepted": uint, "emitted": uints, "committed": uint,
        "digest": HASH, "action": uint, "m_cap": uint, "low": uint, "load": below(100),
    },
    "output": {
        "session": SESSION, "epoch": uint, "from": uint, "tokens": uints, "final": boolean, "finish?": uint,
    },
    "status": {
        "instance": text, "role": role, "load": below(100), "queue": uint, "accept_milli?": below(1000),
        "cache_mbps?": uint, "ttl_ms": uint,
    },
    "event": {"session": SESSION, "epoch": uint, "kind": uint, "committed": uint, "digest": HASH},
    "policy": {"session": SESSION, "from_round": uint, "sampling": mapping},
    "commit record": {"epoch": uint, "round": uint, "emitted": uints, "committed": uint, "digest": HASH},
}  # fmt: skip


def defects(name: str, value: Any) -> list[str]:
    """What is wrong with a message, one line each; unknown members are fine."""
    if not isinstance(value, dict):
        return [f"{name} is not a map"]
    found = []
    for member, test in SCHEMAS[name].items():
        key = member.rstrip("?")
        if key not in value:
            if not member.endswith("?"):
                found.append(f"{name}.{key} is missing")
        elif not test(value[key]):
            found.append(f"{name}.{key} is {value[key]!r:.60}")
    if name in ("proposal",) and not found:
        found += defects("status", value["status"])
    return found
