"""Where logs, objects and KV live: the stores of a process, and who brings KV back from the tiers below the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from msgspec import structs

from sdcp_mono.cache.disk import DiskTier, TierUnusable
from sdcp_mono.cache.host import HostTier, anonymous
from sdcp_mono.cache.inspecting import DISK, check_logs
from sdcp_mono.cache.kept_logs import KeptLogs
from sdcp_mono.cache.kv import KvCache
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.objects import RoutedObjects
from sdcp_mono.cache.stats import TierStats
from sdcp_mono.cache.tiers import Tiers
from sdcp_mono.cache.transfers import Transfers
from sdcp_mono.compose.logs import open_bucket, open_log
from sdcp_mono.core.kv import HoldsKv, KvTiers
from sdcp_mono.core.ports import ObjectStore
from sdcp_mono.core.speculation import CostTable
from sdcp_mono.roles.residency import OnThread
from sdcp_mono.roles.restoring import Restorer
from sdcp_mono.settings import Settings, StoreSettings, TierSettings

log = logging.getLogger(__name__)

AUTHORITY: Final = "local"  # the one cache that a deployment's roles share calls itself so
TARGET_KV, PREFIX_KV = "target_kv", "prefix_kv"  # the second: a draft model's (docs/decisions/0007)
MIB: Final = 2**20
STAGING_MB: Final = 32  # of the host tier that may be on its way up at once: 85 blocks of the default model


# ---- tiers -------------------------------------------------------------------------------------------


def open_tiers(
    settings: TierSettings,
    remote: ObjectStore | None = None,
    memory: Callable[[int], memoryview] = anonymous,
) -> Tiers | None:
    """The tiers below the device, or None where they are switched off. Without its disk the rest goes on."""
    if not settings.kv_host_mb:
        return None
    staging = min(STAGING_MB, settings.kv_host_mb) * MIB
    host = HostTier(settings.kv_host_mb * MIB, staging_bytes=staging, memory=memory)
    disk = None
    if settings.kv_disk_mb:
        try:
            disk = DiskTier(
                settings.data_dir / DISK, settings.kv_disk_mb * MIB, floor_bytes=settings.kv_disk_floor_mb * MIB
            )
        except TierUnusable as unusable:
            log.warning("no disk tier: %s", unusable)
    return Tiers(host, disk, remote, Transfers())


def open_objects(settings: StoreSettings, tiers: Tiers | None) -> RoutedObjects:
    """The objects that this process serves: each kind in memory, in its tiers, or in the bucket; blocks."""
    memory = MemoryObjects(settings.objects_mb * MIB, scope_percent=settings.scope_percent)
    return RoutedObjects(memory, tiers, open_bucket(settings.objects) if settings.objects else None)


def prefill_seconds(cost: CostTable, budget: int, tokens: int) -> float:
    """What computing the KV of ``tokens`` tokens is expected to take, ``budget`` rows a pass."""
    passes, rest = divmod(tokens, budget)
    return passes * cost.seconds(budget) + (cost.seconds(rest) if rest else 0.0)


class Tiered:
    """The KV of a process's models and the tiers below it. ``kv`` is empty for models without KV of their own."""

    def __init__(self, settings: TierSettings, kv: Mapping[str, HoldsKv], remote: ObjectStore | None) -> None:
        self.tiers = open_tiers(settings, remote, _memory(kv)) if kv else None
        self.restorers: dict[str, Restorer] = {}
        self._kv = kv
        self._caches: dict[str, KvTiers] = {}
        if self.tiers is not None:
            self._caches = {
                name: KvCache(
                    self.tiers,
                    AUTHORITY,
                    TARGET_KV if name == "target" else PREFIX_KV,
                    model.kv_dtype,
                    model.block_bytes,
                )
                for name, model in kv.items()
            }

    def restorer(self, name: str, on_thread: OnThread, compute_seconds: Callable[[int], float]) -> Restorer | None:
        """Who brings KV of the model ``name`` back; None where it has none, or there is nothing below the device."""
        cache = self._caches.get(name)
        if cache is not None:
            self.restorers[name] = Restorer(self._kv[name], cache, on_thread, compute_seconds)
        return self.restorers.get(name)

    async def open(self, thread: Executor, stack: AsyncExitStack) -> None:
        """``thread`` owns the models: from now on their full blocks are offered to the tiers, until ``stack`` ends."""
        if self.tiers is not None:
            self.tiers.start()
            stack.push_async_callback(self.tiers.stop)
        for name, cache in self._caches.items():
            thread.submit(setattr, self._kv[name], "tiers", cache).result()
            stack.callback(partial(self._detach, thread, name))

    def _detach(self, thread: Executor, name: str) -> None:
        thread.submit(setattr, self._kv[name], "tiers", None).result()

    def stats(self) -> list[TierStats]:
        """Device first."""
        device = [_device(kv) for name, kv in self._kv.items() if name == "target"]
        return [*device, *(self.tiers.stats() if self.tiers is not None else ())]

    def counts(self) -> dict[str, int]:
        """What became of KV outside the device."""
        return {
            "restored_blocks": sum(r.restored for r in self.restorers.values()),
            "declined_loads": sum(r.declined for r in self.restorers.values()),
        }

    async def report(self, check: bool = False) -> dict[str, Any]:
        """Plain data for ``cache stat``."""
        return {"tiers": [structs.asdict(tier) for tier in self.stats()], "kv": self.counts()}


