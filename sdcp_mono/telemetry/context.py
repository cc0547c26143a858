"""Which trace a session belongs to: W3C Trace Context, and ids that follow from the session's id.

Every process that knows a session's id finds the same trace, the same root and the same rounds, with nothing shared.
A client's own trace goes from the router to the others as ``traceparent``; then the session is part of that one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import sha256
from typing import Final

from msgspec import Struct

from sdcp_mono.core.messages import SessionId

TRACEPARENT: Final = "traceparent"
_CURRENT: ContextVar[str] = ContextVar("sdcp_traceparent", default="")
_FORM: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACEPARENT: Final = 128  # characters; version 00 has 55, later ones may have more


class Context(Struct, frozen=True):
    """A trace and the span that others hang under: a session's root, or the client's span above it."""

    trace_id: bytes  # 16 octets
    span_id: bytes  # 8 octets

    def traceparent(self, sampled: bool) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(sampled):02x}"

    def round_id(self, epoch: int, round_: int) -> bytes:
        """The span of a round: the drafter's is below it, though the verifier makes it."""
        return sha256(b"round" + self.span_id + epoch.to_bytes(8, "big") + round_.to_bytes(8, "big")).digest()[:8]


def of_session(session: SessionId, parent: Context | None = None, attempt: bytes = b"") -> Context:
    """A session's trace and root. ``attempt`` sets apart what has the same session id, such as repeated requests."""
    digest = sha256(b"sdcp trace" + session + attempt).digest()
    return Context(digest[:16] if parent is None else parent.trace_id, digest[16:24])


def sampled(session: SessionId, share: float) -> bool:
    """Whether a session is in the sample: every process that has the same share decides the same."""
    return int.from_bytes(sha256(b"sdcp sample" + session).digest()[:8], "big") < share * 2**64


def parse(traceparent: str) -> Context | None:
    """None for anything that is not a traceparent."""
    match = _FORM.fullmatch(traceparent) if len(traceparent) <= MAX_TRACEPARENT else None
    if match is None or (traceparent.startswith("00") and match[4]):
        return None
    return Context(bytes.fromhex(match[1]), bytes.fromhex(match[2]))


def fresh_span_id() -> bytes:
    return secrets.token_bytes(8)


def current() -> Context | None:
    """The trace of the call that is being handled, or of the session this task works for."""
    return parse(_CURRENT.get())


def enter(traceparent: str) -> None:
    """From here on the trace of this task's calls."""
    _CURRENT.set(traceparent)


def inject() -> Mapping[str, str]:
    """Metadata for a call."""
    trace = _CURRENT.get()
    return {TRACEPARENT: trace} if trace else {}


def extract(metadata: Mapping[str, str]) -> None:
    """Metadata of a call, at the start of its handler."""
    _CURRENT.set(metadata.get(TRACEPARENT, ""))
