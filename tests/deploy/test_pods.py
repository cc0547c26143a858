"""What every pod of every profile promises: rights, probes, resources, places to write, and settings that exist."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from sdcp_mono.settings import (
    CacheSettings,
    Common,
    DrafterSettings,
    LinkSettings,
    RouterSettings,
    Settings,
    VerifierSettings,
)

Manifest = dict[str, Any]
Render = Callable[..., tuple[Manifest, ...]]

MODELS: dict[str, type[Common]] = {
    "all-in-one": Settings, "router": RouterSettings, "verifier": VerifierSettings, "drafter": DrafterSettings,
    "mlc": CacheSettings,
}  # fmt: skip
WRITABLE = ("/data", "/tmp", "/dev/shm", "/tls")


def role_of(name: str) -> str:
    return "drafter" if name.startswith("drafter") else name


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def environment(container: Manifest) -> dict[str, Any]:
    names = [variable["name"] for variable in container.get("env", ())]
    assert len(names) == len(set(names))
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container.get("env", ())}


def plain(pods: dict[str, Manifest]) -> dict[str, tuple[Manifest, Manifest]]:
    """Pod specs and their one main container, without the pod of ``helm test``."""
    return {name: (pod["spec"], pod["spec"]["containers"][0]) for name, pod in pods.items() if name != "test"}


def test_c_48_pods_are_restricted(pods: dict[str, Manifest]) -> None:
    """Pod Security Standards, level restricted, and a root file system that is read-only."""
    for pod in pods.values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context
        for volume in spec.get("volumes", ()):
            assert "hostPath" not in volume


def test_c_48_volumes_belong_to_the_group(workloads: dict[str, Manifest]) -> None:
    for workload in workloads.values():
        assert workload["spec"]["template"]["spec"]["securityContext"]["fsGroup"] > 0


def test_c_48_probes_survive_a_slow_load(pods: dict[str, Manifest]) -> None:
    for spec, container in plain(pods).values():
        ports = {port["name"] for port in container["ports"]}
        startup, live, ready = (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
        assert "initialDelaySeconds" not in {*startup, *live, *ready}
        assert startup["httpGet"]["path"] == live["httpGet"]["path"] == "/health/live"  # answers while it loads
        assert ready["httpGet"]["path"] == "/health"  # 503 until then
        assert live["periodSeconds"] * live["failureThreshold"] >= 60
        assert {probe["httpGet"]["port"] for probe in (startup, live, ready)} <= ports
        assert spec["terminationGracePeriodSeconds"] >= 30


def test_c_48_there_is_time_to_drain(render: Render) -> None:
    """SIGTERM, sessions that move for drainSeconds, five seconds for calls under way, and then some."""
    manifests = render({"drainSeconds": 120})
    graces = {
        m["metadata"]["name"]: m["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet")
    }
    assert graces["demo-sdcp-mono-verifier"] >= 125
    assert graces["demo-sdcp-mono-drafter-default"] >= 125
    assert graces["demo-sdcp-mono-router"] >= 5 + 30  # preStop, streams that are being read (GRACE_SECONDS)


def test_c_48_everything_is_written_below_volumes(pods: dict[str, Manifest], workloads: dict[str, Manifest]) -> None:
    for name, pod in pods.items():
        claims = {
            claim["metadata"]["name"]
            for claim in workloads.get(name, {"spec": {}})["spec"].get("volumeClaimTemplates", ())
        }
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        assert not claims & volumes
        for container in containers(pod):
            mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
            assert {mount["name"] for mount in mounts.values()} <= volumes | claims
            assert {path for path, mount in mounts.items() if not mount.get("readOnly")} <= set(WRITABLE)
            assert not any("subPath" in mount for mount in mounts.values())  # it would not see renewed certificates
            for variable, value in environment(container).items():
                if variable in ("HOME", "TMPDIR", "SDCP_DATA_DIR") or variable.endswith(("_HOME", "_CACHE_DIR")):
                    assert any(PurePosixPath(value).is_relative_to(path) for path in mounts if path in WRITABLE)
    for _, container in plain(pods).values():
        assert {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} <= environment(
            container
        ).keys()


def test_images_are_pinned(pods: dict[str, Manifest]) -> None:
    for pod in pods.values():
        for container in containers(pod):
            assert ":" in container["image"]
            assert not container["image"].endswith(":latest")


def test_resources_are_asked_for(pods: dict[str, Manifest]) -> None:
    for pod in pods.values():
        for container in containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


def test_every_sdcp_variable_is_a_setting_of_its_role(pods: dict[str, Manifest]) -> None:
    for name, (_, container) in plain(pods).items():
        fields = MODELS[role_of(name)].model_fields
        variables = {variable for variable in environment(container) if variable.startswith("SDCP_")}
        assert {v for v in variables if v.removeprefix("SDCP_").lower() not in fields} == set()
        assert "SDCP_DATA_DIR" in variables


def test_settings_are_read_from_the_environment(
    pods: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real settings models take what the chart writes."""
    monkeypatch.chdir(tmp_path)
    for name, (_, container) in plain(pods).items():
        with monkeypatch.context() as patch:
            for variable, value in environment(container).items():
                if isinstance(value, str):
                    patch.setenv(variable, value.replace("$(POD_NAME)", "demo-0"))
            if role_of(name) in ("router", "drafter"):
                patch.setenv("SDCP_BASE", "https://10-0-0-1.x.svc:9443/")
            read = MODELS[role_of(name)]()
        assert read.data_dir == Path("/data")
        if isinstance(read, LinkSettings):
            assert read.base.startswith("https://")
            assert read.listen in ("0.0.0.0:9443", "[::]:9443")
            assert bool(read.cache) == (name != "mlc")


