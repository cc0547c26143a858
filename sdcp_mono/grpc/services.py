"""The roles' side of their services: each call is checked, made on the port, and answered (Table 1 and extensions)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc
from msgspec import UNSET, structs

from sdcp_mono.core.messages import (
    Assignment,
    Decline,
    Event,
    Policy,
    Proposal,
    Role,
    SessionId,
    SessionOpen,
    Status,
)
from sdcp_mono.core.ports import Chunk, DrafterPort, ModelCard, OpenOptions, RouterPort, VerifierPort
from sdcp_mono.core.problems import Forbidden, Unavailable
from sdcp_mono.grpc.calls import current
from sdcp_mono.grpc.convert import from_pb, octets, to_pb
from sdcp_mono.grpc.identity import normalise, normalised
from sdcp_mono.grpc.pb import sdcp_pb2 as pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc

T = TypeVar("T")

FOLLOW_SECONDS: Final = 60.0  # of one stream of output: the reader asks again, on a fresh deadline and connection
CHUNK_TOKENS: Final = 8192  # in one message: with 20 alternatives each, 3 MiB
NAMES: Final = 4096  # instance names remembered with their owners; the router knows no more instances anyway


class VerifierService(rpc.VerifierServicer):
    """``drafter_of`` names the drafter a session is assigned to now, for reading its output (AMB-049)."""

    name: Final = pb.DESCRIPTOR.services_by_name["Verifier"].full_name

    def __init__(self, port: VerifierPort, card: ModelCard, drafter_of: Callable[[SessionId], str | None]) -> None:
        self._port = port
        self._card = to_pb(card)
        self._drafter_of = drafter_of

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_VerifierServicer_to_server(self, server)

    async def Card(self, request: pb.Nothing, context: Any) -> Any:
        """For every identity of the CA."""
        return self._card

    async def Open(self, request: pb.OpenRequest, context: Any) -> Any:
        current().access.router(current().caller)
        opening = from_pb(SessionOpen, request.opening)
        options = from_pb(OpenOptions, request.options) if request.HasField("options") else None
        return to_pb(await self._port.open(opening, options))

    async def Assign(self, request: pb.Assignment, context: Any) -> Any:
        current().access.router(current().caller)
        return to_pb(await self._port.assign(normalised(from_pb(Assignment, request))))

    async def Propose(self, request: pb.Proposal, context: Any) -> Any:
        caller = current().caller
        current().access.proposer(caller)
        proposal = from_pb(Proposal, request)
        proposal = structs.replace(proposal, drafter=normalise(proposal.drafter))  # AMB-040
        return to_pb(await self._port.propose(proposal, caller.uri))

    async def Decline(self, request: pb.Decline, context: Any) -> Any:
        caller = current().caller
        current().access.proposer(caller)
        decline = from_pb(Decline, request)
        decline = structs.replace(decline, drafter=normalise(decline.drafter))
        return to_pb(await self._port.decline(decline, caller.uri))

    async def Output(self, request: pb.ReadRequest, context: Any) -> Any:
        session, caller = _session(request), current().caller
        if not current().access.is_reader(caller) and self._drafter_of(session) != caller.uri:
            raise Forbidden("output is for the router, front ends and the assigned drafter")
        return to_pb(await _poll(lambda wait_ms: self._port.output(session, request.from_, wait_ms), _wait(request)))

    async def Chunk(self, request: pb.ReadRequest, context: Any) -> Any:
        _only_readers()
        session = _session(request)
        chunk = await _poll(lambda wait_ms: self._port.chunk(session, request.from_, wait_ms), _wait(request))
        return to_pb(shortened(chunk))

    async def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[Any]:
        _only_readers()
        session, from_ = _session(request), request.from_
        stopping, clock = current().stopping, asyncio.get_running_loop().time
        if stopping.is_set():
            raise Unavailable("the verifier is stopping")
        until = clock() + FOLLOW_SECONDS
        while (left := until - clock()) > 0 and not stopping.is_set():
            wait_ms = int(left * 1000)

            def read(wait_ms: int | None, from_: int = from_) -> Awaitable[Chunk]:
                return self._port.chunk(session, from_, wait_ms)

            chunk = shortened(await _poll(read, wait_ms))
            if chunk.tokens or chunk.final:
                yield to_pb(chunk)
            if chunk.final:
                return
            from_ += len(chunk.tokens)

    async def Policy(self, request: pb.Policy, context: Any) -> Any:
        current().access.router(current().caller)
        return to_pb(await self._port.policy(from_pb(Policy, request)))

    async def Close(self, request: pb.CloseRequest, context: Any) -> Any:
        current().access.router(current().caller)
        await self._port.close(_session(request))
        return pb.Nothing()


class DrafterService(rpc.DrafterServicer):
    name: Final = pb.DESCRIPTOR.services_by_name["Drafter"].full_name

    def __init__(self, port: DrafterPort) -> None:
        self._port = port

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_DrafterServicer_to_server(self, server)

    async def Assign(self, request: pb.Assignment, context: Any) -> Any:
        current().access.router(current().caller)
        await self._port.assign(normalised(from_pb(Assignment, request)))
        return pb.Nothing()


class RouterService(rpc.RouterServicer):
    """An instance reports its own status only: its certificate is its base URI, whatever name it goes by (AMB-047).

    ``verifier_of`` names the verifier that a session is open at; nobody else tells what happens there.
    """

    name: Final = pb.DESCRIPTOR.services_by_name["Router"].full_name

    def __init__(self, port: RouterPort, verifier_of: Callable[[SessionId], str | None] = lambda session: None) -> None:
        self._port = port
        self._verifier_of = verifier_of
        self._owners: OrderedDict[str, str] = OrderedDict()  # name -> identity that reported it first

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_RouterServicer_to_server(self, server)

    async def Status(self, request: pb.Status, context: Any) -> Any:
        access, caller = current().access, current().caller
        is_verifier, is_drafter = caller.uri in access.verifiers, access.drafts(caller)
        if not (is_verifier or is_drafter):
            raise Forbidden("only a drafter or a verifier reports its status")
        status = from_pb(Status, request)
        if self._owner(status.instance) != caller.uri:
            raise Forbidden("an instance reports its own status only")
        if not (is_drafter if status.role == Role.DRAFTER else is_verifier):
            raise Forbidden("role: not this certificate's role")  # AMB-048
        if status.base is not UNSET and normalise(status.base) != caller.uri:
            raise Forbidden("base: not this certificate's identity")
        self._owners[status.instance] = caller.uri
        self._owners.move_to_end(status.instance)
        if len(self._owners) > NAMES:
            self._owners.popitem(last=False)
        await self._port.status(structs.replace(status, base=caller.uri))
        return pb.Nothing()

    def _owner(self, name: str) -> str:
        """Whose name this is: by its own form as a URI, by configuration, by who had it first, else the caller's."""
        if "://" in name:
            return normalise(name)
        return current().access.instances.get(name) or self._owners.get(name, current().caller.uri)

    async def Event(self, request: pb.Event, context: Any) -> Any:
        caller = current().caller
        current().access.verifier(caller)
        event = from_pb(Event, request)
        if self._verifier_of(event.session) not in (None, caller.uri):
            raise Forbidden("session: open at another verifier")
        await self._port.event(event)
        return pb.Nothing()


