"""Deadlines, cancellation, keepalive, limits and processes (C-45)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from sdcp_mono.core.messages import Assignment, Event, Output
from sdcp_mono.core.problems import Unavailable
from sdcp_mono.grpc import channel as channels
from sdcp_mono.grpc import server as servers
from sdcp_mono.grpc.calls import TRACEPARENT, Tracing, seconds_left
from sdcp_mono.grpc.channel import Channel
from sdcp_mono.grpc.client import DrafterClient, RouterClient, VerifierClient
from sdcp_mono.grpc.convert import to_pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc
from sdcp_mono.grpc.services import DrafterService, RouterService, VerifierService

OUTPUT = Output(session=bytes(range(16)), epoch=1, from_=3, tokens=(4, 5), final=True, finish=4)


def assignment(kit: Any) -> Assignment:
    return Assignment(
        session=kit.SESSION, epoch=2, contract=kit.CONTRACT, verifier=kit.BASES["verifier"], prompt=(),
        drafter=kit.BASES["drafter"], round=3, committed=9, digest=bytes(32), m_init=0,
    )  # fmt: skip


class Slow:
    """A verifier whose output comes when the test says so; knows what time it was given, and when it was cancelled."""

    def __init__(self) -> None:
        self.asked, self.free, self.stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.left: float | None = None

    async def output(self, session: bytes, from_: int, wait_ms: int | None = None) -> Output:
        if wait_ms == 0:
            return OUTPUT
        return await self._work(OUTPUT)

    async def policy(self, policy: Any) -> Any:
        return await self._work(None)

    async def assign(self, assignment: Assignment) -> Any:
        self.left = seconds_left()  # of the call's own task
        return await self._work(None)

    async def _work(self, answer: Any) -> Any:
        self.asked.set()
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return answer


# ---- deadlines and cancellation ------------------------------------------------------------------------


def test_c_45_downstream_has_no_more_time_than_is_left_and_stops_with_it(kit: Any) -> None:
    """Caller -> drafter's server -> verifier's server: the second deadline is what is left of the first."""
    far_port = Slow()
    given = 2.0

    async def test() -> None:
        async with (
            kit.server(VerifierService(far_port, kit.CARD, lambda session: None)) as far,
            kit.channel(far, "router") as onward,
        ):

            async def assign(told: Assignment) -> None:
                await VerifierClient(onward).assign(told)  # which may take 60 s by itself

            near = kit.server(DrafterService(kit.Heard(assign=assign)), role="drafter")
            async with near as server, kit.channel(server, "router") as channel:
                with pytest.raises(Unavailable):
                    await channel.call(rpc.DrafterStub, "Assign", to_pb(assignment(kit)), given)
                await far_port.stopped.wait()

    kit.run(test())
    assert far_port.left is not None
    assert 0 < far_port.left <= given


def test_c_45_a_caller_that_goes_stops_the_work_behind_the_work(kit: Any) -> None:
    far_port = Slow()

    async def test() -> None:
        async with (
            kit.server(VerifierService(far_port, kit.CARD, lambda session: None)) as far,
            kit.channel(far, "router") as onward,
        ):

            async def assign(told: Assignment) -> None:
                await VerifierClient(onward).assign(told)

            near = kit.server(DrafterService(kit.Heard(assign=assign)), role="drafter")
            async with near as server, kit.channel(server, "router") as channel:
                call = asyncio.ensure_future(DrafterClient(channel).assign(assignment(kit)))
                await far_port.asked.wait()
                call.cancel()
                await far_port.stopped.wait()
                await asyncio.gather(call, return_exceptions=True)

    kit.run(test())


@pytest.mark.parametrize("inside", [True, False], ids=["what it waits for", "the handler's task"])
def test_c_45_a_cancelled_handler_answers_cancelled(kit: Any, inside: bool) -> None:
    async def cancelled(*_: Any) -> None:
        if inside:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    async def test() -> None:
        async with kit.verifier(kit.Heard(open=cancelled)) as router:
            with pytest.raises(Unavailable) as caught:
                await router.open(kit.OPENING)
        cause = caught.value.__cause__
        assert isinstance(cause, grpc.aio.AioRpcError)
        assert cause.code() is grpc.StatusCode.CANCELLED

    kit.run(test())


# ---- keepalive -----------------------------------------------------------------------------------------


class Wire:
    """A TCP relay that counts what the client sends: on an idle connection these are pings and their answers."""

    def __init__(self) -> None:
        self.connections = 0
        self.closed = asyncio.Event()  # by the server
        self._sent = 0
        self._more = asyncio.Event()

    async def sent(self, more: int) -> None:
        """Wait until the client has sent so many more times."""
        goal = self._sent + more
        while self._sent < goal:
            self._more.clear()
            await self._more.wait()

    @asynccontextmanager
    async def before(self, port: int) -> AsyncIterator[str]:
        tasks = set()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.current_task())
            self.connections += 1
            there, to = await asyncio.open_connection("127.0.0.1", port)
            try:
                await asyncio.gather(self._copy(reader, to, True), self._copy(there, writer, False))
            finally:
                to.transport.abort()
                writer.transport.abort()

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: bool) -> None:
        while data := await reader.read(65_536):
            self._sent += client
            self._more.set()
            writer.write(data)
        if not client:
            self.closed.set()
        writer.close()


def keepalive(monkeypatch: Any, ping_ms: int, least_ms: int) -> None:
    """Clients that ping so often, and servers that allow it so often and don't ping themselves."""
    client = {**dict(channels._OPTIONS), "grpc.keepalive_time_ms": ping_ms}
    server = {
        **dict(servers._OPTIONS),
        "grpc.keepalive_time_ms": 3_600_000,
        "grpc.http2.min_ping_interval_without_data_ms": least_ms,
    }
    monkeypatch.setattr(channels, "_OPTIONS", tuple(client.items()))
    monkeypatch.setattr(servers, "_OPTIONS", tuple(server.items()))


