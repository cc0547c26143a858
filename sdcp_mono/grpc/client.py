"""Clients of the three roles: each is the port itself, over gRPC.

The caller's identity is its certificate, so ``caller`` arguments say nothing here. No call is repeated: every one may
be, and the roles know when.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeVar

from msgspec import Struct

from sdcp_mono.core.messages import (
    Assignment,
    Decline,
    Event,
    Output,
    Policy,
    Proposal,
    SessionId,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)
from sdcp_mono.core.ports import Chunk, ModelCard, OpenOptions
from sdcp_mono.core.problems import Refusal, Unavailable
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.grpc.convert import from_pb, to_pb
from sdcp_mono.grpc.pb import sdcp_pb2 as pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc

S = TypeVar("S", bound=Struct)

CALL_SECONDS: Final = 10.0  # of a call that computes nothing, and on top of a wait
OPEN_SECONDS: Final = 60.0  # the prompt is prefilled, or its KV loaded
ROUND_SECONDS: Final = 60.0  # a round waits in the verifier's batch queue, then takes a pass
POLL_SECONDS: Final = 20.0  # the verifier's longest wait (AMB-166)
STREAM_SECONDS: Final = 60.0 + CALL_SECONDS  # the verifier ends a stream of output by itself before


class VerifierClient:
    """``VerifierPort``, with ``card`` and ``follow`` besides."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def card(self) -> ModelCard:
        """What the verifier serves."""
        return await self._ask("Card", pb.Nothing(), ModelCard)

    async def open(self, opening: SessionOpen, options: OpenOptions | None = None) -> SessionState:
        request = pb.OpenRequest(opening=to_pb(opening), options=None if options is None else to_pb(options))
        return await self._ask("Open", request, SessionState, OPEN_SECONDS)

    async def assign(self, assignment: Assignment) -> SessionState:
        return await self._ask("Assign", to_pb(assignment), SessionState, ROUND_SECONDS)  # it may wait for a round

    async def propose(self, proposal: Proposal, caller: str) -> Verdict:
        return await self._ask("Propose", to_pb(proposal), Verdict, ROUND_SECONDS)

    async def decline(self, decline: Decline, caller: str) -> SessionState:
        return await self._ask("Decline", to_pb(decline), SessionState, ROUND_SECONDS)

    async def output(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Output:
        request = pb.ReadRequest(session=session, from_=from_, wait_ms=wait_ms)
        return await self._ask("Output", request, Output, _poll_seconds(wait_ms))

    async def chunk(self, session: SessionId, from_: int, wait_ms: int | None = None) -> Chunk:
        """At most 8,192 tokens, to the end of a round: the rest is asked for."""
        request = pb.ReadRequest(session=session, from_=from_, wait_ms=wait_ms)
        return await self._ask("Chunk", request, Chunk, _poll_seconds(wait_ms))

    async def follow(self, session: SessionId, from_: int = 0) -> AsyncIterator[Chunk]:
        """Every chunk from ``from_`` on, as it is committed, to the final one; close it (``aclosing``) to leave before.

        Raises as ``chunk`` does; whoever follows goes on, here or elsewhere, after the tokens it has.
        """
        while True:
            request = pb.FollowRequest(session=session, from_=from_)
            stream = self._channel.stream(rpc.VerifierStub, "Follow", request, STREAM_SECONDS)
            async with aclosing(stream) as messages:  # type: ignore[type-var]  # an async generator
                async for message in messages:
                    chunk = read_answer(Chunk, message)
                    yield chunk
                    if chunk.final:
                        return
                    from_ += len(chunk.tokens)

    async def policy(self, policy: Policy) -> SessionState:
        return await self._ask("Policy", to_pb(policy), SessionState)

    async def close(self, session: SessionId) -> None:
        await self._channel.call(rpc.VerifierStub, "Close", pb.CloseRequest(session=session), CALL_SECONDS)

    async def _ask(self, method: str, request: Any, type: type[S], seconds: float = CALL_SECONDS) -> S:
        return read_answer(type, await self._channel.call(rpc.VerifierStub, method, request, seconds))


class DrafterClient:
    """``DrafterPort``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def assign(self, assignment: Assignment) -> None:
        await self._channel.call(rpc.DrafterStub, "Assign", to_pb(assignment), CALL_SECONDS)


class RouterClient:
    """``RouterPort``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def status(self, status: Status) -> None:
        await self._channel.call(rpc.RouterStub, "Status", to_pb(status), CALL_SECONDS)

    async def event(self, event: Event) -> None:
        await self._channel.call(rpc.RouterStub, "Event", to_pb(event), CALL_SECONDS)


def read_answer(type: type[S], message: Any) -> S:
    """An answer that can't be used tells nothing: ``Unavailable``."""
    try:
        return from_pb(type, message)
    except Refusal as refusal:
        raise Unavailable(f"the answer can't be used: {refusal.detail}") from refusal


def _poll_seconds(wait_ms: int | None) -> float:
    return CALL_SECONDS + (POLL_SECONDS if wait_ms is None else wait_ms / 1000)
