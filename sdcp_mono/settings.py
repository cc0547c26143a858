"""Settings: every one reachable by environment (``SDCP_…``), by file (``sdcp.toml`` or ``.env``) and by flag."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from sdcp_mono.core.names import normalise_base, normalise_pattern
from sdcp_mono.core.problems import Malformed

Names = Annotated[tuple[str, ...], NoDecode]
"""In the environment separated by commas: SDCP_DRAFT=ngram,quantized"""


def _data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "sdcp-mono"


class Common(BaseSettings):
    """What every role has. Sizes and counts are limits, each with its reason beside it."""

    model_config = SettingsConfigDict(
        env_prefix="SDCP_", env_file=".env", toml_file="sdcp.toml", extra="ignore", frozen=True, validate_default=True
    )

    data_dir: Path = Field(default_factory=_data_dir, description="Models, commit log and caches live here.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Of the log on stderr.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then .env, then sdcp.toml."""
        return init_settings, env_settings, dotenv_settings, TomlConfigSettingsSource(settings_cls)


class TraceSettings(Common):
    """Traces of sessions and rounds. Without an exporter (no file, no OTLP) nothing is traced."""

    trace_sample: float = Field(
        1.0, ge=0, le=1,
        description="Share of the sessions that are traced whole, chosen by their ids, so all roles agree; of the "
        "others only rounds that were slow or went wrong.",
    )  # fmt: skip
    trace_slow_ms: int = Field(
        1000, ge=0,
        description="A round that takes so long is traced whatever the sample: nobody waits a second for a few tokens "
        "without asking why. 0: none is slow.",
    )  # fmt: skip
    trace_file_mb: int = Field(
        64, ge=0, le=65536,
        description="Most that this process's trace file may take, under traces/ in the data folder; older spans go. "
        "64 MB hold about 100,000 spans, an hour of one busy session. 0: no file.",
    )  # fmt: skip
    trace_otlp: str = Field(
        "", repr=False,
        description="Also send spans to http://HOST:4318, https://…, grpc://HOST:4317 or grpcs://… (extra otlp); "
        "headers and timeouts as OTEL_EXPORTER_OTLP_… say.",
    )  # fmt: skip
    trace_queue: int = Field(
        16384, ge=16, le=2**20,
        description="Spans that wait for an exporter, at most: about 20 MB, and some ten seconds of 16 busy sessions, "
        "which a collector may take to come back. More are dropped and counted.",
    )  # fmt: skip


class TierSettings(Common):
    """The tiers below the device."""

    kv_host_mb: int = Field(512, ge=0, description="Host tier: KV of prefixes, kept beside the device's; 0: no tiers.")
    kv_disk_mb: int = Field(2048, ge=0, description="Disk tier, under the data folder, survives restarts; 0: none.")
    kv_disk_floor_mb: int = Field(1024, ge=0, description="Free space that the disk tier leaves on its file system.")


class ModelSettings(TierSettings):
    """A model and its KV cache: the target, and what drafters are made of."""

    model: str | None = Field(
        None, description="Model id, Hugging Face folder, GGUF file or hub id; none: the default."
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="The target's weights and KV.")
    engine: Literal["auto", "fused", "hf"] = Field(
        "auto", description="fused: our own pass, for the architectures it knows; hf: any model, through transformers."
    )
    threads: int = Field(0, ge=0, le=1024, description="Threads of the kernels; 0: one a core this process may use.")
    kv_memory_mb: int = Field(1024, ge=1, description="Memory of the target's KV cache, and of each draft model's.")
    token_budget: int = Field(256, ge=16, le=65536, description="Rows of one pass: bounds what others wait for.")
    max_context: int = Field(0, ge=0, description="Context length to serve; 0: the model's.")
    max_sessions: int = Field(32, ge=1, le=4096, description="Sessions at work at once; more wait.")


class DraftSettings(Common):
    """Which drafters there are, and how much they propose."""

    draft: Names = Field(
        (), description="Drafters in order: none, ngram, quantized, model:DIR. Empty: the best that ships."
    )
    m_fixed: int | None = Field(None, ge=1, le=64, description="Always propose this many tokens; for experiments.")

    @field_validator("draft", mode="before")
    @classmethod
    def _split_draft(cls, value: object) -> object:
        return _names(value)


class AdmissionSettings(Common):
    """What a router takes, and what it writes into contracts."""

    host: str = Field("127.0.0.1", description="Address of the OpenAI API; it has no authentication of its own.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the OpenAI API; 0 lets the system choose.")
    max_sessions: int = Field(32, ge=1, le=4096, description="Sessions at work at once; more wait.")
    max_queue: int = Field(256, ge=0, le=65536, description="Requests that wait; more get 429.")
    queue_seconds: float = Field(120.0, gt=0, description="How long a request may wait, then 503.")
    m_max: int = Field(8, ge=1, le=64, description="Upper bound on M, the tokens of one proposal (section 4.1).")
    m_init: int = Field(4, ge=1, le=64, description="M's limit before a session's first verdict.")
    low_ratio: int = Field(0, ge=0, le=100, description="A round is low below this percentage accepted (6.5.2).")


class StoreSettings(Common):
    """Where commit logs and objects live."""

    log: str = Field(
        "", repr=False,
        description="Commit logs: postgresql://… (extra postgres) or s3://…, gs://…, az://… (extra objectstore); "
        "empty: an SQLite file in the data folder.",
    )  # fmt: skip
    objects: str = Field(
        "",
        description="What of the objects others share, and KV that outlives this process: s3://…, gs://…, az://… or "
        "file:///… (extra objectstore); empty: in memory and in this process's tiers only.",
    )  # fmt: skip
    objects_mb: int = Field(256, ge=1, description="Objects in memory: 32 sessions' draft rows are 50 MB here.")
    scope_percent: int = Field(
        50, ge=1, le=100,
        description="Share of the objects' memory and number that one scope may take: no tenant takes all of it, and "
        "one alone still has room for twice what 32 sessions need.",
    )  # fmt: skip
    kept_logs: int = Field(1000, ge=0, description="Logs of ended sessions that are kept, to resume and to replay.")


