"""The draft's words: every message of ``sdcp.cddl`` as a frozen struct (sections 4.1 and 5.2).

A message holds what is on the wire and nothing else; a member the sender left out is ``UNSET`` and is left out again
when encoded, so an absent member and its default stay different (the contract digest depends on it, AMB-014).
Shapes are checked when a message is decoded (``core/cbor.py``); rules that need more than one member live in
``core/contract.py``.

Integers are CBOR major type 0, so at most 2**64 - 1; token ids and counters that enter a digest fit 32 bits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

__all__ = [
    "UNSET",
    "UINT32_MAX",
    "Action",
    "Assignment",
    "CacheRef",
    "CommitRecord",
    "Contract",
    "Decline",
    "Event",
    "FenceRecord",
    "Hash32",
    "Output",
    "Policy",
    "Proposal",
    "Resume",
    "Role",
    "Rule",
    "Sampling",
    "SessionId",
    "SessionOpen",
    "SessionState",
    "Status",
    "Token",
    "Uint",
    "UnsetType",
    "Verdict",
    "action_of",
]

UINT32_MAX: Final = 2**32 - 1

Uint = Annotated[int, Meta(ge=0)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Milli = Annotated[int, Meta(ge=0, le=1000)]
Token = Annotated[int, Meta(ge=0, le=UINT32_MAX)]
Hash32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
ScopeId = Annotated[bytes, Meta(min_length=16, max_length=16)]
CacheRef = Annotated[str, Meta(min_length=1, max_length=2048)]  # a URI; longer ones are refused by common HTTP stacks


class Rule(IntEnum):
    """Acceptance rules (10.2.2); 0 is reserved."""

    GREEDY = 1
    SPECULATIVE_SAMPLING = 2


class Action(IntEnum):
    """What a verdict tells the drafter (6.5.2, 10.2.3)."""

    CONTINUE = 0
    REDUCE = 1
    SWITCH = 2
    SELF_DECODE = 3
    FINISH = 4
    FAIL = 5


class Role(IntEnum):
    """The reporting role of a status message (5.2)."""

    DRAFTER = 1
    VERIFIER = 2


def action_of(value: int) -> Action:
    """Read a received action; one this document does not define means ``fail`` (5.2)."""
    try:
        return Action(value)
    except ValueError:
        return Action.FAIL


class Message(Struct, frozen=True, kw_only=True):
    """Base of all messages: immutable, slotted, members by keyword."""


class Sampling(Message, frozen=True, kw_only=True):
    """The sampling profile: it defines p (4.1). An absent temperature is 1000, an absent top_k or top_p keeps all."""

    temperature_milli: Uint | UnsetType = UNSET
    top_k: Uint | UnsetType = UNSET
    top_p_milli: Milli | UnsetType = UNSET
    seed: Uint | UnsetType = UNSET


class Contract(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The immutable session contract (4.1). ``rule`` and ``fallback`` are checked in ``core/contract.py``."""

    target: Hash32
    tokenizer: Hash32
    drafters: Annotated[tuple[Hash32, ...], Meta(min_length=1, max_length=1024)] | UnsetType = UNSET
    rule: Uint
    sampling: Sampling | UnsetType = UNSET
    m_max: Annotated[int, Meta(ge=0, le=64)]
    max_new: Uint
    stop: Annotated[tuple[Uint, ...], Meta(max_length=1024)]
    low_rounds: Annotated[int, Meta(ge=1)]
    low_ratio: Percent | UnsetType = UNSET
    fallback: Annotated[tuple[Uint, ...], Meta(min_length=1, max_length=1024)]
    self_load: Percent | UnsetType = UNSET
    self_max: Uint | UnsetType = UNSET
    scope: ScopeId | UnsetType = UNSET


class Resume(Message, frozen=True, kw_only=True):
    """Where a new verifier takes over (6.9)."""

    round: Uint
    committed: Uint
    digest: Hash32
    committed_tokens: CacheRef
    target_kv: CacheRef | UnsetType = UNSET