def test_c_45_our_pings_are_rarer_than_our_servers_allow() -> None:
    """What the next test scales down by thirty; a server forgives two pings."""
    assert channels.PING_MS == 3 * servers.MIN_PING_MS
    assert dict(channels._OPTIONS)["grpc.keepalive_time_ms"] == channels.PING_MS
    assert dict(servers._OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] == servers.MIN_PING_MS


def test_c_45_a_long_wait_with_pings_is_not_sent_away(kit: Any, monkeypatch: Any) -> None:
    """A prefill that sends nothing for a long time, then an idle connection."""
    keepalive(monkeypatch, ping_ms=1_000, least_ms=333)  # the library pings once a second at most
    wire, port = Wire(), Slow()

    async def test() -> None:
        async with (
            kit.server(VerifierService(port, kit.CARD, lambda session: None)) as server,
            wire.before(server.port) as address,
            Channel(address, kit.files("router")) as channel,
        ):
            call = asyncio.ensure_future(VerifierClient(channel).output(kit.SESSION, 3))
            await port.asked.wait()
            await wire.sent(4)
            port.free.set()
            assert await call == OUTPUT
            await wire.sent(4)
            assert await VerifierClient(channel).output(kit.SESSION, 3, wait_ms=0) == OUTPUT
            assert (wire.connections, wire.closed.is_set()) == (1, False)

    kit.run(test())


def test_c_45_a_server_that_minds_would_be_noticed(kit: Any, monkeypatch: Any) -> None:
    """The same with the library's own limit of five minutes: GOAWAY, too_many_pings."""
    keepalive(monkeypatch, ping_ms=1_000, least_ms=300_000)
    wire, port = Wire(), Slow()

    async def test() -> None:
        async with (
            kit.server(VerifierService(port, kit.CARD, lambda session: None)) as server,
            wire.before(server.port) as address,
            Channel(address, kit.files("router")) as channel,
        ):
            with pytest.raises(Unavailable, match="ping"):
                await VerifierClient(channel).output(kit.SESSION, 3)
            await wire.closed.wait()

    kit.run(test())


# ---- processes, limits, traces ---------------------------------------------------------------------------


def test_c_45_a_handler_may_start_a_process(kit: Any) -> None:
    async def opened(*_: Any) -> Any:
        command = [sys.executable, "-c", "import grpc; print(1 + 1)"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert done.stdout == "2\n"
        return kit.STATE

    async def test() -> None:
        async with kit.verifier(kit.Heard(open=opened)) as router:
            assert await router.open(kit.OPENING) == kit.STATE
            assert await router.open(kit.OPENING) == kit.STATE

    kit.run(test())


def test_one_caller_can_not_use_up_the_server(kit: Any) -> None:
    port = Slow()

    async def test() -> None:
        service = VerifierService(port, kit.CARD, lambda session: None)
        async with (
            kit.server(service, calls_of_one=1) as server,
            kit.channel(server, "router") as one,
            kit.channel(server, "frontend") as other,
        ):
            call = asyncio.ensure_future(VerifierClient(one).output(kit.SESSION, 3))
            await port.asked.wait()
            with pytest.raises(Exception, match="1 calls of this caller"):
                await VerifierClient(one).output(kit.SESSION, 3, wait_ms=0)
            assert await VerifierClient(other).output(kit.SESSION, 3, wait_ms=0) == OUTPUT
            port.free.set()
            assert await call == OUTPUT

    kit.run(test())


def test_the_trace_and_the_instance_travel_together(kit: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    heard: list[Any] = []
    root, last = Tracing(inject=lambda: {TRACEPARENT: parent}), Tracing(extract=heard.append)
    event = Event(session=kit.SESSION, epoch=1, kind=2, committed=9, digest=bytes(32))

    async def test() -> None:
        base = kit.BASES["verifier"]
        async with (
            kit.server(RouterService(kit.Heard()), role="router", tracing=last) as server,
            kit.channel(server, "verifier", tracing=root, instance=base) as channel,
        ):
            await RouterClient(channel).event(event)
        assert heard[0] | {TRACEPARENT: parent, "sdcp-instance": base} == heard[0]

    kit.run(test())
