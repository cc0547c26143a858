"""Checks, their registry, and how one is run: what was asked, and what was seen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from sdcp_mono.conformance.http2 import NoAnswer

CHECK_SECONDS: Final = 60.0  # one check; a peer that keeps a check waiting longer than this fails it


class Level(StrEnum):
    """How binding: MUST is the draft's (its REQUIRED and its tables too); a decision settles a hole of the draft."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"
    DECISION = "decision"


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


class Failed(Exception):
    """The peer did something else than required; the message says what was seen."""


class Skipped(Exception):
    """The check can't be run here; the message says why."""


Function: TypeAlias = Callable[[Any], Awaitable[str]]
"""Given the role's bench, answers what was seen; raises ``Failed`` or ``Skipped``."""


@dataclass(frozen=True, slots=True)
class Check:
    id: str  # SDCP-nnn: sdcp-requirements.md; AMB-nnn: sdcp-decisions.md
    level: Level
    section: str
    title: str
    function: Function


@dataclass(frozen=True, slots=True)
class Finding:
    check: Check
    verdict: Verdict
    seen: str


@dataclass(frozen=True, slots=True)
class Options:
    """Where the peer is and what the kit may use. ``certs``: ca.pem, NAME.pem and NAME-key.pem for each role."""

    url: str
    certs: Path
    mlc: str | None = None  # base URL of a cache that kit and peer both reach
    mlc_prefix: str | None = None  # how cache references to it begin; default: as the peer says, else the URL
    target: bytes | None = None
    tokenizer: bytes | None = None
    vocab_size: int | None = None
    context: int | None = None
    trigger: str | None = None  # URL of an OpenAI completions endpoint whose requests the router serves
    listen: str = ""  # HOST:PORT where the roles that the kit plays are served; empty: where verifier.pem says
    untrusted: bool = False  # the identity of drafter-b.pem is not trusted like the verifier (section 9)
    only: frozenset[str] = frozenset()  # ids to run; empty: all


F = TypeVar("F", bound=Function)


class Table:
    """The checks of one role, in the order in which they were written."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def __call__(self, id: str, level: Level, section: str, title: str) -> Callable[[F], F]:
        def register(function: F) -> F:
            assert all(known.id != id for known in self.checks), id
            self.checks.append(Check(id, level, section, title, function))
            return function

        return register


def expect(condition: object, seen: str) -> None:
    if not condition:
        raise Failed(seen)


async def run(check: Check, bench: Any) -> Finding:
    """One finding; whatever goes wrong inside a check is the check's failure, not the kit's end."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return Finding(check, Verdict.PASS, await check.function(bench))
    except Skipped as reason:
        return Finding(check, Verdict.SKIP, str(reason))
    except Failed as failure:
        return Finding(check, Verdict.FAIL, str(failure))
    except NoAnswer as failure:
        return Finding(check, Verdict.FAIL, f"no answer: {failure}")
    except TimeoutError:
        return Finding(check, Verdict.FAIL, f"not over within {CHECK_SECONDS:g} s")
    except Exception as error:  # an answer so unexpected that the check could not read it
        return Finding(check, Verdict.FAIL, f"unreadable answer: {type(error).__name__}: {error}")
