"""The verifier's resources (Table 1) and three extensions: GET of the base, DELETE of a session, decline."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

from msgspec import structs
from starlette.responses import Response

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import Assignment, Decline, Policy, Proposal, SessionId, SessionOpen
from sdcp_mono.core.names import format_session
from sdcp_mono.core.ports import ModelCard, VerifierPort
from sdcp_mono.core.problems import Forbidden, Malformed, StaleEpoch, UnknownSession
from sdcp_mono.http_gateway.exchange import CBOR, Call, ClientGone, empty, octets, reply
from sdcp_mono.http_gateway.identity import normalise, normalised
from sdcp_mono.http_gateway.limits import GatewayLimits, Rates
from sdcp_mono.http_gateway.server import Resources

_FROM: Final = re.compile(r"[0-9]{1,19}")
_WAIT: Final = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?([0-9]{1,9})\"?(?:$|[,;\s])", re.IGNORECASE)  # RFC 7240, 4.3
_BEYOND: Final = 2**62  # an output index past any output: asking from there copies nothing


class VerifierResources:
    """``drafter_of`` names the drafter a session is assigned to now, for reading its output (AMB-049).

    ``mlc`` is the base URI of a cache that references may name, told to whoever asks; empty: there is none.
    """

    def __init__(
        self,
        port: VerifierPort,
        card: ModelCard,
        drafter_of: Callable[[SessionId], str | None],
        limits: GatewayLimits | None = None,
        mlc: str = "",
    ) -> None:
        limits = limits or GatewayLimits()
        self._port = port
        self._drafter_of = drafter_of
        self._sessions = Rates(limits.session_rate)
        self._drafters = Rates(limits.drafter_rate)
        self._card = cbor.encode_value(
            {
                "target": card.target,
                "tokenizer": card.tokenizer,
                "vocab_size": card.vocab_size,
                "context": card.context,
                **({"mlc": mlc} if mlc else {}),
            }
        )

    @property
    def resources(self) -> Resources:
        return {
            "/": {"GET": self.discover, "HEAD": self.discover},
            "/sessions": {"POST": self.open},
            "/sessions/{id}": {"DELETE": self.close},
            "/sessions/{id}/drafter": {"PUT": self.assign},
            "/sessions/{id}/output": {"GET": self.output},
            "/sessions/{id}/policy": {"POST": self.policy},
            "/sessions/{id}/decline": {"POST": self.decline},
            "/proposals": {"POST": self.propose},
        }

    async def discover(self, call: Call) -> Response:
        """What a contract has to name, V, context length and the cache. For every identity of the CA."""
        call.must_accept()
        return octets(self._card, CBOR)

    async def open(self, call: Call) -> Response:
        call.gate.access.router(call.caller)
        message = await call.message(SessionOpen, call.gate.limits.prompt_body)
        replay = await self._is_open(message)
        state = await self._port.open(message)
        # AMB-053. Two opens that race may both say 201; clients take any 2xx alike.
        return reply(state) if replay else reply(state, 201, location=f"sessions/{format_session(message.session)}")

    async def _is_open(self, message: SessionOpen) -> bool:
        try:
            return (await self._port.output(message.session, _BEYOND, wait_ms=0)).epoch == message.epoch
        except (UnknownSession, StaleEpoch):
            return False

    async def assign(self, call: Call) -> Response:
        call.gate.access.router(call.caller)
        message = await call.message(Assignment, call.gate.limits.prompt_body)
        _same_session(call, message.session)
        return reply(await self._port.assign(normalised(message)))

    async def policy(self, call: Call) -> Response:
        call.gate.access.router(call.caller)
        message = await call.message(Policy)
        _same_session(call, message.session)
        return reply(await self._port.policy(message))

    async def close(self, call: Call) -> Response:
        """Extension (AMB-070)."""
        call.gate.access.router(call.caller)
        await self._port.close(call.session())
        return empty()

    async def propose(self, call: Call) -> Response:
        call.gate.access.proposer(call.caller)
        self._drafters.take(call.caller.uri)
        message = await call.message(Proposal)
        self._sessions.take(message.session)
        message = structs.replace(message, drafter=normalise(message.drafter))  # AMB-040
        return reply(await self._port.propose(message, call.caller.uri))

    async def decline(self, call: Call) -> Response:
        """Extension (decision 0003)."""
        call.gate.access.proposer(call.caller)
        self._drafters.take(call.caller.uri)
        message = await call.message(Decline)
        _same_session(call, message.session)
        self._sessions.take(message.session)
        message = structs.replace(message, drafter=normalise(message.drafter))
        return reply(await self._port.decline(message, call.caller.uri))

    async def output(self, call: Call) -> Response:
        call.must_accept()
        session = call.session()
        if not call.gate.access.is_reader(call.caller) and self._drafter_of(session) != call.caller.uri:
            raise Forbidden("output is for the router, front ends and the assigned drafter")
        from_ = call.query.get("from", "0")
        if not _FROM.fullmatch(from_):
            raise Malformed("from: not an output index")
        if (wait_ms := _wait_ms(call)) == 0 or call.gate.stopping.is_set():
            return reply(await self._port.output(session, int(from_), wait_ms=0))
        with call.gate.polls.hold(call.caller.uri):
            return await self._poll(call, session, int(from_), wait_ms)

    async def _poll(self, call: Call, session: SessionId, from_: int, wait_ms: int) -> Response:
        """Wait for output, but not for a client that has left or a server that stops."""
        answer = asyncio.ensure_future(self._port.output(session, from_, wait_ms=wait_ms))
        gone, stopping = asyncio.ensure_future(call.gone()), asyncio.ensure_future(call.gate.stopping.wait())
        others = (gone, stopping)
        try:
            await asyncio.wait({answer, *others}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
            if not answer.done():
                return reply(await self._port.output(session, from_, wait_ms=0))
            return reply(answer.result())
        finally:
            for task in (answer, *others):
                task.cancel()
            await asyncio.gather(answer, *others, return_exceptions=True)


def _wait_ms(call: Call) -> int:
    """The server's wait, or less where the client prefers so (AMB-166)."""
    longest = int(call.gate.limits.poll_seconds * 1000)
    preferred = _WAIT.search(call.headers.get("prefer", ""))
    return longest if preferred is None else min(longest, int(preferred[1]) * 1000)


def _same_session(call: Call, session: SessionId) -> None:
    if call.session() != session:
        raise Malformed("session: the path names another session")
