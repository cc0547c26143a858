"""What the engine wants done, as data (design, section 2).

The law: a verdict exists only inside the ``Commit`` that an ``Append`` carries, and only the engine's ``appended()``
turns it into a ``Reply``. So "append before verdict" (6.3 step 8) can't be written the other way round.

Roles carry effects out and call the engine back with the ``ticket``; an answer to a ticket that is no longer current
is dropped by the engine, so late results of closed or superseded sessions are harmless.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from sdcp_mono.core.control import Control
from sdcp_mono.core.messages import Event, SessionId, SessionState, Verdict
from sdcp_mono.core.ports import LogAppend, RoundInfo, ScoreRequest
from sdcp_mono.core.problems import Refusal

Waiter: TypeAlias = int  # names the caller that waits for an answer; the role chooses it
Ticket: TypeAlias = int  # names one round in flight; the engine chooses it


class Moment(Struct, frozen=True):
    """When something happens, and how busy the verifier is: monotonic milliseconds and load in percent."""

    ms: int
    load: int


class FetchRows(Struct, frozen=True):
    """Obtain and check the draft rows (6.3 step 5); then ``Engine.rows_ready`` or ``Engine.rows_failed``."""

    ticket: Ticket
    session: SessionId
    uri: str
    tokens: tuple[int, ...]
    scope: bytes | None


class Score(Struct, frozen=True):
    """Score a round (6.3 step 6); then ``Engine.scored``.

    With ``fresh_uniforms`` the profile has no seed: whoever carries this out draws M + (M + 1) values from a
    cryptographically secure generator into ``request.uniforms`` (6.4).
    """

    ticket: Ticket
    request: ScoreRequest
    fresh_uniforms: bool


class Commit(Struct, frozen=True):
    """A round that is decided and not yet durable. Nothing here may leave the engine before the append succeeded."""

    verdict: Verdict
    control: Control
    info: RoundInfo
    digest: bytes
    ended: int | None
    error: str = ""


class Append(Struct, frozen=True):
    """Make the round durable (6.3 step 8); then ``Engine.appended``. ``attempt`` counts from 0 (for back-off)."""

    ticket: Ticket
    session: SessionId
    append: LogAppend
    commit: Commit
    attempt: int = 0


class ReadLog(Struct, frozen=True):
    """The append's outcome is unknown (AMB-150): read the log from the record's place; then ``Engine.log_read``."""

    pending: Append


class Reply(Struct, frozen=True):
    """Answer a waiting caller."""

    waiter: Waiter
    answer: Verdict | SessionState | Refusal


class Publish(Struct, frozen=True):
    """There is something new for readers of the session's output: tokens, its end, or a fence."""

    session: SessionId


class SendEvent(Struct, frozen=True):
    """Tell the router, at least once (AMB-180)."""

    event: Event


class Release(Struct, frozen=True):
    """The session needs its KV no longer."""

    session: SessionId


Effect: TypeAlias = FetchRows | Score | Append | ReadLog | Reply | Publish | SendEvent | Release
Effects: TypeAlias = list[Effect]
