"""Prometheus metrics of the certificate that a role uses, read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class CertificateMetrics(Collector):
    """``look`` answers the days that the certificate in use has left, and how often a new one could not be used."""

    def __init__(self, registry: CollectorRegistry, look: Callable[[], tuple[float, int]]) -> None:
        self._look = look
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        days, failures = self._look()
        yield GaugeMetricFamily("sdcp_certificate_days_left", "Until the certificate in use ends.", days)
        yield CounterMetricFamily(
            "sdcp_certificate_failures", "New certificate files that could not be used; the old pair stays.", failures
        )