def shortened(chunk: Chunk) -> Chunk:
    """What fits one message, cut between two rounds; the reader asks for the rest (6.7)."""
    if len(chunk.tokens) <= CHUNK_TOKENS:
        return chunk
    end = chunk.from_ + CHUNK_TOKENS
    rounds = [info for info in chunk.rounds if info.base < end]
    if rounds and rounds[-1].base + len(rounds[-1].emitted) > end:
        end = rounds.pop().base
    tokens = chunk.tokens[: end - chunk.from_]
    return structs.replace(chunk, tokens=tokens, rounds=tuple(rounds), final=False, finish=None)


async def _poll(read: Callable[[int | None], Awaitable[T]], wait_ms: int | None) -> T:
    """Wait for output, but not in a server that stops; the caller's going cancels it."""
    stopping = current().stopping
    if wait_ms == 0 or stopping.is_set():
        return await read(0)
    answer, stop = asyncio.ensure_future(read(wait_ms)), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({answer, stop}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
    finally:
        answer.cancel()
        stop.cancel()
        await asyncio.gather(answer, stop, return_exceptions=True)
    return await read(0)


def _only_readers() -> None:
    if not current().access.is_reader(current().caller):
        raise Forbidden("rounds are for the router and front ends")


def _session(request: Any) -> SessionId:
    return octets(request.session, 16, "session")


def _wait(request: pb.ReadRequest) -> int | None:
    """None: the verifier's own longest wait, which also bounds any other (AMB-166)."""
    return request.wait_ms if request.HasField("wait_ms") else None
