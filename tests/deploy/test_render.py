"""Every combination of profile, API capabilities and Kubernetes version is what that Kubernetes takes, strictly."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import kubernetes_validate.utils as schemas
import pytest

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "sdcp-mono"
Manifest = dict[str, Any]
Render = Callable[..., tuple[Manifest, ...]]

# Kinds of other projects, for which there is no schema here.
FOREIGN = {
    "Certificate": "cert-manager.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemas, "schema_contents", functools.cache(schemas.schema_contents))
        yield


def test_every_manifest_is_valid(combination: tuple[tuple[Manifest, ...], str]) -> None:
    manifests, version = combination
    checked = 0
    for manifest in manifests:
        if manifest["kind"] in FOREIGN:
            assert manifest["apiVersion"] == FOREIGN[manifest["kind"]]
            continue
        assert kubernetes_validate.validate(manifest, version, strict=True) == version
        checked += 1
    assert checked >= 4


def test_objects_have_names_of_their_own(manifests: tuple[Manifest, ...]) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))
    for _, name in names:
        assert len(name) <= 63
    for manifest in manifests:
        assert "namespace" not in manifest["metadata"]
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"


def test_a_long_release_name_fits(render: Render) -> None:
    """63 is the limit of labels and DNS; a StatefulSet's revision label adds 11 to its name."""
    values = {"drafters": {"pools": {"a-long-name1": {}}}}
    for manifest in render(values, release="r" * 53):
        assert len(manifest["metadata"]["name"]) <= 63 - 11 * (manifest["kind"] == "StatefulSet")


@pytest.mark.parametrize("apis", [(), ("monitoring.coreos.com/v1",), ("keda.sh/v1alpha1",)])
def test_foreign_kinds_need_their_api(render: Render, apis: tuple[str, ...]) -> None:
    values = {"drafters": {"pools": {"default": {"keda": {"enabled": True}}}}}
    manifests = render(values, apis=apis)
    kinds = {manifest["kind"] for manifest in manifests}
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert (kind in kinds) == ("monitoring.coreos.com/v1" in apis)
    assert ("ScaledObject" in kinds) == ("keda.sh/v1alpha1" in apis)
    drafter = next(m for m in manifests if m["kind"] == "Deployment" and "drafter" in m["metadata"]["name"])
    assert ("replicas" in drafter["spec"]) != ("ScaledObject" in kinds)  # one of both decides, never two


@pytest.mark.parametrize("profile", ["off"], indirect=True)
def test_everything_off_leaves_the_roles(manifests: tuple[Manifest, ...]) -> None:
    kinds = Counter(manifest["kind"] for manifest in manifests)
    assert kinds == {"Deployment": 1, "StatefulSet": 2, "Service": 4, "Secret": 1, "Pod": 1}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
        ({"verifier": {"gpus": 1}}, "additional properties 'gpus' not allowed"),
        ({"drafters": {"pools": {"fast": {"replica": 1}}}}, "additional properties 'replica' not allowed"),
        ({"drafters": {"pools": {"Fast_one": {}}}}, "Fast_one"),
        ({"verifier": {"settings": {"kv_memory_gb": 1}}}, "additional properties 'kv_memory_gb' not allowed"),
        ({"verifier": {"settings": {"base": "https://x/"}}}, "additional properties 'base' not allowed"),
        ({"router": {"settings": {"m_max": 65}}}, "/router/settings/m_max"),
        ({"mode": "both"}, "/mode"),
        ({"log": {"url": "postgresql://sdcp:secret@db/sdcp"}}, "/log/url"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"probes": {"startupSeconds": 120}}, "/probes/startupSeconds"),
        ({"env": [{"name": "SDCP_BASE", "value": "x"}]}, "/env/0/name"),
        ({"security": {"runAsUser": 0}}, "/security/runAsUser"),
        ({"tls": {"source": "cert-manager"}}, "tls.certManager.issuerRef.name: the Issuer that signs"),
        ({"tls": {"source": "existing"}}, "tls.existing: the Secret of"),
    ],
)
def test_wrong_values_are_refused(render: Render, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert complaint in str(refused.value)


def test_the_schema_is_closed(chart_files: dict[str, str]) -> None:
    """Maps have a schema for their values, everything else names its properties."""
    schema = json.loads(chart_files["values.schema.json"])

    def open_objects(node: Any, path: str) -> list[str]:
        if not isinstance(node, dict):
            return []
        found = [path] if node.get("type") == "object" and node.get("additionalProperties", True) is True else []
        for name, inner in node.items():
            for index, one in enumerate(inner if isinstance(inner, list) else [inner]):
                found += open_objects(one, f"{path}/{name}" + (f"/{index}" if isinstance(inner, list) else ""))
        return found

    assert open_objects(schema, "") == []


def test_helm_lint_finds_nothing() -> None:
    report = helm_python.lint(CHART, strict=True, kube_version="v1.31.0")
    assert [m for m in report["messages"] if m["severity"] > 1] == []
    assert report["errors"] == []
