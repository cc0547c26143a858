"""Clients of the three roles: the same ports, over HTTP (5.1).

The caller's identity is its certificate, so ``caller`` arguments say nothing here. A response that is no valid message
is ``Unavailable``: nothing is known, and the same request may be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar
from urllib.parse import quote

from msgspec import UNSET, Struct

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import (
    Assignment,
    Decline,
    Event,
    Hash32,
    Message,
    Output,
    Policy,
    Proposal,
    SessionId,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)
from sdcp_mono.core.names import format_session, normalise_base
from sdcp_mono.core.ports import Chunk, ModelCard, OpenOptions
from sdcp_mono.core.problems import BadContract, Malformed, Refusal, TooLarge, Unavailable
from sdcp_mono.http_gateway.peer import CALL_SECONDS, Peer
from sdcp_mono.http_gateway.tls import PemFiles

M = TypeVar("M", bound=Message)

OPEN_SECONDS: Final = 60.0  # the prompt is prefilled, or its KV loaded
ROUND_SECONDS: Final = 60.0  # a round waits in the verifier's batch queue, then takes a pass
POLL_SECONDS: Final = 20.0  # the longest wait that is asked for (AMB-166)


class Described(Struct, frozen=True):
    """What a verifier's base URI tells; anything else there is ignored."""

    target: Hash32
    tokenizer: Hash32
    vocab_size: int
    context: int


class VerifierClient:
    """``VerifierPort`` over HTTP. ``OpenOptions`` are our own verifier's and don't cross the wire."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def card(self, name: str = "remote") -> ModelCard:
        """What the verifier serves (our extension: GET of its base); raises ``Malformed`` where that isn't offered."""
        answer = await self._peer.call("GET", "")
        told = _value(answer.body, Described)
        return ModelCard(name, told.target, told.tokenizer, told.vocab_size, told.context)

    async def open(self, opening: SessionOpen, options: OpenOptions | None = None) -> SessionState:
        return await self._ask("POST", "sessions", opening, SessionState, OPEN_SECONDS)

    async def assign(self, assignment: Assignment) -> SessionState:
        path = f"sessions/{format_session(assignment.session)}/drafter"
        return await self._ask("PUT", path, assignment, SessionState, ROUND_SECONDS)  # it may wait for a round

    async def propose(self, proposal: Proposal, caller: str) -> Verdict:
        return await self._ask("POST", "proposals", proposal, Verdict, ROUND_SECONDS)

    async def decline(self, decline: Decline, caller: str) -> SessionState:
        path = f"sessions/{format_session(decline.session)}/decline"
        return await self._ask("POST", path, decline, SessionState, ROUND_SECONDS)

    async def output(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Output:
        seconds = POLL_SECONDS if wait_ms is None else wait_ms / 1000
        headers = {} if wait_ms is None else {"prefer": f"wait={round(seconds)}"}
        path = f"sessions/{format_session(session)}/output?from={from_}"
        answer = await self._peer.call("GET", path, headers=headers, seconds=seconds + CALL_SECONDS)
        return _message(answer.body, Output)

    async def chunk(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Chunk:
        """Output without its rounds, which don't cross the wire."""
        output = await self.output(session, from_, wait_ms)
        finish = None if output.finish is UNSET else output.finish
        return Chunk(output.from_, output.epoch, output.tokens, (), output.final, finish)

    async def policy(self, policy: Policy) -> SessionState:
        return await self._ask("POST", f"sessions/{format_session(policy.session)}/policy", policy, SessionState)

    async def close(self, session: SessionId) -> None:
        await self._peer.call("DELETE", f"sessions/{format_session(session)}")

    async def _ask(self, method: str, path: str, message: Message, type: type[M], seconds: float = CALL_SECONDS) -> M:
        answer = await self._peer.call(method, path, cbor.encode(message), seconds=seconds)
        return _message(answer.body, type)


class DrafterClient:
    """``DrafterPort`` over HTTP."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def assign(self, assignment: Assignment) -> None:
        await self._peer.call("POST", "assignments", cbor.encode(assignment))


class RouterClient:
    """``RouterPort`` over HTTP."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def status(self, status: Status) -> None:
        path = f"instances/{quote(status.instance, safe='')}/status"
        await self._peer.call("PUT", path, cbor.encode(status))

    async def event(self, event: Event) -> None:
        await self._peer.call("POST", "events", cbor.encode(event))


C = TypeVar("C")


class _Clients(Mapping[str, C]):
    """Peers by base URI, a client each, made when it is first needed; no other base URI is ever called."""

    _client: Callable[[Peer], C]

    def __init__(self, bases: Mapping[str, str | None], files: PemFiles) -> None:
        """``bases`` maps each base URI to the address to connect to, None where it says that itself."""
        self._addresses = {normalise_base(base): address for base, address in bases.items()}
        self._files = files
        self._made: dict[str, tuple[Peer, C]] = {}

    def __getitem__(self, base: str) -> C:
        try:
            base = normalise_base(base)
        except Malformed:
            raise KeyError(base) from None
        if base not in self._made:
            peer = Peer(base, self._files, address=self._addresses[base])
            self._made[base] = peer, self._client(peer)
        return self._made[base][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    async def close(self) -> None:
        for peer, _ in self._made.values():
            await peer.close()


class Verifiers(_Clients[VerifierClient]):
    """The verifiers that a drafter or a router works with (AMB-045)."""

    _client = VerifierClient


class Routers(_Clients[RouterClient]):
    """The routers that a verifier or a drafter reports to."""

    _client = RouterClient


class Drafters(_Clients[DrafterClient]):
    """The drafters that a router may assign."""

    _client = DrafterClient


def _message(body: bytes, type: type[M]) -> M:
    try:
        return cbor.decode(body, type)
    except (Malformed, BadContract, TooLarge) as refusal:
        raise Unavailable(f"the response can't be used: {refusal.detail}") from refusal


T = TypeVar("T")


def _value(body: bytes, type: type[T]) -> T:
    try:
        return cbor.decode_value(body, type)
    except Refusal as refusal:
        raise Unavailable(f"the response can't be used: {refusal.detail}") from refusal