def _memory(kv: Mapping[str, HoldsKv]) -> Callable[[int], memoryview]:
    """What the host tier is made of; torch is imported only where a model has brought it."""
    if any(model.on_gpu for model in kv.values()):
        from sdcp_mono.runners.pinned import pinned

        return pinned
    return anonymous


def _device(kv: HoldsKv) -> TierStats:
    """A model's own blocks. Hits are blocks of prefixes that were found there."""
    usage, size = kv.usage, kv.block_bytes
    return TierStats(
        name="device", capacity_bytes=usage.total * size, used_bytes=(usage.used + usage.cached) * size,
        pinned_bytes=usage.used * size, objects=usage.used + usage.cached,
        hits=usage.found_tokens // kv.block_tokens,
        misses=(usage.asked_tokens - usage.found_tokens) // kv.block_tokens,
    )  # fmt: skip


class Storage(Tiered):
    """The stores of a node with every role."""

    def __init__(self, settings: Settings, kv: Mapping[str, HoldsKv]) -> None:
        super().__init__(settings, kv, None)
        self.stack = AsyncExitStack()
        self.store = open_log(settings.log, settings.data_dir, self.stack)
        self.log = KeptLogs(self.store, settings.kept_logs)
        self.objects = open_objects(settings, self.tiers)

    async def start(self, thread: Executor) -> None:
        """``thread`` owns the models."""
        await self.log.adopt()
        await self.open(thread, self.stack)

    def stats(self) -> list[TierStats]:
        return [*super().stats(), self.objects.memory.tier()]

    async def report(self, check: bool = False) -> dict[str, Any]:
        """With ``check`` every log is read to its end."""
        return await super().report() | await report_stores(self.objects, self.log, check)


async def report_stores(objects: RoutedObjects, log: KeptLogs, check: bool) -> dict[str, Any]:
    """Plain data for ``cache stat``: what is neither KV nor a tier. Leases that ran out are named by their holder."""
    report = {"objects": objects.counts(), "leases that ran out": objects.forced()}
    logs = await check_logs(log) if check else {"logs": len(await log.names())}
    return {name: facts for name, facts in report.items() if facts} | {"logs": logs}


def rows_from_bytes(vocab_size: int, data: bytes, tokens: tuple[int, ...]) -> Any:
    """Draft rows that came over a wire, checked whole; raises ``RowsProblem``."""
    from sdcp_mono.runners.rows import QRows

    rows = QRows.from_bytes(data, len(tokens), vocab_size)
    rows.check(tokens, vocab_size)
    return rows
