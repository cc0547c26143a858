"""What the roles need from each other and from the machine: one protocol each.

In one process a port is the object itself; split, it is a client with the same methods (``compose.py`` decides).
Models are called on the one thread that owns them, hence plain methods; everything else is awaited.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from sdcp_mono.core.messages import (
    Assignment,
    CommitRecord,
    Decline,
    Event,
    FenceRecord,
    Hash32,
    Output,
    Policy,
    Proposal,
    Rule,
    Sampling,
    SessionId,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)


class Uniforms(Struct, frozen=True):
    """The random values of one round under rule 2, each in [0, 1) (6.4).

    ``accept[i]`` decides proposed position i+1; ``extra[i]`` draws the additional token if it falls at position i+1.
    Lengths M and M+1.
    """

    accept: tuple[float, ...]
    extra: tuple[float, ...]


class TokenLogprob(Struct, frozen=True):
    """Natural logarithm of the model's own probability (before temperature) of a token."""

    token: int
    logprob: float


class Logprobs(Struct, frozen=True):
    """What one scored position can report: the proposed token, the additional token, and the best ``top``."""

    proposed: float
    extra: float
    top: tuple[TokenLogprob, ...]


class Scored(Struct, frozen=True):
    """One scored position i of M+1 (6.3 step 6), reduced to what acceptance needs.

    ``argmax`` is the most probable token, the smallest id on ties. Under rule 2 also ``p`` = p[i](x[i]) and
    ``q`` = q[i](x[i]) (0.0 at position M+1), and ``extra``, the additional token should it fall here: drawn from the
    residual max(0, p[i] - q[i]), at position M+1 from p[M+1]. Under rule 1 ``extra`` equals ``argmax``.
    """

    argmax: int
    extra: int
    p: float = 0.0
    q: float = 0.0
    logprobs: Logprobs | None = None


class ScoreRequest(Struct, frozen=True):
    """Score ``tokens`` after the first ``length`` tokens of ``prefix`` (prompt, then committed output).

    ``prefix`` is append-only and shared, never copied. The runner keeps whatever KV agrees with it and feeds the rest
    in chunks, so opening, rolling back and catching up are all this one request. ``rows`` is the drafter's
    distributions as ``RowSource`` returned them. ``top_logprobs`` < 0 means that none are wanted.
    """

    session: SessionId
    prefix: Sequence[int]
    length: int
    tokens: tuple[int, ...]
    rule: Rule
    sampling: Sampling
    uniforms: Uniforms | None = None
    rows: Any = None
    top_logprobs: int = -1


class ModelLost(RuntimeError):
    """The model can't be used any more in this process: one of its ranks has died, say."""


class ScoreFailure(Struct, frozen=True):
    """This request could not be scored; its neighbours in the batch are unaffected (AMB-145, AMB-146)."""

    reason: str
    permanent: bool = False


class ModelCard(Struct, frozen=True):
    """What a model is: identity digests (design, section 4), vocabulary width V and context length in tokens."""

    name: str
    target: Hash32
    tokenizer: Hash32
    vocab_size: int
    context: int


class PassCost(Struct, frozen=True):
    """What one model pass did, for choosing M, for metrics and for traces. Seconds."""

    rows: int
    requests: int
    seconds: float


class TargetModel(Protocol):
    """The target model with its KV cache; every method runs on the thread that owns it."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def block_tokens(self) -> int:
        """Tokens of one KV block: room is given in whole blocks."""

    @property
    def longest(self) -> int:
        """The longest session in tokens that there could ever be room for."""

    @property
    def free_tokens(self) -> int:
        """Tokens that could be admitted now, as a hint; may be read from any thread."""

    def admit(self, session: SessionId, tokens: int, *, scope: bytes | None = None) -> bool:
        """Reserve room for the first ``tokens`` tokens of a session, or let it grow to that; False if there is none.

        Sessions share the KV of equal prefixes within one ``scope`` only. Raises ``ValueError`` if it could never fit.
        """

    def step(self, requests: Sequence[ScoreRequest]) -> Sequence[Sequence[Scored] | ScoreFailure | None]:
        """One forward pass for many sessions under the token budget.

        The answer for a request is its M+1 scored positions, a failure, or None while its prefix is still being fed
        (call again with the same request). A position past ``longest`` refuses its token.
        """

    def release(self, session: SessionId) -> None:
        """Take a session's room; its blocks stay reusable by prefix until evicted. Unknown ones are ignored."""


class DraftRequest(Struct, frozen=True):
    """Propose up to ``m`` tokens after the first ``length`` tokens of ``prefix``.

    ``seed`` keys the drafter's own draws, which are never the verifier's (6.4). ``scope`` bounds the sharing of KV.
    """

    session: SessionId
    prefix: Sequence[int]
    length: int
    m: int
    rule: Rule
    sampling: Sampling
    round: int
    scope: bytes | None = None


