"""Several routers that use one role: its own node's, and others that its operator lists."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sdcp_mono.core.messages import Event, Status
from sdcp_mono.core.ports import RouterPort
from sdcp_mono.core.problems import Refusal, Unavailable, UnknownSession
from sdcp_mono.roles.tasks import Tasks

log = logging.getLogger(__name__)


class EveryRouter:
    """Implements ``RouterPort``: all of them hear the status, an event goes to the one whose session it is about.

    ``others`` may be slow or gone, so nobody waits for their answer to a status: the next report comes in a second.
    """

    def __init__(self, own: RouterPort, others: Mapping[str, RouterPort]) -> None:
        self._own = own
        self._others = others
        self._reporting: set[str] = set()
        self._deaf: set[str] = set()
        self._tasks = Tasks()

    async def stop(self) -> None:
        await self._tasks.stop()

    async def status(self, status: Status) -> None:
        await self._own.status(status)
        for base in self._others.keys() - self._reporting:
            self._reporting.add(base)
            self._tasks.start(self._report(base, status))

    async def event(self, event: Event) -> None:
        """Raises ``UnknownSession`` if it is nobody's session, ``Unavailable`` if it may be that of one not reached."""
        lost: Refusal = UnknownSession("session: unknown")
        for router in (self._own, *self._others.values()):
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
            self._reporting.discard(base)