def test_services_set_no_variables(pods: dict[str, Manifest]) -> None:
    """A Service called sdcp would set SDCP_PORT to an URL in every pod."""
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods.values())


@pytest.mark.parametrize("profile", ["gpu"], indirect=True)
def test_gpus(workloads: dict[str, Manifest], pods: dict[str, Manifest]) -> None:
    gpus = {name: c["resources"]["limits"].get("nvidia.com/gpu") for name, (_, c) in plain(pods).items()}
    assert gpus == {"router": None, "verifier": 2, "mlc": None, "drafter-fast": 1, "drafter-cheap": None}
    images = {name: c["image"].rpartition(":")[2] for name, (_, c) in plain(pods).items()}
    assert {name for name, tag in images.items() if tag.endswith("-cuda")} == {"verifier", "drafter-fast"}
    for name in ("verifier", "drafter-fast"):
        spec = pods[name]["spec"]
        assert spec["nodeSelector"] == {"accelerator": "h100"}
        assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
        shm = next(v for v in spec["volumes"] if v["name"] == "shm")
        assert shm["emptyDir"]["medium"] == "Memory"
    strategies = {n: w["spec"].get("strategy", {}).get("rollingUpdate") for n, w in workloads.items()}
    assert strategies["drafter-fast"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert strategies["drafter-cheap"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("profile", ["gpu"], indirect=True)
def test_settings_become_variables(pods: dict[str, Manifest]) -> None:
    found = plain(pods)
    assert environment(found["verifier"][1])["SDCP_KV_MEMORY_MB"] == "2000000"  # not 2e+06
    assert environment(found["verifier"][1])["SDCP_TENSOR_PARALLEL"] == "2"  # as many as GPUs
    assert environment(found["drafter-fast"][1])["SDCP_DRAFT"] == "ngram,quantized"
    for name in ("router", "verifier", "drafter-cheap"):
        container = found[name][1]
        assert environment(container)["SDCP_MODEL"] == "/models/large"
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]


@pytest.mark.parametrize("profile", ["external"], indirect=True)
def test_passwords_come_from_secrets(pods: dict[str, Manifest]) -> None:
    found = environment(plain(pods)["mlc"][1])
    assert found["SDCP_LOG"] == "postgresql://sdcp@db.example/sdcp"
    assert found["SDCP_OBJECTS"] == "s3://bucket/prefix"
    assert found["PGPASSWORD"] == {"secretKeyRef": {"name": "db", "key": "password"}}
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert found[key] == {"secretKeyRef": {"name": "bucket", "key": key}}
    for name, (_, container) in plain(pods).items():
        assert name == "mlc" or not {"PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "SDCP_LOG"} & environment(container).keys()
        assert environment(container)["OTEL_SERVICE_NAME"] == f"sdcp-mono-{role_of(name)}"


@pytest.mark.parametrize("profile", ["split"], indirect=True)
@pytest.mark.parametrize(
    ("address", "label"), [("10.1.2.3", "10-1-2-3"), ("fd00::1:2", "fd00--1-2")], ids=["ipv4", "ipv6"]
)
def test_an_instance_is_named_after_its_address(
    pods: dict[str, Manifest], tmp_path: Path, address: str, label: str
) -> None:
    """The container's own command, with a program in the place of sdcp-mono that says what it was given."""
    program = tmp_path / "sdcp-mono"
    program.write_text('#!/bin/sh\necho "$1 $SDCP_BASE"\n')
    program.chmod(0o755)
    for name, service in (("router", "router"), ("drafter-default", "drafter-default")):
        container = plain(pods)[name][1]
        assert environment(container)["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        told = subprocess.run(
            [*container["command"], *container["args"]],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": address}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        base = f"https://{label}.demo-sdcp-mono-{service}.prod.svc.cluster.local:9443/"
        assert told.stdout.strip() == f"{role_of(name)} {base}"


def test_state_is_on_volumes_unless_told(profile: str, workloads: dict[str, Manifest]) -> None:
    kept = {name for name, workload in workloads.items() if workload["spec"].get("volumeClaimTemplates")}
    assert kept == {"off": set(), "all-in-one-off": set(), "all-in-one": {"all-in-one"}}.get(
        profile, {"verifier", "mlc"}
    )
    for name in workloads.keys() - kept:
        data = next(v for v in workloads[name]["spec"]["template"]["spec"]["volumes"] if v["name"] == "data")
        assert "sizeLimit" in data["emptyDir"]
