from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_ACCEPTED: _ClassVar[Origin]
    ORIGIN_CORRECTION: _ClassVar[Origin]
    ORIGIN_BONUS: _ClassVar[Origin]
    ORIGIN_SELF: _ClassVar[Origin]

class GotStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GOT_STATUS_UNSPECIFIED: _ClassVar[GotStatus]
    GOT_STATUS_OK: _ClassVar[GotStatus]
    GOT_STATUS_MISSING: _ClassVar[GotStatus]
    GOT_STATUS_FAILED: _ClassVar[GotStatus]

class AppendOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPEND_OUTCOME_UNSPECIFIED: _ClassVar[AppendOutcome]
    APPEND_OUTCOME_OK: _ClassVar[AppendOutcome]
    APPEND_OUTCOME_FENCED: _ClassVar[AppendOutcome]
    APPEND_OUTCOME_UNKNOWN: _ClassVar[AppendOutcome]
ORIGIN_UNSPECIFIED: Origin
ORIGIN_ACCEPTED: Origin
ORIGIN_CORRECTION: Origin
ORIGIN_BONUS: Origin
ORIGIN_SELF: Origin
GOT_STATUS_UNSPECIFIED: GotStatus
GOT_STATUS_OK: GotStatus
GOT_STATUS_MISSING: GotStatus
GOT_STATUS_FAILED: GotStatus
APPEND_OUTCOME_UNSPECIFIED: AppendOutcome
APPEND_OUTCOME_OK: AppendOutcome
APPEND_OUTCOME_FENCED: AppendOutcome
APPEND_OUTCOME_UNKNOWN: AppendOutcome

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, items: _Optional[_Iterable[int]] = ...) -> None: ...

