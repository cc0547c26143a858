"""The call that is being handled: who made it, how long it may take, and the trace it belongs to.

A handler's own calls end with it: ``Channel`` gives them no more time than is left. That holds for the handler's task
only. What it starts in other tasks (a round, a commit, a drafter's session) serves others too and outlives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from sdcp_mono.grpc.identity import Access, Caller

TRACEPARENT: Final = "traceparent"  # W3C Trace Context
_TRACE: ContextVar[str] = ContextVar("traceparent", default="")
_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


@dataclass(frozen=True, slots=True)
class Call:
    """``ends`` is on the event loop's clock; None: the caller has set no deadline."""

    caller: Caller
    access: Access
    stopping: asyncio.Event
    task: asyncio.Task[Any] | None
    ends: float | None


def begin(call: Call) -> None:
    """From here on the context's call; each call is handled in a context of its own."""
    _CALL.set(call)


def current() -> Call:
    """The call that is being handled; only where there is one."""
    call = _CALL.get()
    assert call is not None
    return call


def seconds_left() -> float | None:
    """Until the deadline of the call that this task handles; None where nothing bounds it."""
    call = _CALL.get()
    if call is None or call.ends is None or call.task is not asyncio.current_task():
        return None
    return call.ends - asyncio.get_running_loop().time()


def _inject() -> Mapping[str, str]:
    trace = _TRACE.get()
    return {TRACEPARENT: trace} if trace else {}


def _extract(metadata: Mapping[str, str]) -> None:
    _TRACE.set(metadata.get(TRACEPARENT, ""))


@dataclass(frozen=True, slots=True)
class Tracing:
    """How trace context enters and leaves metadata; by default it is only handed on.

    ``inject`` answers what a call carries. ``extract`` gets what one carried, at the start of its handler, and may set
    context variables: they hold for the handler and what it starts.
    """

    inject: Callable[[], Mapping[str, str]] = _inject
    extract: Callable[[Mapping[str, str]], object] = _extract
