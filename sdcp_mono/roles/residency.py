"""Whose KV is on the device: room for sessions, taken back under pressure and given again.

A session is opened with room for its prompt and a little more, and grows as it decodes; nobody reserves the worst case
that few sessions reach. When the blocks are used up, the youngest session is *preempted*: its room goes to an older
one, and it gets room again, and its KV from the tiers below (or recomputed, to the same bits), when it next works.

Why it can't deadlock (C-38): only younger sessions are preempted, so the oldest gets whatever it needs; it fits alone,
which opening has checked; and who is ``held`` (at work in a model pass) never waits for room meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

from sdcp_mono.core.messages import SessionId
from sdcp_mono.core.ports import TargetModel
from sdcp_mono.core.problems import Unavailable, Unprocessable
from sdcp_mono.roles.restoring import Restorer

OnThread = Callable[[Callable[[], Any]], asyncio.Future[Any]]
"""Runs something on the thread that owns the model."""

GROWTH: Final = 128
"""Tokens of room beyond what is needed now: eight blocks, so that growing is asked for every hundred tokens or so."""
LOOK_AGAIN_SECONDS: Final = 0.05  # blocks that were being copied become free without anybody being told


@dataclass(slots=True, eq=False)
class _Resident:
    id: SessionId
    age: int  # order of opening: smaller is older, and older goes first
    limit: int  # tokens it may ever grow to
    scope: bytes | None
    room: int = 0  # tokens there is room for; 0 while it isn't on the device
    holds: int = 0  # passes that use its KV now
    gone: bool = False
    restored: int = 0  # blocks that came back for it, not yet told


class Residency:
    """Room in ``model``'s KV cache; on one event loop. ``restore`` brings KV back from the tiers below, if any."""

    def __init__(self, model: TargetModel, on_thread: OnThread, restore: Restorer | None = None) -> None:
        self._model = model
        self._on_thread = on_thread
        self._restore = restore
        self._residents: dict[SessionId, _Resident] = {}
        self._ages = count()
        self._lock = asyncio.Lock()  # one decision at a time; never held while waiting for room
        self._changed = asyncio.Event()
        self._waiting = 0
        self.preempted = 0  # how often a session had to give its room up

    async def open(self, session: SessionId, prefix: Sequence[int], limit: int, scope: bytes | None) -> None:
        """Room for a new session with ``prefix``, up to ``limit`` tokens; again for a known one: it starts over.

        Nobody is preempted for it. Raises ``Unprocessable`` if it could never fit and ``Unavailable`` if not now.
        """
        longest = self._model.longest
        if limit > longest:
            raise Unprocessable(f"max_new: a session of {limit} tokens does not fit; {longest} is the most")
        mine = _Resident(session, next(self._ages), limit, scope)
        known = self._residents.get(session)
        if known is not None:  # resumed here with a higher epoch (AMB-056): its KV is of use to itself
            mine.age, mine.room = known.age, known.room
            known.gone = True
        self._residents[session] = mine
        mine.holds += 1
        try:
            async with self._lock:
                if not await self._grow(mine, len(prefix)):
                    raise Unavailable("no room for the session's KV now", retry_after_ms=1000)
            await self._bring_back(mine, prefix)
        finally:
            mine.holds -= 1
            self._tell()

    @asynccontextmanager
    async def hold(self, session: SessionId, tokens: int, prefix: Sequence[int], length: int) -> AsyncIterator[None]:
        """Within it the session's KV is on the device, with room for ``tokens`` tokens, and stays there.

        Waits for the room if need be. ``prefix[:length]`` is what the KV is of. A session that is not (or no longer)
        known here is not held; its pass will say so.
        """
        mine = self._residents.get(session)
        if mine is None:
            yield
            return
        tokens = min(tokens, self._model.longest)
        while mine.room < tokens and not mine.gone:
            await self._obtain(mine, tokens, prefix, length)
        mine.holds += 1
        try:
            yield
        finally:
            mine.holds -= 1
            self._tell()

    def restored(self, session: SessionId) -> int:
        """KV blocks that came back for a session since this was last asked."""
        mine = self._residents.get(session)
        if mine is None:
            return 0
        blocks, mine.restored = mine.restored, 0
        return blocks

    def close(self, session: SessionId) -> asyncio.Future[Any]:
        """Forget a session and free its room: at once, before whatever a later session asks the model for."""
        mine = self._residents.pop(session, None)
        if mine is not None:
            mine.gone = True
        released = self._on_thread(partial(self._model.release, session))
        self._tell()
        return released

    async def preempt(self, session: SessionId) -> bool:
        """Take a session's room, once no pass uses it; False if it has none, or is gone."""
        mine = self._residents.get(session)
        while mine is not None and mine.holds and not mine.gone:
            await self._news(self._changed)
        async with self._lock:
            return mine is not None and await self._take(mine)

    # ---- decisions -------------------------------------------------------------------------------

    async def _obtain(self, mine: _Resident, tokens: int, prefix: Sequence[int], length: int) -> None:
        """Try to get room once; without success wait until something changes."""
        changed = self._changed
        async with self._lock:
            back = not mine.room
            if obtained := await self._grow(mine, tokens, preempting=True):
                mine.holds += 1  # while its KV is brought back
        if not obtained:
            await self._news(changed)
            return
        try:
            if back:
                await self._bring_back(mine, prefix[:length])
        finally:
            mine.holds -= 1

    async def _grow(self, mine: _Resident, tokens: int, *, preempting: bool = False) -> bool:
        """Room for ``tokens`` tokens and some more, at the expense of younger sessions if ``preempting``."""
        if mine.room >= tokens:
            return True
        wanted = min(max(tokens, min(tokens + GROWTH, mine.limit)), self._model.longest)
        if await self._admit(mine, wanted):
            return True
        younger = [r for r in self._residents.values() if r.age > mine.age and r.room and not r.holds]
        if not preempting or self._model.free_tokens + sum(r.room for r in younger) < wanted - mine.room:
            return False  # it would be in vain
        for victim in sorted(younger, key=lambda r: -r.age):
            await self._take(victim)
            if await self._admit(mine, wanted):
                return True
        return False

    async def _admit(self, mine: _Resident, tokens: int) -> bool:
        if mine.gone:
            return False
        admitted: bool = await self._on_thread(partial(self._model.admit, mine.id, tokens, scope=mine.scope))
        if admitted:
            block = self._model.block_tokens
            mine.room = -(-tokens // block) * block
        return admitted

    async def _take(self, victim: _Resident) -> bool:
        if victim.holds or not victim.room or victim.gone:
            return False
        victim.room = 0
        self.preempted += 1
        await self._on_thread(partial(self._model.release, victim.id))
        return True

    async def _bring_back(self, mine: _Resident, prefix: Sequence[int]) -> None:
        if self._restore is not None:
            mine.restored += await self._restore(mine.id, prefix, mine.scope)

    def _tell(self) -> None:
        if self._waiting:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _news(self, changed: asyncio.Event) -> None:
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await changed.wait()
        finally:
            self._waiting -= 1