class GatewaySettings(Common):
    """The SDCP gateway and the peers behind others'."""

    gateway: bool = Field(True, description="Serve the roles to others over HTTP/2, TLS 1.3 and SDCP's CBOR.")
    gateway_host: str = Field("127.0.0.1", description="Address of the SDCP gateway.")
    gateway_port: int = Field(8443, ge=1, le=65535, description="Port of the gateway; part of the roles' base URIs.")
    certs_dir: Path | None = Field(
        None, description="ca.pem, gateway.pem, gateway-key.pem. None: a development CA made under the data folder."
    )
    routers: Names = Field((), description="Base URIs of further routers that may use our verifier and drafter.")
    verifiers: Names = Field((), description="Base URIs of further verifiers that our router and drafter work with.")
    drafters: Names = Field((), description="Base URIs of further drafters that our router may assign.")
    caches: Names = Field((), description="Base URIs of further caches that references and commit logs may name.")
    trusted_drafters: Names = Field(
        (), description="Base URIs of drafters that rule 2 may use, trusted like the verifier (section 9)."
    )
    kit_port: int = Field(
        9443, ge=0, le=65535,
        description="The conformance kit's roles at 127.0.0.1 and this port are peers as if they were listed, "
        "preferred while they report, never trusted under rule 2. Without certs_dir only; 0: they are strangers.",
    )  # fmt: skip

    @field_validator("routers", "verifiers", "drafters", "caches", "trusted_drafters", mode="before")
    @classmethod
    def _split_bases(cls, value: object) -> object:
        return _names(value)

    @field_validator("routers", "verifiers", "drafters", "caches", "trusted_drafters")
    @classmethod
    def _base_uris(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _bases(value)


class Settings(GatewaySettings, StoreSettings, AdmissionSettings, DraftSettings, ModelSettings, TraceSettings):
    """One node with every role: ``sdcp-mono serve``."""

    share_kv: bool = Field(
        True, description="Let the quantized drafter read the target's KV instead of keeping its own (one process)."
    )


class LinkSettings(TraceSettings):
    """How a role that is a process of its own meets the others: internal gRPC with mutual TLS."""

    base: str = Field(description="Base URI by which others reach this instance; its certificate names it.")
    listen: str = Field("", description="HOST:PORT to listen on; empty: those of base.")
    tls_dir: Path | None = Field(None, description="ca.pem, and this instance's pair, as `certs init` makes them.")
    tls_name: str = Field("", description="File name of the pair without .pem; empty: the role's.")
    routers: Names = Field(
        (), description="Base URIs of the routers; https://*.HOST:PORT/ admits every instance one label below HOST."
    )
    verifiers: Names = Field((), description="Base URIs of the verifiers, or https://*.HOST:PORT/.")
    drafters: Names = Field((), description="Base URIs of the drafters, or https://*.HOST:PORT/.")
    cache: str = Field("", description="Base URI of the cache.")
    status_host: str = Field("127.0.0.1", description="Address of /health and /metrics.")
    status_port: int = Field(0, ge=0, le=65535, description="Port of /health and /metrics; 0 lets the system choose.")
    drain_seconds: float = Field(20.0, ge=0, description="How long sessions may take to move when this role stops.")

    @field_validator("routers", "verifiers", "drafters", mode="before")
    @classmethod
    def _split_peers(cls, value: object) -> object:
        return _names(value)

    @field_validator("base", "cache")
    @classmethod
    def _one_base(cls, value: str) -> str:
        return _bases((value,))[0] if value else value

    @field_validator("routers", "verifiers", "drafters")
    @classmethod
    def _all_bases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _bases(value, normalise_pattern)


class RouterSettings(LinkSettings, AdmissionSettings):
    """``sdcp-mono router``: the OpenAI API, and who works on which session."""

    model: str | None = Field(None, description="The model whose tokenizer and identity it uses; none: the default.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Of the verifiers: part of the identity.")


class SharedKvSettings(TierSettings):
    """KV between instances."""

    kv_shared: bool = Field(
        True, description="Keep a copy of committed tokens' KV in the cache, and load what another instance computed."
    )


class VerifierSettings(LinkSettings, SharedKvSettings, ModelSettings):
    """``sdcp-mono verifier``: the target model."""

    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Ranks the target is divided among: processes of this host, a GPU each, or CPUs."
    )


class DrafterSettings(LinkSettings, DraftSettings, SharedKvSettings, ModelSettings):
    """``sdcp-mono drafter``: draft models."""


class CacheSettings(LinkSettings, StoreSettings, TierSettings):
    """``sdcp-mono cache serve``: objects, KV and commit logs."""

    http_host: str = Field("127.0.0.1", description="Address of the same resources over HTTP/2, for other engines.")
    http_port: int = Field(0, ge=0, le=65535, description="Port of them; 0: gRPC only.")
    http_tls_name: str = Field("", description="File name of their pair without .pem; empty: that of gRPC.")


def _names(value: object) -> object:
    return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value


def _bases(value: tuple[str, ...], normalise: Callable[[str], str] = normalise_base) -> tuple[str, ...]:
    try:
        return tuple(map(normalise, value))
    except Malformed as malformed:
        raise ValueError(malformed.detail) from None