class SessionOpen(Message, frozen=True, kw_only=True):
    """Router to verifier (6.1). ``epoch`` is 1, or higher together with ``resume``."""

    session: SessionId
    epoch: Uint
    contract: Contract
    prompt: tuple[Token, ...] | CacheRef
    prompt_kv: CacheRef | UnsetType = UNSET
    commit_log: CacheRef
    resume: Resume | UnsetType = UNSET


class SessionState(Message, frozen=True, kw_only=True):
    """Where a session stands. ``state`` uses action codes (AMB-069): 0 drafting, 2 waiting, 3 self-decoding, 4, 5."""

    session: SessionId
    epoch: Uint
    round: Uint
    committed: Uint
    digest: Hash32
    state: Uint | UnsetType = UNSET


class Assignment(Message, frozen=True, kw_only=True):
    """Router to verifier, then to the drafter (6.1). ``round`` is the last committed round."""

    session: SessionId
    epoch: Uint
    contract: Contract
    verifier: str
    drafter: str
    prompt: tuple[Token, ...] | CacheRef
    round: Uint
    sampling: Sampling | UnsetType = UNSET
    committed: Uint
    digest: Hash32
    committed_tokens: CacheRef | UnsetType = UNSET
    m_init: Uint


class Status(Message, frozen=True, kw_only=True):
    """A role's report to the router; it expires ``ttl_ms`` after it was received (5.2, 6.1)."""

    instance: str
    role: Annotated[int, Meta(ge=1, le=2)]
    load: Percent
    queue: Uint
    accept_milli: Milli | UnsetType = UNSET
    cache_mbps: Uint | UnsetType = UNSET
    ttl_ms: Uint
    # Extension members (AMB-033, AMB-047): how the router learns what an instance serves and where.
    models: tuple[Hash32, ...] | UnsetType = UNSET
    tokenizer: Hash32 | UnsetType = UNSET
    base: str | UnsetType = UNSET


class Proposal(Message, frozen=True, kw_only=True):
    """Drafter to verifier: M tokens that extend the prefix of length ``base`` (6.2)."""

    session: SessionId
    epoch: Uint
    round: Uint
    drafter: str
    base: Uint
    base_digest: Hash32
    tokens: Annotated[tuple[Uint, ...], Meta(min_length=1)]
    q_rows: CacheRef | UnsetType = UNSET
    draft_kv: CacheRef | UnsetType = UNSET
    status: Status


class Decline(Message, frozen=True, kw_only=True):
    """Extension (docs/decisions/0003): the assigned drafter has nothing to propose for this round.

    The verifier decodes one token itself, a round without a proposal, and answers with the state after it.
    """

    session: SessionId
    epoch: Uint
    round: Uint
    drafter: str


class Verdict(Message, frozen=True, kw_only=True):
    """Verifier to drafter: what the round committed and how to go on (6.3 to 6.5)."""

    session: SessionId
    epoch: Uint
    round: Uint
    accepted: Uint
    emitted: tuple[Token, ...]
    committed: Uint
    digest: Hash32
    action: Uint
    m_cap: Uint
    low: Uint
    load: Percent


class Output(Message, frozen=True, kw_only=True):
    """Committed tokens from output index ``from_`` on (6.7)."""

    session: SessionId
    epoch: Uint
    from_: Uint = msgspec.field(name="from")
    tokens: tuple[Token, ...]
    final: bool
    finish: Uint | UnsetType = UNSET


class Event(Message, frozen=True, kw_only=True):
    """Verifier to router: the session needs another drafter, or has ended (6.5.2)."""

    session: SessionId
    epoch: Uint
    kind: Uint
    committed: Uint
    digest: Hash32


class Policy(Message, frozen=True, kw_only=True):
    """Router to verifier: a new sampling profile from a later round on (6.6)."""

    session: SessionId
    from_round: Uint
    sampling: Sampling


class CommitRecord(Message, frozen=True, kw_only=True):
    """One committed round in the commit log (6.8). ``final`` is an extension: how the session ended (AMB-062)."""

    epoch: Uint
    round: Uint
    emitted: tuple[Token, ...]
    committed: Uint
    digest: Hash32
    final: Uint | UnsetType = UNSET


class FenceRecord(Message, frozen=True, kw_only=True):
    """After it, appends with a lower epoch fail (6.8). On the wire a map with exactly one key."""

    epoch: Uint
