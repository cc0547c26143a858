"""Where logs, objects and KV live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

from sdcp_mono.cache.kept_logs import KeptLogs
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.compose.models import Loaded
from sdcp_mono.roles.residency import OnThread
from sdcp_mono.roles.restoring import Restorer
from sdcp_mono.settings import StoreSettings

AUTHORITY: Final = "local"
MIB: Final = 2**20


class Storage:
    """The stores of one process, opened by ``async with``."""

    def __init__(self, settings: StoreSettings, *, kv_host_mb: int) -> None:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        self.log = SqliteCommitLog(settings.data_dir / "commit-log.sqlite")
        self.kept = KeptLogs(self.log, settings.kept_logs)
        self.objects = MemoryObjects(settings.objects_mb * MIB)
        self._stack = AsyncExitStack()

    def restorers(
        self, loaded: Loaded, on_thread: OnThread, compute_seconds: Callable[[int], float]
    ) -> Mapping[str, Restorer]:
        """For each model with KV of its own: who brings that back from the tiers."""
        return {}

    async def __aenter__(self) -> Self:
        self._stack.callback(self.log.close)
        await self.kept.adopt()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()
