"""From a plan to the choices' deltas, freeing everything however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from sdcp_mono.core.ports import GenerateRequest, Generation, Serving
from sdcp_mono.frontend.choices import Choice, Delta
from sdcp_mono.frontend.errors import ApiError, ClientGone

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` after the body was read; cancel it and raise ``ClientGone`` as soon as the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def all_or_none(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


@asynccontextmanager
async def admitted(serving: Serving, request: GenerateRequest) -> AsyncIterator[Generation]:
    """One generation; it is closed at the end, finished or not.

    Choices are admitted one by one, never held together: choices that wait for each other's slots would wait for ever.
    """
    admission = asyncio.create_task(serving.generate(request))
    try:
        yield await admission
    finally:
        # Shielded: the second cancellation of a request must not leave a generation running.
        await asyncio.shield(asyncio.create_task(_close(admission)))


async def _close(admission: asyncio.Task[Generation]) -> None:
    admission.cancel()
    (ended,) = await asyncio.gather(admission, return_exceptions=True)
    if not isinstance(ended, BaseException):
        await ended.close()


async def play(
    serving: Serving,
    request: GenerateRequest,
    index: int,
    choice: Choice,
    show: Callable[[int, Delta], Awaitable[None]],
) -> None:
    """Admit a choice and show its deltas to its end; a stop string ends it early.

    Raises ``ApiError`` if the generation failed, after showing the delta that says so.
    """
    async with admitted(serving, request) as generation:
        choice.begins(generation.session, generation.log)
        async for chunk in generation.chunks():
            delta = choice.feed(chunk)
            if delta is not None:
                await show(index, delta)
                if delta.finish == "error":
                    raise ApiError(
                        delta.error or "the generation failed",
                        code="generation_failed",
                        status=500,
                    )
            if choice.finished:
                return
    raise ApiError("the generation ended without its last chunk", code="generation_failed", status=500)
