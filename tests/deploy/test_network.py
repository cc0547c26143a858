"""Services reach the pods that they mean, and the network lets through the edges between roles and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Manifest = dict[str, Any]

# Who calls whom over internal gRPC.
CALLS = {
    "router": {"verifier", "drafter", "mlc"},
    "verifier": {"router", "mlc"},
    "drafter": {"router", "verifier", "mlc"},
    "mlc": set(),
}
GRPC, HTTP, STATUS, DNS = 9443, 8000, 9090, 53
METHODS = {"verifiers": "verifier", "drafters": "drafter", "routers": "router", "log": "mlc", "objects": "mlc"}


def labels_of(pod: Manifest) -> dict[str, str]:
    return dict(pod["metadata"]["labels"])


def chosen(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def test_the_table_says_what_the_roles_do() -> None:
    """Each ``run_<role>`` asks ``links`` for the clients that it needs."""
    module = ast.parse((ROOT / "sdcp_mono" / "compose" / "roles.py").read_text())
    found: dict[str, set[str]] = {}
    for function in module.body:
        if isinstance(function, ast.AsyncFunctionDef) and function.name.startswith("run_"):
            called = {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "links"
            }
            name = {"cache": "mlc"}.get(role := function.name.removeprefix("run_"), role)
            found[name] = {METHODS[method] for method in called & METHODS.keys()}
    assert found == CALLS


class Network:
    """NetworkPolicies as Kubernetes applies them to pods of one namespace."""

    def __init__(self, manifests: tuple[Manifest, ...]) -> None:
        self._policies = [manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy"]

    def rules(self, labels: dict[str, str], direction: str) -> list[dict[str, Any]] | None:
        """None: nothing restricts that pod."""
        mine = [
            policy
            for policy in self._policies
            if chosen(policy["podSelector"], labels) and direction.capitalize() in policy["policyTypes"]
        ]
        return [rule for policy in mine for rule in policy.get(direction, ())] if mine else None

    def _allows(self, labels: dict[str, str], other: dict[str, str], port: int, direction: str) -> bool:
        rules = self.rules(labels, direction)
        if rules is None:
            return True
        side = "from" if direction == "ingress" else "to"
        return any(
            port in {one["port"] for one in rule["ports"]}
            and (
                side not in rule
                or any(p.keys() == {"podSelector"} and chosen(p["podSelector"], other) for p in rule[side])
            )
            for rule in rules
        )

    def passes(self, source: dict[str, str], target: dict[str, str], port: int) -> bool:
        return self._allows(source, target, port, "egress") and self._allows(target, source, port, "ingress")

    def outside(self, labels: dict[str, str], direction: str) -> dict[int, list[Any] | None]:
        """By port: the peers that are not pods of this namespace; None: anybody."""
        side = "from" if direction == "ingress" else "to"
        found: dict[int, list[Any] | None] = {}
        for rule in self.rules(labels, direction) or ():
            assert rule["ports"], "a rule for every port"
            peers = rule.get(side)
            others = None if peers is None else [peer for peer in peers if peer.keys() != {"podSelector"}]
            if others != []:
                found |= {one["port"]: others for one in rule["ports"]}
        return found


def edges(pods: dict[str, Manifest], network: Network) -> Iterator[tuple[str, str, int]]:
    for source, pod in pods.items():
        for target, other in pods.items():
            for port in (GRPC, HTTP, STATUS):
                if source != target and network.passes(labels_of(pod), labels_of(other), port):
                    yield source, target, port


@pytest.mark.parametrize(
    "profile", ["split", "gpu", "external", "cert-manager", "all-in-one", "all-in-one-off"], indirect=True
)
def test_the_edges_are_the_role_graph(manifests: tuple[Manifest, ...], pods: dict[str, Manifest]) -> None:
    role = {name: labels_of(pod)["app.kubernetes.io/component"] for name, pod in pods.items()}
    expected = {
        (source, target, GRPC) for source in pods for target in pods if role[target] in CALLS.get(role[source], ())
    } | {("test", name, HTTP) for name in pods if role[name] in ("router", "all-in-one")}
    assert set(edges(pods, Network(manifests))) == expected


@pytest.mark.parametrize("profile", ["split", "gpu", "all-in-one"], indirect=True)
def test_pods_of_others_reach_the_api_only(manifests: tuple[Manifest, ...], pods: dict[str, Manifest]) -> None:
    network, stranger = Network(manifests), {"app": "stranger"}
    for name, pod in pods.items():
        open_ports = {port for port in (GRPC, HTTP, STATUS) if network.passes(stranger, labels_of(pod), port)}
        assert open_ports == ({HTTP} if name in ("router", "all-in-one") else set())


def test_a_test_of_the_test() -> None:
    """Without policies everything passes."""
    assert Network(()).passes({"a": "b"}, {"c": "d"}, 1)


@pytest.mark.parametrize("profile", ["split"], indirect=True)
def test_outside_there_are_dns_models_and_prometheus(
    manifests: tuple[Manifest, ...], pods: dict[str, Manifest]
) -> None:
    network = Network(manifests)
    for name, pod in pods.items():
        out = network.outside(labels_of(pod), "egress")
        assert set(out) == ({DNS} if name in ("mlc", "test") else {DNS, 443})
        if 443 in out:
            assert out[443] is not None
            assert "10.0.0.0/8" in out[443][0]["ipBlock"]["except"]
        came = network.outside(labels_of(pod), "ingress")
        expected = {"router": {HTTP}, "test": set()}.get(name, {STATUS})
        assert set(came) == expected
        for peers in came.values():
            assert peers == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


@pytest.mark.parametrize("profile", ["external"], indirect=True)
def test_outside_there_are_stores_and_the_collector(manifests: tuple[Manifest, ...], pods: dict[str, Manifest]) -> None:
    network = Network(manifests)
    assert set(network.outside(labels_of(pods["mlc"]), "egress")) == {DNS, 5432, 443, 4317}
    assert set(network.outside(labels_of(pods["router"]), "egress")) == {DNS, 443, 4317}
    web = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "web"}}}
    rules = network.rules(labels_of(pods["router"]), "ingress")
    assert rules is not None
    assert any(web in rule["from"] for rule in rules)
    assert not network.passes({"app": "stranger"}, labels_of(pods["router"]), HTTP)


def test_services_mean_the_pods_of_one_role(manifests: tuple[Manifest, ...], pods: dict[str, Manifest]) -> None:
    for service in (m for m in manifests if m["kind"] == "Service"):
        meant = [pod for pod in pods.values() if service["spec"]["selector"].items() <= labels_of(pod).items()]
        assert len(meant) == 1, service["metadata"]["name"]
        named = {p["name"]: p["containerPort"] for p in meant[0]["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in named
        if {port["name"] for port in service["spec"]["ports"]} >= {"grpc"}:
            assert named["grpc"] == GRPC  # peers are called at the port that their base names


def test_instances_have_names_before_they_are_ready(manifests: tuple[Manifest, ...], profile: str) -> None:
    """A router is ready when a verifier reports to it, and verifiers find it by its name."""
    services = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "Service"}
    for name, spec in services.items():
        if any(part in name for part in ("-router", "-verifier", "-drafter")):
            assert spec["clusterIP"] == "None"
            assert spec["publishNotReadyAddresses"] is True
    for workload in (m for m in manifests if m["kind"] == "StatefulSet"):
        assert workload["spec"]["serviceName"] in services


def test_selectors_match_their_own_pods_only(workloads: dict[str, Manifest], manifests: tuple[Manifest, ...]) -> None:
    templates = {name: labels_of(workload["spec"]["template"]) for name, workload in workloads.items()}
    budgets = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "PodDisruptionBudget"}
    for name, workload in workloads.items():
        selectors = [workload["spec"]["selector"]]
        if workload["metadata"]["name"] in budgets:
            selectors.append(budgets.pop(workload["metadata"]["name"])["selector"])
        for selector in selectors:
            assert [other for other, labels in templates.items() if chosen(selector, labels)] == [name]
    assert budgets == {}


def test_scalers_mean_workloads(manifests: tuple[Manifest, ...]) -> None:
    deployments = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "Deployment"}
    for scaler in (m for m in manifests if m["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")):
        assert "replicas" not in deployments[scaler["spec"]["scaleTargetRef"]["name"]]
