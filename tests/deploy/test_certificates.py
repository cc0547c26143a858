"""Who a pod is: certificates that name exactly one URI, from each source, under the names that the roles read."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from cryptography import x509

from sdcp_mono import certs
from sdcp_mono.core.names import Bases, is_member, normalise_pattern

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "sdcp-mono"
Manifest = dict[str, Any]
Render = Callable[..., tuple[Manifest, ...]]
DOMAIN = "prod.svc.cluster.local"
SERVICES = {"router": "router", "verifier": "verifier", "drafter-default": "drafter-default", "mlc": "mlc"}


def host_of(name: str) -> str:
    return f"demo-sdcp-mono-{name}.{DOMAIN}"


def volume(pod: Manifest, name: str) -> dict[str, Any]:
    return next(v for v in pod["spec"]["volumes"] if v["name"] == name)


def ca_of(manifests: tuple[Manifest, ...]) -> Manifest:
    return next(m for m in manifests if m["kind"] == "Secret")


@pytest.mark.parametrize("profile", ["split"], indirect=True)
@pytest.mark.parametrize("name", ["router", "drafter-default"])
def test_the_init_container_makes_the_identity(
    manifests: tuple[Manifest, ...], pods: dict[str, Manifest], tmp_path: Path, name: str
) -> None:
    """The chart's CA and the container's command, run here."""
    secret, role = ca_of(manifests)["data"], name.partition("-")[0]
    (tmp_path / "ca").mkdir()
    for item in volume(pods[name], "ca")["secret"]["items"]:
        (tmp_path / "ca" / item["path"]).write_bytes(base64.b64decode(secret[item["key"]]))
    (container,) = pods[name]["spec"]["initContainers"]
    command = [
        part.replace("=/ca", f"={tmp_path}/ca").replace("/tls", f"{tmp_path}/tls") for part in container["command"]
    ]
    subprocess.run([sys.executable, "-m", "sdcp_mono", *command[1:]], check=True, capture_output=True, cwd=tmp_path)

    files = certs.files(tmp_path / "tls", role)
    ca = x509.load_pem_x509_certificate(files.ca.read_bytes())
    cert = x509.load_pem_x509_certificate(files.cert.read_bytes())
    cert.verify_directly_issued_by(ca)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"https://{host_of(name)}:9443/"]
    assert names.get_values_for_type(x509.DNSName) == [host_of(name), f"*.{host_of(name)}"]


@pytest.mark.parametrize("profile", ["split"], indirect=True)
def test_the_key_of_the_ca_stays_out_of_the_roles(pods: dict[str, Manifest]) -> None:
    for pod in pods.values():
        for container in pod["spec"]["containers"]:
            assert "ca" not in {mount["name"] for mount in container.get("volumeMounts", ())}


class ClusterWithSecrets(BaseHTTPRequestHandler):
    """As much of an API server as Helm's ``lookup`` asks for: discovery of core/v1, and Secrets."""

    secrets: dict[str, Manifest]

    def do_GET(self) -> None:
        resource = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
        answers: dict[str, Manifest] = {
            "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]},
            **{f"/api/v1/namespaces/prod/secrets/{name}": secret for name, secret in self.secrets.items()},
        }
        found = answers.get(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def cluster() -> Iterator[tuple[helm_python.Config, dict[str, Manifest]]]:
    """Helm's connection to it, and its Secrets by name."""
    secrets: dict[str, Manifest] = {}
    handler = type("Handler", (ClusterWithSecrets,), {"secrets": secrets})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    access = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x", "users": [{"name": "x", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
    }  # fmt: skip
    with helm_python.Config(kubeconfig_content=json.dumps(access), namespace="prod") as config:
        yield config, secrets
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_upgrade_keeps_the_ca(cluster: tuple[helm_python.Config, dict[str, Manifest]]) -> None:
    config, secrets = cluster

    def ca() -> Manifest:
        with helm_python.Chart.load(CHART) as chart:
            texts = config.render(chart, {}, name="demo", namespace="prod", is_upgrade=True)
        return dict(yaml.safe_load(texts["sdcp-mono/templates/tls.yaml"]))

    first = ca()
    assert first["data"] != ca()["data"]  # where there is none, one is made
    secrets["demo-sdcp-mono-ca"] = first
    assert ca()["data"] == first["data"]
    assert first["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize("profile", ["cert-manager"], indirect=True)
def test_cert_manager_makes_one_identity_a_role(manifests: tuple[Manifest, ...], pods: dict[str, Manifest]) -> None:
    found = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "Certificate"}
    assert found.keys() == {f"demo-sdcp-mono-{name}" for name in SERVICES}
    for name in SERVICES:
        spec = found[f"demo-sdcp-mono-{name}"]
        assert spec["uris"] == [f"https://{host_of(name)}:9443/"]
        assert spec["dnsNames"] == [host_of(name), f"*.{host_of(name)}"]
        assert {"server auth", "client auth"} <= set(spec["usages"])
        assert spec["issuerRef"]["name"] == "issuer"
        assert volume(pods[name], "tls")["secret"]["secretName"] == spec["secretName"]
    assert not any(m["kind"] == "Secret" for m in manifests)


