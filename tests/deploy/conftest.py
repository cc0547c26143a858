"""The chart through the real Helm engine, each combination rendered once."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, _native

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "sdcp-mono"
Manifest = dict[str, Any]

MONITORING = "monitoring.coreos.com/v1"
CERT_MANAGER = "cert-manager.io/v1"
KEDA = "keda.sh/v1alpha1"
APIS: dict[str, tuple[str, ...]] = {
    "bare": (),
    "cert-manager": (CERT_MANAGER,),
    "everything": (CERT_MANAGER, MONITORING, KEDA),
}
VERSIONS = ("1.29", "1.31", "1.33")
GPU = {"count": 1}
PLACED = {
    "nodeSelector": {"accelerator": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}

PROFILES: dict[str, dict[str, Any]] = {
    "all-in-one": {"mode": "all-in-one"},
    "split": {},
    "gpu": {
        "verifier": {"gpu": {"count": 2}, "settings": {"kv_memory_mb": 2000000, "engine": "hf"}, **PLACED},
        "drafters": {
            "pools": {
                "default": None,
                "fast": {"gpu": GPU, "settings": {"draft": ["ngram", "quantized"]}, **PLACED},
                "cheap": {"replicas": 3, "settings": {"draft": ["ngram"]}},
            }
        },
        "model": {"id": "/models/large", "existingClaim": "models"},
        "networkPolicy": {"models": {"enabled": False}},
    },
    "external": {
        "log": {"url": "postgresql://sdcp@db.example/sdcp", "passwordSecret": {"name": "db"}},
        "objects": {"url": "s3://bucket/prefix"},
        "bucket": {"credentialsSecret": {"name": "bucket"}},
        "otel": {"enabled": True},
        "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "web"}}}]},
    },
    "cert-manager": {"tls": {"source": "cert-manager", "certManager": {"issuerRef": {"name": "issuer"}}}},
    "existing": {
        "tls": {
            "source": "existing",
            "existing": {"router": "r", "verifier": "v", "mlc": "m", "drafters": {"default": "d"}},
        }
    },
    "keda": {"drafters": {"pools": {"default": {"keda": {"enabled": True}}}}},
    "off": {
        "listenAddress": "::",
        "serviceAccount": {"create": False},
        "router": {"autoscaling": {"enabled": False}, "pdb": {"enabled": False}},
        "verifier": {"persistence": {"enabled": False}, "pdb": {"enabled": False}},
        "drafters": {"pools": {"default": None}},
        "mlc": {"persistence": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "metrics": {"serviceMonitor": {"enabled": False}, "rules": {"enabled": False}, "dashboard": {"enabled": False}},
    },
    "all-in-one-off": {
        "mode": "all-in-one",
        "allInOne": {"persistence": {"enabled": False}},
        "log": {"url": "s3://bucket/logs"},
        "networkPolicy": {"clients": [], "scrapers": []},
    },
}


@functools.cache
def _chart() -> Chart:
    return Chart.load(CHART)


@functools.cache
def _rendered(values: str, options: str) -> tuple[Manifest, ...]:
    # Chart.render has no arguments for versions and APIs; the library that it calls takes them.
    texts = json.loads(_native.call_string("helm_render", _chart()._raw(), values, options))
    return tuple(
        manifest
        for name, text in texts.items()
        if not name.endswith("NOTES.txt")
        for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if manifest
    )


def _render(
    values: dict[str, Any],
    *,
    apis: tuple[str, ...] = APIS["everything"],
    version: str = "1.31",
    release: str = "demo",
    namespace: str = "prod",
) -> tuple[Manifest, ...]:
    options = {"name": release, "namespace": namespace, "kube_version": f"v{version}.0", "api_versions": list(apis)}
    return _rendered(json.dumps(values), json.dumps(options))


@pytest.fixture(scope="session")
def render() -> Callable[..., tuple[Manifest, ...]]:
    """``render(values, apis=..., version=...)``: the manifests; they are shared, so don't change them."""
    return _render


COMBINATIONS = [
    (profile, apis, version)
    for profile, apis, version in itertools.product(PROFILES, APIS, VERSIONS)
    if (profile, apis) != ("cert-manager", "bare")  # refused: test_certificates.py
]


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def combination(request: pytest.FixtureRequest) -> tuple[tuple[Manifest, ...], str]:
    """The manifests of one combination, and the Kubernetes version."""
    profile, apis, version = request.param
    return _render(PROFILES[profile], apis=APIS[apis], version=version), version


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    """The name of a profile."""
    return str(request.param)


@pytest.fixture
def manifests(profile: str) -> tuple[Manifest, ...]:
    """A profile on a cluster that has all APIs."""
    return _render(PROFILES[profile])


WORKLOADS = ("Deployment", "StatefulSet")


@pytest.fixture
def workloads(manifests: tuple[Manifest, ...]) -> dict[str, Manifest]:
    """Deployments and StatefulSets by role, drafters by ``drafter-<pool>``."""
    found = {}
    for manifest in manifests:
        if manifest["kind"] in WORKLOADS:
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            parts = (labels["app.kubernetes.io/component"], labels.get("sdcp-mono/pool"))
            found["-".join(filter(None, parts))] = manifest
    return found


@pytest.fixture
def pods(manifests: tuple[Manifest, ...], workloads: dict[str, Manifest]) -> dict[str, Manifest]:
    """Pod templates by role, and the pod of ``helm test``."""
    (test,) = (manifest for manifest in manifests if manifest["kind"] == "Pod")
    return {name: workload["spec"]["template"] for name, workload in workloads.items()} | {"test": test}


@pytest.fixture(scope="session")
def chart_files() -> dict[str, str]:
    """The chart's files by their path in it."""
    return {path.relative_to(CHART).as_posix(): path.read_text() for path in CHART.rglob("*") if path.is_file()}
