"""What the router's machine asks for: one step of one session each (6.1, 6.9). The order is in ``routing.py``."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from sdcp_mono.core.messages import Assignment, Policy, SessionId, SessionOpen
from sdcp_mono.core.ports import OpenOptions


class Open(Struct, frozen=True):
    session: SessionId
    verifier: str
    message: SessionOpen
    options: OpenOptions


class Inform(Struct, frozen=True):
    """PUT drafter at the verifier, always before the drafter hears of it (SDCP-080)."""

    session: SessionId
    verifier: str
    assignment: Assignment


class Assign(Struct, frozen=True):
    """POST assignments at the drafter, with the state the verifier answered (SDCP-081)."""

    session: SessionId
    drafter: str
    assignment: Assignment


class Fence(Struct, frozen=True):
    """Append a fence before anything else (SDCP-178); the old verifier can commit nothing after it."""

    session: SessionId
    log: str
    epoch: int


class ReadRecords(Struct, frozen=True):
    """Read the log after the fence; the committed tokens become an object for the new verifier (AMB-064)."""

    session: SessionId
    log: str


class SendPolicy(Struct, frozen=True):
    session: SessionId
    verifier: str
    policy: Policy


class Ended(Struct, frozen=True):
    """Nothing more will be done for the session. ``error`` empty: it finished."""

    session: SessionId
    error: str


Step: TypeAlias = Open | Inform | Assign | Fence | ReadRecords | SendPolicy | Ended
