"""Prometheus metrics of the front end. Labels are closed sets: routes that exist, models that are served, status."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class HttpMetrics:
    """Counts requests; ``exposition`` is the text of ``/metrics`` with everything in the registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "sdcp_http_requests", "Requests by route, model and status.", ("route", "model", "status"),
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "sdcp_http_request_seconds", "Duration of requests.", ("route",), buckets=SECONDS, registry=registry
        )

    def count_request(self, route: str, model: str, status: int, seconds: float) -> None:
        self._requests.labels(route, model, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
