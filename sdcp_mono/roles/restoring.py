"""KV that need not be recomputed: from the tiers below the device, where that is predicted to be cheaper."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from sdcp_mono.core.kv import HoldsKv, KvLoad, KvTiers
from sdcp_mono.core.messages import SessionId

log = logging.getLogger(__name__)


class Restorer:
    """Brings the KV of a prefix back to ``model``. ``compute_seconds(tokens)`` predicts what recomputing would take."""

    def __init__(
        self,
        model: HoldsKv,
        tiers: KvTiers,
        on_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        compute_seconds: Callable[[int], float],
    ) -> None:
        self._model = model
        self._tiers = tiers
        self._on_thread = on_thread
        self._compute_seconds = compute_seconds
        self.restored = 0  # blocks
        self.declined = 0  # loads that recomputing was predicted to beat

    async def __call__(self, session: SessionId, prefix: Sequence[int], scope: bytes | None) -> int:
        """Blocks that came back for a session. Never raises: the rest is computed."""
        try:
            return await self._bring_back(session, prefix, scope)
        except Exception:
            log.exception("KV could not be restored")
            return 0

    async def _bring_back(self, session: SessionId, prefix: Sequence[int], scope: bytes | None) -> int:
        keys = await self._on_thread(partial(self._model.missing, session, prefix, scope))
        if not keys:
            return 0
        blocks, seconds = self._tiers.predict(keys, scope)
        allowed = self._compute_seconds(blocks * self._model.block_tokens)  # what comes later than that is recomputed
        if not blocks or seconds >= allowed:
            self.declined += blocks > 0
            return 0
        load = await self._tiers.load(keys[:blocks], scope, allowed)
        adopting = asyncio.ensure_future(self._adopt(session, keys, load))
        try:
            return await asyncio.shield(adopting)
        except asyncio.CancelledError:
            # The model's thread may be reading what is pinned: it is let go when that has ended.
            adopting.add_done_callback(_look_away)
            raise

    async def _adopt(self, session: SessionId, keys: Sequence[bytes], load: KvLoad) -> int:
        try:
            used: int = await self._on_thread(partial(self._model.adopt, session, keys, load.blocks))
        finally:
            load.close()
        self.restored += used
        return used


def _look_away(ended: asyncio.Future[int]) -> None:
    """Nobody waits for it any more: an error is no longer news."""
    if not ended.cancelled():
        ended.exception()
