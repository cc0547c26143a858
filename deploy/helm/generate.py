"""Makes values.schema.json and the table in the chart's README from values.yaml and the settings models.

``python deploy/helm/generate.py`` writes both; a test fails when they are out of date. A value's type is that of its
default; ``RULES`` says more where that is not enough, by the value's path.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

from sdcp_mono.settings import CacheSettings, Common, DrafterSettings, RouterSettings, Settings, VerifierSettings

CHART: Final = Path(__file__).parent / "sdcp-mono"
START, END = "<!-- values: start -->", "<!-- values: end -->"

ROLES: Final[dict[str, type[Common]]] = {
    "allInOne": Settings, "router": RouterSettings, "verifier": VerifierSettings,
    "drafters.defaults": DrafterSettings, "mlc": CacheSettings,
}  # fmt: skip
# What the chart sets itself, or what has no meaning in a pod.
OWN: Final = {
    "base", "cache", "caches", "certs_dir", "data_dir", "drafters", "drain_seconds", "dtype", "gateway",
    "gateway_host", "gateway_port", "host", "http_host", "http_port", "http_tls_name", "kit_port", "listen", "log",
    "log_level", "model", "objects", "port", "routers", "status_host", "status_port", "tls_dir", "tls_name",
    "trusted_drafters", "verifiers",
}  # fmt: skip

Schema = dict[str, Any]


def closed(**properties: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def each(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


TEXT: Final[Schema] = {"type": "string"}
NAME: Final[Schema] = {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"}
LABELS: Final[Schema] = {"type": "object", "additionalProperties": TEXT}
KEY: Final = closed(name=NAME, key=TEXT, optional={"type": "boolean"}) | {"required": ["name", "key"]}

DEFINITIONS: Final[dict[str, Schema]] = {
    "quantity": {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"},
    "amounts": {"type": "object", "additionalProperties": ref("quantity")},
    "resources": closed(requests=ref("amounts"), limits=ref("amounts")),
    "toleration": closed(
        key=TEXT, operator=one_of("Exists", "Equal"), value=TEXT, tolerationSeconds={"type": "integer"},
        effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
    ),
    "selector": closed(
        matchLabels=LABELS,
        matchExpressions=each(
            closed(key=TEXT, operator=one_of("In", "NotIn", "Exists", "DoesNotExist"), values=each(TEXT))
        ),
    ),
    "peer": closed(
        podSelector=ref("selector"), namespaceSelector=ref("selector"),
        ipBlock=closed(cidr=TEXT, **{"except": each(TEXT)}),
    )
    | {"minProperties": 1},
    "variable": closed(
        name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"pattern": "^SDCP_"}},
        value=TEXT,
        valueFrom=closed(secretKeyRef=KEY, configMapKeyRef=KEY, fieldRef=closed(fieldPath=TEXT)),
    )
    | {"required": ["name"]},
}  # fmt: skip

# By path, or by the last name of a path for what every role has.
RULES: Final[dict[str, Schema]] = {
    "mode": one_of("split", "all-in-one"),
    "logLevel": one_of("debug", "info", "warning", "error"),
    "drainSeconds": {"type": "number", "minimum": 0, "maximum": 600},  # a node waits for it when it is drained
    "clusterDomain": {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"},
    "model.dtype": one_of("bfloat16", "float32"),
    "image.pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "image.pullSecrets": each(NAME),
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.cudaDigest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.tag": {"type": "string", "not": {"const": "latest"}},
    "env": each(ref("variable")),
    "security.runAsUser": {"type": "integer", "minimum": 1},
    "security.runAsGroup": {"type": "integer", "minimum": 0},
    "probes.startupSeconds": {"type": "integer", "minimum": 600, "maximum": 86400},  # images are slow to unpack
    "tls.source": one_of("generated", "cert-manager", "existing"),
    "tls.existing.drafters": {"type": "object", "additionalProperties": NAME},
    "log.url": {"type": "string", "pattern": r"^(postgresql://([^:@/]+@)?[^@]+|(s3|gs|az)://[^@]+)?$"},
    "objects.url": {"type": "string", "pattern": r"^((s3|gs|az)://[^@]+)?$"},
    "service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "drafters.pools": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?$"},
        "additionalProperties": {"anyOf": [{"type": "null"}, ref("pool")]},
    },
    "drafters.defaults": ref("pool"),
    "targetCPUUtilizationPercentage": {"type": "integer", "minimum": 1, "maximum": 100},
    "minReplicas": {"type": "integer", "minimum": 1},
    "maxReplicas": {"type": "integer", "minimum": 1},
    "sessionsPerReplica": {"type": "integer", "minimum": 1},
    "clients": each(ref("peer")),
    "scrapers": each(ref("peer")),
    "to": each(ref("peer")),
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "resources": ref("resources"),
    "size": ref("quantity"),
    "dataSize": ref("quantity"),
    "tolerations": each(ref("toleration")),
    **dict.fromkeys(("annotations", "podAnnotations", "nodeSelector", "labels"), LABELS),
}


def settings_schema(kind: type[Common]) -> Schema:
    """The settings of a role that the chart leaves to its user."""
    found = {}
    for name, field in kind.model_json_schema()["properties"].items():
        if name in OWN:
            continue
        kept = {key: value for key, value in field.items() if key not in ("title", "default")}
        for choice in kept.pop("anyOf", ()):
            if choice["type"] != "null":
                kept |= choice
        found[name] = kept
    return closed(**dict(sorted(found.items())))


def schema_of(value: Any, path: str) -> Schema:
    if path.endswith(".settings"):
        return settings_schema(ROLES[path.removesuffix(".settings")])
    for name in (path, path.rpartition(".")[2]):
        if name in RULES and path != "drafters.defaults":
            return RULES[name]
    if isinstance(value, dict):
        return closed(**{name: schema_of(inner, f"{path}.{name}".lstrip(".")) for name, inner in value.items()})
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer", "minimum": 0}
    if isinstance(value, str):
        return TEXT
    raise ValueError(f"{path}: give it a rule in deploy/helm/generate.py")


def schema(values: dict[str, Any]) -> str:
    """values.schema.json."""
    pool = schema_of(values["drafters"]["defaults"], "drafters.defaults")
    made = schema_of(values, "")
    made["properties"]["drafters"]["properties"]["defaults"] = ref("pool")
    whole = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart sdcp-mono",
        **made,
        "definitions": {**DEFINITIONS, "pool": pool},
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def table(text: str) -> str:
    """The rows for every key that has a ``# --`` comment above it."""
    values = yaml.safe_load(text)
    rows, path, comment = [], [], ""
    for line in text.splitlines():
        if found := re.match(r"\s*# -- (.*)", line):
            comment = found[1]
        elif found := re.match(r"( *)([A-Za-z]+):", line):
            path = [*path[: len(found[1]) // 2], found[2]]
            value = values
            for name in path:
                value = value[name]
            if comment:
                default = json.dumps(value, ensure_ascii=False).replace("|", "\\|")
                rows.append(f"| `{'.'.join(path)}` | `{default}` | {comment.replace('|', chr(92) + '|')} |")
            elif not isinstance(value, dict):
                raise ValueError(f"{'.'.join(path)}: values.yaml has no comment '# --' above it")
            comment = ""
    return "\n".join(["| value | default | |", "|---|---|---|", *rows])


def readme(text: str, values: str) -> str:
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{table(values)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    values = (CHART / "values.yaml").read_text()
    (CHART / "values.schema.json").write_text(schema(yaml.safe_load(values)))
    target = CHART / "README.md"
    target.write_text(readme(target.read_text(), values))


if __name__ == "__main__":
    main()
