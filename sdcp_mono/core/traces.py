"""What the roles note of a session for whoever traces it: facts and times, which become spans later and elsewhere.

Times are seconds of the process's performance counter, so that a clock that is set doesn't bend a round.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from sdcp_mono.core.messages import SessionId
from sdcp_mono.core.ports import GenerateRequest, RoundInfo

Fact = str | int | float


class ModelPass(Struct, frozen=True):
    """A wait for a model and the pass that answered it. ``rows`` and ``requests`` are the pass's, all sessions'."""

    asked: float
    answered: float
    seconds: float = 0.0  # of the pass itself
    rows: int = 0
    requests: int = 0
    restored: int = 0  # KV blocks that came back from the tiers for it


class RoundPhases(Struct, frozen=True):
    """A committed round at the verifier. It began when the one before it had ended: drafting is part of it."""

    began: float
    scored: ModelPass
    append_began: float
    append_ended: float
    appends: int  # rounds that shared the transaction


class DraftPhases(Struct, frozen=True):
    """A proposal at the drafter, after its verdict; ``problem`` is set where there will be none."""

    epoch: int
    round: int
    source: str
    m: int
    began: float
    drafted: float
    answered: float
    model: ModelPass | None  # None: a source that needs no pass
    accepted: int = 0
    problem: str = ""


class Wish(Struct, frozen=True):
    """A session as its router admits it. ``attempt`` tells sessions of the same id apart."""

    request: GenerateRequest
    model: str
    attempt: str = ""


class Outcome(Struct, frozen=True):
    """How a session ended for its readers. ``finish`` None: they left before its end."""

    tokens: int
    first_token: float | None = None
    finish: int | None = None
    error: str = ""


class Tracer(Protocol):
    """One role's view of all its sessions. Must be quick and never raise; what it doesn't know it ignores."""

    def opened(self, session: SessionId, wish: Wish | None = None) -> None:
        """A session begins here; with a wish it begins altogether."""

    def follow(self, session: SessionId) -> None:
        """The calls that this task makes from here on belong to the session's trace."""

    def event(self, session: SessionId, name: str, epoch: int = 0, round_: int = 0, **facts: Fact) -> None:
        """Something to remember. With a round it goes to that round's span, else to what is recorded next."""

    def round(self, session: SessionId, info: RoundInfo, phases: RoundPhases) -> None: ...
    def draft(self, session: SessionId, phases: DraftPhases) -> None: ...
    def closed(self, session: SessionId, outcome: Outcome | None = None) -> None: ...


class Untraced:
    """Nobody traces."""

    def opened(self, session: SessionId, wish: Wish | None = None) -> None: ...
    def follow(self, session: SessionId) -> None: ...
    def event(self, session: SessionId, name: str, epoch: int = 0, round_: int = 0, **facts: Fact) -> None: ...
    def round(self, session: SessionId, info: RoundInfo, phases: RoundPhases) -> None: ...
    def draft(self, session: SessionId, phases: DraftPhases) -> None: ...
    def closed(self, session: SessionId, outcome: Outcome | None = None) -> None: ...
