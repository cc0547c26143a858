"""Several routers that use one role: its own node's, and others that its operator lists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from sdcp_mono.core.messages import Event, Status
from sdcp_mono.core.ports import RouterPort
from sdcp_mono.core.problems import Refusal, Unavailable, UnknownSession
from sdcp_mono.core.routing import LEAVING_TTL_MS
from sdcp_mono.roles.tasks import Tasks

log = logging.getLogger(__name__)

WITHDRAW_SECONDS: Final = 2.0  # for routers to hear it; one that answers at all answers in milliseconds


class EveryRouter:
    """Implements ``RouterPort``: all of them hear the status, an event goes to the one whose session it is about.

    ``own`` is that of this process, if it has one. ``others`` are those that are known now: they may come and go, be
    slow or gone, so nobody waits for their answer to a status. The next report comes in a second, and tells all there
    is to tell. Only a withdrawal is waited for: no report may follow it.
    """

    def __init__(self, own: RouterPort | None, others: Mapping[str, RouterPort]) -> None:
        self._own = own
        self._others = others
        self._reporting: dict[str, asyncio.Task[None]] = {}
        self._deaf: set[str] = set()
        self._tasks = Tasks()

    async def stop(self) -> None:
        await self._tasks.stop()

    async def status(self, status: Status) -> None:
        if self._own is not None:
            await self._own.status(status)
        withdrawn = status.ttl_ms <= LEAVING_TTL_MS
        if withdrawn and self._reporting:
            await asyncio.wait(tuple(self._reporting.values()), timeout=WITHDRAW_SECONDS)
        known = tuple(self._others)
        self._deaf.intersection_update(known)
        for base in known:
            if base not in self._reporting:
                self._reporting[base] = self._tasks.start(self._report(base, status))
        if withdrawn and self._reporting:
            await asyncio.wait(tuple(self._reporting.values()), timeout=WITHDRAW_SECONDS)

    async def event(self, event: Event) -> None:
        """Raises ``UnknownSession`` if it is nobody's session, ``Unavailable`` if it may be that of one not reached."""
        lost: Refusal = UnknownSession("session: unknown")
        own = () if self._own is None else (self._own,)
        for router in (*own, *self._others.values()):
            try:
                await router.event(event)
            except UnknownSession:
                continue
            except Unavailable as unavailable:
                lost = unavailable
            else:
                return
        raise lost

    async def _report(self, base: str, status: Status) -> None:
        try:
            await self._others[base].status(status)
        except Refusal as refusal:
            if base not in self._deaf:  # once, not every second
                log.warning("router %s takes no status report: %s", base, refusal.detail)
            self._deaf.add(base)
        else:
            self._deaf.discard(base)
        finally:
            self._reporting.pop(base, None)
