"""Alerts and the dashboard ask for metrics that exist, of this release only, and every alert is explained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sdcp_mono.cache.tiers import TierStats
from sdcp_mono.telemetry.certificates import CertificateMetrics
from sdcp_mono.telemetry.http import HttpMetrics
from sdcp_mono.telemetry.metrics import RoleMetrics
from sdcp_mono.telemetry.tiers import TierMetrics

ROOT = Path(__file__).parents[2]
Manifest = dict[str, Any]
Render = Callable[..., tuple[Manifest, ...]]

WORDS = {
    "sum", "min", "max", "rate", "increase", "histogram_quantile", "absent", "by", "le", "and", "or", "unless",
    "label_values", "up",
}  # fmt: skip
LABELS = {"namespace", "release", "role", "pool", "pod", "tier"}  # of the scrape: see the ServiceMonitor


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """Every sample that a role can expose, and its labels."""
    registry = CollectorRegistry()
    RoleMetrics(registry, ("target",), 8)
    HttpMetrics(registry).count_request("/v1/completions", "m", 200, 1.0)
    CertificateMetrics(registry, lambda: (90.0, 0))
    TierMetrics(registry, lambda: (TierStats("host"),), lambda: {"restored": 1})
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def used(expression: str) -> set[str]:
    """The names of metrics in a query: words that are neither functions nor labels nor strings."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\bby \([^)]*\)", "", bare)
    return {word for word in re.findall(r"[A-Za-z_:][\w:]*", bare) if word not in WORDS | LABELS}


def labels_used(expression: str) -> set[str]:
    inside = ",".join(re.findall(r"\{([^}]*)\}", expression))
    grouped = ",".join(re.findall(r"\bby \(([^)]*)\)", expression))
    return set(re.findall(r"(\w+)(?:=~|=|!=)\"", inside)) | set(re.findall(r"\w+", grouped))


@pytest.fixture(scope="module")
def rules(render: Render) -> dict[str, Manifest]:
    (found,) = (manifest for manifest in render({}) if manifest["kind"] == "PrometheusRule")
    return {rule["alert"]: rule for group in found["spec"]["groups"] for rule in group["rules"]}


@pytest.fixture(scope="module")
def queries(render: Render, rules: dict[str, Manifest]) -> dict[str, str]:
    """By alert or panel."""
    (board,) = (manifest for manifest in render({}) if manifest["kind"] == "ConfigMap")
    dashboard = json.loads(board["data"]["sdcp-mono.json"])
    found = {name: rule["expr"] for name, rule in rules.items()}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    (scaled,) = (
        manifest
        for manifest in render({"drafters": {"pools": {"default": {"keda": {"enabled": True}}}}})
        if manifest["kind"] == "ScaledObject"
    )
    found["KEDA"] = scaled["spec"]["triggers"][0]["metadata"]["query"]
    return found


def test_every_metric_exists(queries: dict[str, str], metrics: dict[str, set[str]]) -> None:
    assert len(queries) > 30
    for name, query in queries.items():
        assert used(query) <= metrics.keys(), name
        known = LABELS.union(*(metrics[metric] for metric in used(query)))
        assert labels_used(query) <= known | {"le"}, name


def test_a_metric_that_does_not_exist_is_noticed(metrics: dict[str, set[str]]) -> None:
    assert not used("sum(rate(sdcp_no_such_total[5m])) > 0") <= metrics.keys()


def test_queries_are_of_one_release(queries: dict[str, str]) -> None:
    for name, query in queries.items():
        for selector in re.findall(r"\{([^}]*)\}", query):
            assert "namespace=" in selector, name
            assert "release=" in selector, name
        assert query.count("(") == query.count(")")
        for metric in used(query) | ({"up"} if "up{" in query else set()):
            assert f"{metric}{{" in query, name


def test_every_speculation_panel_is_there(queries: dict[str, str]) -> None:
    """The metrics of vLLM's names, which operators look for."""
    text = " ".join(queries.values())
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert f"sdcp_spec_decode_num_{name}_total" in text


def test_every_alert_is_explained(rules: dict[str, Manifest]) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    explained = set(re.findall(r"^### (Sdcp\w+)$", page, re.MULTILINE))
    assert explained == rules.keys()
    for name, rule in rules.items():
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_the_monitor_reads_every_role_once(render: Render) -> None:
    for values, services in (({}, 4), ({"mode": "all-in-one"}, 1)):
        manifests = render(values)
        (monitor,) = (manifest for manifest in manifests if manifest["kind"] == "ServiceMonitor")
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        met = [m for m in manifests if m["kind"] == "Service" and wanted <= m["metadata"]["labels"].items()]
        assert len(met) == services
        (endpoint,) = monitor["spec"]["endpoints"]
        for service in met:
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert {relabeling["targetLabel"] for relabeling in endpoint["relabelings"]} == {"release", "role", "pool"}
