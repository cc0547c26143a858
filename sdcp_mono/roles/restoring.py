"""KV that need not be recomputed: from the tiers below the device, where that is predicted to be cheaper."""

from __future__ import annotations

import logging
import threading
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
        blocks, allowed = self._worth_loading(keys, scope)
        if not blocks:
            return 0
        load = await self._tiers.load(keys[:blocks], scope, allowed)
        reading = _Reading(partial(self._model.adopt, session, keys, load.blocks), load)
        try:
            used: int = await self._on_thread(reading)
        finally:
            reading.give_up()
        self.restored += used
        return used

    def _worth_loading(self, keys: Sequence[bytes], scope: bytes | None) -> tuple[int, float]:
        """How many of the leading blocks, and the seconds that they may take: what comes later is recomputed.

        Where all of them would take too long, half of them may not: the first ones are often near, and the others far.
        """
        wanted, found = len(keys), 0
        while wanted:
            blocks, seconds = self._tiers.predict(keys[:wanted], scope)
            allowed = self._compute_seconds(blocks * self._model.block_tokens)
            if blocks and seconds < allowed:
                return blocks, allowed
            found = max(found, blocks)
            wanted = blocks // 2
        self.declined += found > 0
        return 0, 0.0


class _Reading:
    """A call on the model's thread that reads what is pinned: that is let go when the call has ended, and not before.

    Whoever waits for it may be cancelled at any moment, at the end of the loop too, and a thread can't be.
    """

    def __init__(self, call: Callable[[], int], load: KvLoad) -> None:
        self._call = call
        self._load = load
        self._lock = threading.Lock()
        self._begun = False

    def __call__(self) -> int:
        if not self._begin():
            return 0
        try:
            return self._call()
        finally:
            self._load.close()

    def give_up(self) -> None:
        """Let go at once if it hasn't begun: then it never will."""
        if self._begin():
            self._load.close()

    def _begin(self) -> bool:
        with self._lock:
            first, self._begun = not self._begun, True
            return first