class Draft(Struct, frozen=True):
    """Proposed tokens, at most m, and under rule 2 the rows they were drawn from (a ``QRows``, opaque here).

    No tokens: there is nothing worth proposing. ``seconds_per_token`` is the measured cost of one drafting step, the
    whole batch's share included and prefill left out.
    """

    tokens: tuple[int, ...]
    rows: Any = None
    seconds_per_token: float = 0.0


class DraftModel(Protocol):
    """A drafter (design, section 2). Sees committed tokens only; commits nothing. Runs on the thread that owns it."""

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> Hash32:
        """SHA-256 of the draft model's weights, as the contract's ``drafters`` lists it."""

    @property
    def vocab_size(self) -> int: ...

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        """Drafts for many sessions at once; None while a prefix is still being fed (call again with the same request).

        The KV cache follows ``prefix`` by itself: what no longer agrees is rolled back, what is missing is fed, a
        part per call, so that one long prompt doesn't hold the other sessions up.
        """

    def release(self, session: SessionId) -> None: ...


class RowsProblem(Exception):
    """Rows that can't be used: ``unavailable`` is sdcp-q-unavailable, otherwise sdcp-bad-proposal (AMB-133 to 137)."""

    def __init__(self, detail: str, *, unavailable: bool) -> None:
        super().__init__(detail)
        self.detail = detail
        self.unavailable = unavailable


class RowSource(Protocol):
    """Where q_rows come from (6.3 step 5)."""

    async def fetch(self, uri: str, tokens: tuple[int, ...], scope: bytes | None) -> Any:
        """The rows for ``tokens``, fetched once and checked whole; raises ``RowsProblem``."""

    async def publish(self, rows: Any, scope: bytes | None) -> str:
        """Put rows where the verifier can reach them, under a lease; answers their URI."""

    async def release(self, uri: str) -> None:
        """Give the lease up (after the verdict)."""


