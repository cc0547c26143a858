"""Streams that can be taken up again: every event's id says where each choice is (``Last-Event-ID``, HTML 9.2).

An id names, for each choice, its session, its commit log, the epoch and how much of it the client has: tokens and
characters. Whoever sends the same body again with the last id it saw gets the rest, each token once, from whichever
router answers: what was committed is in the log, and the log's digests refuse another body. Nothing else is stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from sdcp_mono.core.ports import GenerateRequest
from sdcp_mono.frontend.errors import ApiError

NOWHERE: Final = "-"  # of a choice that had not begun
MAX_ID: Final = 16_384  # characters: a hundred choices
_PLACE: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9]{1,20})\.([0-9]{1,10})\.([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a client has read one choice: ``tokens`` and ``characters`` of its output."""

    session: bytes
    log: str
    epoch: int = 1
    tokens: int = 0
    characters: int = 0

    def __str__(self) -> str:
        return f"{self.session.hex()}.{self.log}.{self.epoch}.{self.tokens}.{self.characters}"


def event_id(places: Sequence[Place | None]) -> str:
    return ",".join(NOWHERE if place is None else str(place) for place in places)


def parse_event_id(text: str, choices: int) -> list[Place | None]:
    """The places in a ``Last-Event-ID``; raises ``ApiError`` for anything that ``event_id`` never made."""
    parts = text.split(",") if len(text) <= MAX_ID else []
    if len(parts) != choices:
        raise ApiError(f"Last-Event-ID: not an id of a stream of {choices} choices", code="bad_event_id")
    return [None if part == NOWHERE else _parse(part) for part in parts]


def _parse(part: str) -> Place:
    match = _PLACE.fullmatch(part)
    if match is None:
        raise ApiError("Last-Event-ID: not an id that this server gave", code="bad_event_id")
    session, log, epoch, tokens, characters = match.groups()
    return Place(bytes.fromhex(session), log, int(epoch), int(tokens), int(characters))


def resumed(request: GenerateRequest, place: Place | None) -> GenerateRequest:
    """The request that goes on from ``place``."""
    if place is None:
        return request
    if request.session is not None and request.session != place.session:
        raise ApiError("Last-Event-ID: it belongs to another request body", code="bad_event_id")
    return structs.replace(request, session=place.session, resume=place.log)
