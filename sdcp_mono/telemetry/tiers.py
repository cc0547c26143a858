"""Prometheus metrics of the cache's tiers, read when somebody looks: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES: Final = {
    "capacity_bytes": "Most bytes the tier may hold.",
    "used_bytes": "Bytes of what is stored.",
    "pinned_bytes": "Bytes of what is in use and can't be evicted.",
    "staging_bytes": "Bytes promised to what is being written.",
    "objects": "Stored objects.",
}
COUNTERS: Final = {
    "hits": "Look-ups that found the object.",
    "misses": "Look-ups that didn't.",
    "stored": "Objects stored.",
    "evicted": "Objects dropped for room.",
    "refused": "Objects not taken for want of room.",
    "corrupt": "Objects found damaged, and not served.",
    "errors": "Failures of memory, disk or network.",
}


class Held(Protocol):
    """What is said of objects that are not KV."""

    def counts(self) -> dict[str, int]: ...
    def forced(self) -> dict[str, int]: ...


class TierMetrics(Collector):
    """``stats`` answers one ``TierStats`` a tier; ``kv`` counts of what came back, by name; ``objects`` may be none."""

    def __init__(
        self,
        registry: CollectorRegistry,
        stats: Callable[[], Sequence[Any]],
        kv: Callable[[], dict[str, int]],
        objects: Held | None = None,
    ) -> None:
        self._stats = stats
        self._kv = kv
        self._objects = objects
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        tiers = self._stats()
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"sdcp_cache_tier_{name}", text, labels=("tier",))
            for tier in tiers:
                gauge.add_metric((tier.name,), getattr(tier, name))
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"sdcp_cache_tier_{name}", text, labels=("tier",))
            for tier in tiers:
                counter.add_metric((tier.name,), getattr(tier, name))
            yield counter
        healthy = GaugeMetricFamily("sdcp_cache_tier_healthy", "1 while the tier does its work.", labels=("tier",))
        for tier in tiers:
            healthy.add_metric((tier.name,), float(tier.healthy))
        yield healthy
        events = CounterMetricFamily("sdcp_kv_events", "What became of KV outside the device.", labels=("event",))
        for name, count in self._kv().items():
            events.add_metric((name,), count)
        yield events
        if self._objects is not None:
            yield from _of_objects(self._objects)


def _of_objects(objects: Held) -> Iterable[Metric]:
    counts = objects.counts()
    yield GaugeMetricFamily("sdcp_cache_leases", "Live leases on objects.", counts["leases"])
    yield CounterMetricFamily(
        "sdcp_cache_quota_refusals",
        "Objects not taken because their scope has used up its share.",
        counts["over_quota"],
    )
    forced = CounterMetricFamily(
        "sdcp_cache_forced_leases", "Leases that ran out, by who neither renewed them nor gave them up.",
        labels=("holder",),
    )  # fmt: skip
    for holder, count in objects.forced().items():
        forced.add_metric((holder,), count)
    yield forced