class VerifierPort(Protocol):
    """Table 1, verifier rows, and two extensions (``decline``, ``close``). ``caller`` is an authenticated base URI."""

    async def open(self, opening: SessionOpen, options: OpenOptions | None = None) -> SessionState: ...
    async def assign(self, assignment: Assignment) -> SessionState: ...
    async def propose(self, proposal: Proposal, caller: str) -> Verdict: ...
    async def decline(self, decline: Decline, caller: str) -> SessionState: ...
    async def output(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Output: ...
    async def chunk(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Chunk:
        """``output`` for our own front end: the same tokens with the rounds that committed them."""

    async def policy(self, policy: Policy) -> SessionState: ...
    async def close(self, session: SessionId) -> None: ...


class DrafterPort(Protocol):
    """Table 1, drafter row."""

    async def assign(self, assignment: Assignment) -> None: ...


class Observer(Protocol):
    """Who wants to know what happens: metrics and traces. Must be quick and never raise."""

    def round(self, session: SessionId, info: RoundInfo) -> None: ...
    def rejected(self, problem: str) -> None: ...
    def passed(self, model: str, cost: PassCost) -> None: ...
    def sessions(self, active: int, waiting: int) -> None: ...


class RouterPort(Protocol):
    """Table 1, router rows."""

    async def status(self, status: Status) -> None: ...
    async def event(self, event: Event) -> None: ...


class OpenOptions(Struct, frozen=True):
    """What our own front end may ask of our own verifier beyond the draft; the defaults are the draft's behaviour.

    ``lead``: decode the first token before any drafter is needed (prefill has computed its distribution anyway).
    ``undrafted``: no drafter will come, decode token by token at once (AMB-124).
    ``transient``: forget it when it is closed; its one reader has everything, nobody asks again (AMB-070).
    ``top_logprobs``: report log-probabilities with this many alternatives; -1 for none.
    """

    lead: bool = False
    undrafted: bool = False
    transient: bool = False
    top_logprobs: int = -1


Origin = Literal["accepted", "correction", "bonus", "self"]


class TokenInfo(Struct, frozen=True):
    """Where an output token came from, for people who look."""

    origin: Origin
    p: float
    q: float
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class RoundInfo(Struct, frozen=True):
    """One committed round as a reader sees it. Times in seconds; ``proposed`` is empty for a self-decoded round.

    ``drafter`` is the name that the proposal's status gives itself.
    """

    round: int
    epoch: int
    base: int
    proposed: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    tokens: tuple[TokenInfo, ...]
    action: int
    m_cap: int
    drafter: str = ""
    wait_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0


class Chunk(Struct, frozen=True):
    """Committed output from index ``from_`` on, with the rounds that committed it. ``error`` goes with finish 5."""

    from_: int
    epoch: int
    tokens: tuple[int, ...]
    rounds: tuple[RoundInfo, ...]
    final: bool
    finish: int | None = None
    error: str = ""


AppendOutcome = Literal["ok", "fenced", "unknown"]


class LogAppend(Struct, frozen=True):
    """Append ``record`` to ``log`` if exactly ``sequence`` records precede it and no fence is above its epoch (6.8)."""

    log: str
    sequence: int
    record: CommitRecord


class CommitLog(Protocol):
    """Durable logs, one per session (6.8). ``unknown`` means that the answer was lost: read the log again (AMB-150)."""

    async def create(self, log: str) -> None:
        """Make an empty log; raises ``Conflict`` if it exists and is not empty."""

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        """Many logs in one durable transaction; each append succeeds or fails on its own."""

    async def fence(self, log: str, epoch: int) -> bool:
        """Append a fence; False if a fence with this or a higher epoch is there already (AMB-154)."""

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]: ...

    async def drop(self, log: str) -> None: ...


class Lease(Struct, frozen=True):
    """A promise that an object stays until ``expires_ms`` on the store's monotonic clock."""

    lease_id: str
    expires_ms: int


class ObjectMeta(Struct, frozen=True):
    uri: str
    size: int
    etag: str


@runtime_checkable
class ByteSource(Protocol):
    """A value that becomes bytes only if it has to leave the process (q rows in one process stay tensors)."""

    def to_bytes(self) -> bytes: ...


class ObjectStore(Protocol):
    """Immutable objects named by URI ``mlc://authority/scope/kind/name``, under leases (design, section 5)."""

    async def put(self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None) -> ObjectMeta:
        """Store once; raises ``Conflict`` if the URI is taken, ``Unavailable`` if there is no room."""

    async def get(self, uri: str, scope: bytes | None) -> bytes | ByteSource | None:
        """The value, or None where it is missing, expired or another scope's: all three look alike."""

    async def get_range(self, uri: str, scope: bytes | None, start: int, stop: int) -> bytes | None:
        """Bytes start..stop of the value (fewer at its end); None as ``get``."""

    async def get_many(self, uris: Sequence[str], scope: bytes | None) -> Sequence[Got]:
        """One answer for each, in order: a failure of one is no failure of the others."""

    async def head(self, uri: str, scope: bytes | None) -> ObjectMeta | None:
        """What is there without reading it; None as ``get``."""

    async def lease(self, uri: str, ttl_ms: int, holder: str = "") -> Lease | None:
        """``holder`` names who asked, for whoever looks into why an object stays."""

    async def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None: ...
    async def unlease(self, uri: str, lease_id: str) -> None: ...
    async def delete(self, uri: str) -> None: ...


class ServedObjects(ObjectStore, Protocol):
    """A store that others read from: what is on its way to one of them keeps its room."""

    def reading(self, uri: str, scope: bytes | None) -> AbstractAsyncContextManager[bytes | None]:
        """The bytes, held until the block is left; None as ``get``, and where they ended while they were copied."""


class Got(Struct, frozen=True):
    """One answer of a batch. ``missing`` also stands for expired and for another scope's."""

    status: Literal["ok", "missing", "failed"]
    value: bytes | ByteSource | None = None


class GenerateRequest(Struct, frozen=True):
    """What a front end asks for: token ids in, token ids out. Text never reaches the roles.

    ``top_logprobs`` -1: none. ``session`` names the session where the caller needs to (seeded requests derive it);
    two live requests with the same id are one session with two readers. ``resume`` names the log of an earlier attempt
    at this very request (``Generation.log``): it goes on where that log ends. For traces only: ``operation``, as
    ``gen_ai.operation.name`` has it, and ``trace``, the client's ``traceparent``.
    """

    prompt: tuple[int, ...]
    max_new: int
    stop: tuple[int, ...]
    rule: Rule
    sampling: Sampling
    speculative: bool = True
    top_logprobs: int = -1
    session: SessionId | None = None
    resume: str = ""
    operation: str = "text_completion"
    trace: str = ""


class Generation(Protocol):
    """One admitted request. ``close`` may be called at any time and any number of times; it frees everything."""

    @property
    def session(self) -> SessionId: ...
    @property
    def log(self) -> str:
        """The last part of its commit log's name: with the session id enough to go on elsewhere."""

    def chunks(self, from_: int = 0) -> AsyncIterator[Chunk]:
        """Committed output from index ``from_`` on; the last chunk is final."""

    async def close(self) -> None: ...


class Serving(Protocol):
    """What the front end needs: the router's admission and the verifier's output."""

    @property
    def card(self) -> ModelCard: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Admit a request, waiting in a bounded queue; raises a ``Refusal`` (429 full, 422 can't fit)."""

    def stats(self) -> dict[str, Any]:
        """Roles, load, drafters and queue as plain data, for ``/health`` and for people."""