def test_cert_manager_must_be_there(render: Render) -> None:
    values = {"tls": {"source": "cert-manager", "certManager": {"issuerRef": {"name": "issuer"}}}}
    with pytest.raises(helm_python.HelmError, match="install cert-manager, or choose generated or existing"):
        render(values, apis=())


@pytest.mark.parametrize("profile", ["existing", "cert-manager"], indirect=True)
def test_secrets_are_mounted_as_the_roles_read_them(profile: str, pods: dict[str, Manifest]) -> None:
    for name in SERVICES:
        role = name.partition("-")[0]
        secret = volume(pods[name], "tls")["secret"]
        items = {item["key"]: item["path"] for item in secret["items"]}
        files = certs.files(Path("/tls"), role)
        assert {key: f"/tls/{path}" for key, path in items.items()} == {
            "ca.crt": str(files.ca), "tls.crt": str(files.cert), "tls.key": str(files.key)
        }  # fmt: skip
        assert secret["defaultMode"] == 0o440  # readable by the group that owns volumes, and nobody else
        assert "initContainers" not in pods[name]["spec"]
        if profile == "existing":
            assert secret["secretName"] == name[0]


def test_every_pool_has_its_own_identity(render: Render) -> None:
    values = {
        "drafters": {"pools": {"default": None, "a": {}, "b": {}}},
        "tls": {"source": "cert-manager", "certManager": {"issuerRef": {"name": "issuer"}}},
    }
    manifests = render(values)
    uris = sorted(m["spec"]["uris"][0] for m in manifests if m["kind"] == "Certificate" and "drafter" in str(m))
    assert uris == [f"https://{host_of(f'drafter-{pool}')}:9443/" for pool in "ab"]
    router = next(m for m in manifests if m["kind"] == "Deployment" and m["metadata"]["name"].endswith("router"))
    told = {v["name"]: v.get("value") for v in router["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert told["SDCP_DRAFTERS"] == ",".join(f"https://*.{host_of(f'drafter-{pool}')}:9443/" for pool in "ab")


@pytest.mark.parametrize("profile", ["split", "gpu"], indirect=True)
def test_peers_admit_each_other(pods: dict[str, Manifest]) -> None:
    """Every instance is a member of the pool that its certificate names, and every list of peers admits it."""
    told = {
        name: {v["name"]: v.get("value", "") for v in pod["spec"]["containers"][0]["env"]}
        for name, pod in pods.items()
        if name != "test"
    }
    bases = {
        name: variables["SDCP_BASE"].replace("$(POD_NAME)", f"demo-sdcp-mono-{name}-0")
        if "SDCP_BASE" in variables
        else f"https://10-1-2-3.{host_of(name)}:9443/"  # test_pods.py runs the command that makes it
        for name, variables in told.items()
    }
    for name, base in bases.items():
        identity = f"https://{host_of(name)}:9443/"
        assert base == identity if name == "mlc" else is_member(base, identity)
        for other, variables in told.items():
            listed = variables.get(f"SDCP_{name.partition('-')[0].upper()}S", "")
            for entry in filter(None, listed.split(",")):
                assert normalise_pattern(entry) == entry
            if listed:
                assert base in Bases.of(listed.split(",")), (name, other)
            if other != "mlc":
                assert variables["SDCP_CACHE"] == bases["mlc"]