class Hashes(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, items: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature_milli", "top_k", "top_p_milli", "seed")
    TEMPERATURE_MILLI_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_MILLI_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature_milli: int
    top_k: int
    top_p_milli: int
    seed: int
    def __init__(self, temperature_milli: _Optional[int] = ..., top_k: _Optional[int] = ..., top_p_milli: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Contract(_message.Message):
    __slots__ = ("target", "tokenizer", "drafters", "rule", "sampling", "m_max", "max_new", "stop", "low_rounds", "low_ratio", "fallback", "self_load", "self_max", "scope")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    M_MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOW_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LOW_RATIO_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    SELF_LOAD_FIELD_NUMBER: _ClassVar[int]
    SELF_MAX_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    target: bytes
    tokenizer: bytes
    drafters: Hashes
    rule: int
    sampling: Sampling
    m_max: int
    max_new: int
    stop: _containers.RepeatedScalarFieldContainer[int]
    low_rounds: int
    low_ratio: int
    fallback: _containers.RepeatedScalarFieldContainer[int]
    self_load: int
    self_max: int
    scope: bytes
    def __init__(self, target: _Optional[bytes] = ..., tokenizer: _Optional[bytes] = ..., drafters: _Optional[_Union[Hashes, _Mapping]] = ..., rule: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., m_max: _Optional[int] = ..., max_new: _Optional[int] = ..., stop: _Optional[_Iterable[int]] = ..., low_rounds: _Optional[int] = ..., low_ratio: _Optional[int] = ..., fallback: _Optional[_Iterable[int]] = ..., self_load: _Optional[int] = ..., self_max: _Optional[int] = ..., scope: _Optional[bytes] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("round", "committed", "digest", "committed_tokens", "target_kv")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_KV_FIELD_NUMBER: _ClassVar[int]
    round: int
    committed: int
    digest: bytes
    committed_tokens: str
    target_kv: str
    def __init__(self, round: _Optional[int] = ..., committed: _Optional[int] = ..., digest: _Optional[bytes] = ..., committed_tokens: _Optional[str] = ..., target_kv: _Optional[str] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("session", "epoch", "contract", "prompt_tokens", "prompt_ref", "prompt_kv", "commit_log", "resume")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_REF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_KV_FIELD_NUMBER: _ClassVar[int]
    COMMIT_LOG_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    contract: Contract
    prompt_tokens: Tokens
    prompt_ref: str
    prompt_kv: str
    commit_log: str
    resume: Resume
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., contract: _Optional[_Union[Contract, _Mapping]] = ..., prompt_tokens: _Optional[_Union[Tokens, _Mapping]] = ..., prompt_ref: _Optional[str] = ..., prompt_kv: _Optional[str] = ..., commit_log: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("session", "epoch", "round", "committed", "digest", "state")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    round: int
    committed: int
    digest: bytes
    state: int
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., committed: _Optional[int] = ..., digest: _Optional[bytes] = ..., state: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("session", "epoch", "contract", "verifier", "drafter", "prompt_tokens", "prompt_ref", "round", "sampling", "committed", "digest", "committed_tokens", "m_init")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_REF_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    M_INIT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    contract: Contract
    verifier: str
    drafter: str
    prompt_tokens: Tokens
    prompt_ref: str
    round: int
    sampling: Sampling
    committed: int
    digest: bytes
    committed_tokens: str
    m_init: int
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., contract: _Optional[_Union[Contract, _Mapping]] = ..., verifier: _Optional[str] = ..., drafter: _Optional[str] = ..., prompt_tokens: _Optional[_Union[Tokens, _Mapping]] = ..., prompt_ref: _Optional[str] = ..., round: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., committed: _Optional[int] = ..., digest: _Optional[bytes] = ..., committed_tokens: _Optional[str] = ..., m_init: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("instance", "role", "load", "queue", "accept_milli", "cache_mbps", "ttl_ms", "models", "tokenizer", "base")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_MILLI_FIELD_NUMBER: _ClassVar[int]
    CACHE_MBPS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    role: int
    load: int
    queue: int
    accept_milli: int
    cache_mbps: int
    ttl_ms: int
    models: Hashes
    tokenizer: bytes
    base: str
    def __init__(self, instance: _Optional[str] = ..., role: _Optional[int] = ..., load: _Optional[int] = ..., queue: _Optional[int] = ..., accept_milli: _Optional[int] = ..., cache_mbps: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., models: _Optional[_Union[Hashes, _Mapping]] = ..., tokenizer: _Optional[bytes] = ..., base: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("session", "epoch", "round", "drafter", "base", "base_digest", "tokens", "q_rows", "draft_kv", "status")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    Q_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KV_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    round: int
    drafter: str
    base: int
    base_digest: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    q_rows: str
    draft_kv: str
    status: Status
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., drafter: _Optional[str] = ..., base: _Optional[int] = ..., base_digest: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., q_rows: _Optional[str] = ..., draft_kv: _Optional[str] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("session", "epoch", "round", "drafter")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    round: int
    drafter: str
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., drafter: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session", "epoch", "round", "accepted", "emitted", "committed", "digest", "action", "m_cap", "low", "load")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    M_CAP_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    round: int
    accepted: int
    emitted: _containers.RepeatedScalarFieldContainer[int]
    committed: int
    digest: bytes
    action: int
    m_cap: int
    low: int
    load: int
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., accepted: _Optional[int] = ..., emitted: _Optional[_Iterable[int]] = ..., committed: _Optional[int] = ..., digest: _Optional[bytes] = ..., action: _Optional[int] = ..., m_cap: _Optional[int] = ..., low: _Optional[int] = ..., load: _Optional[int] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("session", "epoch", "from_", "tokens", "final", "finish")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM__FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    from_: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    final: bool
    finish: int
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., from_: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., final: bool = ..., finish: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("session", "epoch", "kind", "committed", "digest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    kind: int
    committed: int
    digest: bytes
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., kind: _Optional[int] = ..., committed: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("session", "from_round", "sampling")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    from_round: int
    sampling: Sampling
    def __init__(self, session: _Optional[bytes] = ..., from_round: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class CommitRecord(_message.Message):
    __slots__ = ("epoch", "round", "emitted", "committed", "digest", "final")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    round: int
    emitted: _containers.RepeatedScalarFieldContainer[int]
    committed: int
    digest: bytes
    final: int
    def __init__(self, epoch: _Optional[int] = ..., round: _Optional[int] = ..., emitted: _Optional[_Iterable[int]] = ..., committed: _Optional[int] = ..., digest: _Optional[bytes] = ..., final: _Optional[int] = ...) -> None: ...

class FenceRecord(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "target", "tokenizer", "vocab_size", "context")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: bytes
    tokenizer: bytes
    vocab_size: int
    context: int
    def __init__(self, name: _Optional[str] = ..., target: _Optional[bytes] = ..., tokenizer: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., context: _Optional[int] = ...) -> None: ...

class OpenOptions(_message.Message):
    __slots__ = ("lead", "undrafted", "transient", "top_logprobs")
    LEAD_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_FIELD_NUMBER: _ClassVar[int]
    TRANSIENT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    lead: bool
    undrafted: bool
    transient: bool
    top_logprobs: int
    def __init__(self, lead: bool = ..., undrafted: bool = ..., transient: bool = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("opening", "options")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    opening: SessionOpen
    options: OpenOptions
    def __init__(self, opening: _Optional[_Union[SessionOpen, _Mapping]] = ..., options: _Optional[_Union[OpenOptions, _Mapping]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("session", "from_", "wait_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FROM__FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    from_: int
    wait_ms: int
    def __init__(self, session: _Optional[bytes] = ..., from_: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("session", "from_")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FROM__FIELD_NUMBER: _ClassVar[int]
    session: bytes
    from_: int
    def __init__(self, session: _Optional[bytes] = ..., from_: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenInfo(_message.Message):
    __slots__ = ("origin", "p", "q", "logprob", "top")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    P_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    origin: Origin
    p: float
    q: float
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, origin: _Optional[_Union[Origin, str]] = ..., p: _Optional[float] = ..., q: _Optional[float] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class RoundInfo(_message.Message):
    __slots__ = ("round", "epoch", "base", "proposed", "accepted", "emitted", "tokens", "action", "m_cap", "drafter", "wait_seconds", "verify_seconds", "commit_seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    M_CAP_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    epoch: int
    base: int
    proposed: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    emitted: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenInfo]
    action: int
    m_cap: int
    drafter: str
    wait_seconds: float
    verify_seconds: float
    commit_seconds: float
    def __init__(self, round: _Optional[int] = ..., epoch: _Optional[int] = ..., base: _Optional[int] = ..., proposed: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., emitted: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[_Union[TokenInfo, _Mapping]]] = ..., action: _Optional[int] = ..., m_cap: _Optional[int] = ..., drafter: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., commit_seconds: _Optional[float] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("from_", "epoch", "tokens", "rounds", "final", "finish", "error")
    FROM__FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    from_: int
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundInfo]
    final: bool
    finish: int
    error: str
    def __init__(self, from_: _Optional[int] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., rounds: _Optional[_Iterable[_Union[RoundInfo, _Mapping]]] = ..., final: bool = ..., finish: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("uri", "size", "ttl_ms")
    URI_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    uri: str
    size: int
    ttl_ms: int
    def __init__(self, uri: _Optional[str] = ..., size: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PutPart(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("uri", "scope")
    URI_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    uri: str
    scope: bytes
    def __init__(self, uri: _Optional[str] = ..., scope: _Optional[bytes] = ...) -> None: ...

class GetRangeRequest(_message.Message):
    __slots__ = ("uri", "scope", "start", "stop")
    URI_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    uri: str
    scope: bytes
    start: int
    stop: int
    def __init__(self, uri: _Optional[str] = ..., scope: _Optional[bytes] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class GetManyRequest(_message.Message):
    __slots__ = ("uris", "scope")
    URIS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    uris: _containers.RepeatedScalarFieldContainer[str]
    scope: bytes
    def __init__(self, uris: _Optional[_Iterable[str]] = ..., scope: _Optional[bytes] = ...) -> None: ...

class Got(_message.Message):
    __slots__ = ("status", "size")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    status: GotStatus
    size: int
    def __init__(self, status: _Optional[_Union[GotStatus, str]] = ..., size: _Optional[int] = ...) -> None: ...

class GetPart(_message.Message):
    __slots__ = ("got", "data")
    GOT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    got: Got
    data: bytes
    def __init__(self, got: _Optional[_Union[Got, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ObjectMeta(_message.Message):
    __slots__ = ("uri", "size", "etag")
    URI_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    uri: str
    size: int
    etag: str
    def __init__(self, uri: _Optional[str] = ..., size: _Optional[int] = ..., etag: _Optional[str] = ...) -> None: ...

class HeadReply(_message.Message):
    __slots__ = ("meta",)
    META_FIELD_NUMBER: _ClassVar[int]
    meta: ObjectMeta
    def __init__(self, meta: _Optional[_Union[ObjectMeta, _Mapping]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("uri", "ttl_ms", "holder")
    URI_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    uri: str
    ttl_ms: int
    holder: str
    def __init__(self, uri: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., holder: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("uri", "lease_id", "ttl_ms")
    URI_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    uri: str
    lease_id: str
    ttl_ms: int
    def __init__(self, uri: _Optional[str] = ..., lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class UnleaseRequest(_message.Message):
    __slots__ = ("uri", "lease_id")
    URI_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    uri: str
    lease_id: str
    def __init__(self, uri: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class LogName(_message.Message):
    __slots__ = ("log",)
    LOG_FIELD_NUMBER: _ClassVar[int]
    log: str
    def __init__(self, log: _Optional[str] = ...) -> None: ...

class LogAppend(_message.Message):
    __slots__ = ("log", "sequence", "record")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    log: str
    sequence: int
    record: CommitRecord
    def __init__(self, log: _Optional[str] = ..., sequence: _Optional[int] = ..., record: _Optional[_Union[CommitRecord, _Mapping]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("appends",)
    APPENDS_FIELD_NUMBER: _ClassVar[int]
    appends: _containers.RepeatedCompositeFieldContainer[LogAppend]
    def __init__(self, appends: _Optional[_Iterable[_Union[LogAppend, _Mapping]]] = ...) -> None: ...

class AppendReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[AppendOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[AppendOutcome, str]]] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("log", "epoch")
    LOG_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    log: str
    epoch: int
    def __init__(self, log: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class FenceReply(_message.Message):
    __slots__ = ("fenced",)
    FENCED_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    def __init__(self, fenced: bool = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("log", "from_")
    LOG_FIELD_NUMBER: _ClassVar[int]
    FROM__FIELD_NUMBER: _ClassVar[int]
    log: str
    from_: int
    def __init__(self, log: _Optional[str] = ..., from_: _Optional[int] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("commit", "fence")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    commit: CommitRecord
    fence: FenceRecord
    def __init__(self, commit: _Optional[_Union[CommitRecord, _Mapping]] = ..., fence: _Optional[_Union[FenceRecord, _Mapping]] = ...) -> None: ...

class LogPage(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ...) -> None: ...

class NamesPage(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("kind", "detail", "retry_after_ms", "state")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    detail: str
    retry_after_ms: int
    state: SessionState
    def __init__(self, kind: _Optional[str] = ..., detail: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...
