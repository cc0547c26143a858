"""Every method of the three ports over the wire, refusals, deadlines, cancellation; then whole generations."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from msgspec import structs

from sdcp_mono.core import problems
from sdcp_mono.core.messages import Assignment, Decline, Event, Output, Policy, Proposal, Sampling, Verdict
from sdcp_mono.core.ports import Chunk, OpenOptions, RoundInfo, TokenInfo, TokenLogprob
from sdcp_mono.core.problems import BadContract, Conflict, Malformed, Refusal, StaleBase, TooLarge, Unavailable
from sdcp_mono.grpc.calls import Tracing, seconds_left
from sdcp_mono.grpc.client import DrafterClient, RouterClient, VerifierClient
from sdcp_mono.grpc.convert import to_pb
from sdcp_mono.grpc.pb import sdcp_pb2 as pb
from sdcp_mono.grpc.pb import sdcp_pb2_grpc as rpc
from sdcp_mono.grpc.problems import CODES
from sdcp_mono.grpc.services import DrafterService, RouterService, VerifierService

DIGEST = b"d" * 32
OUTPUT = Output(session=bytes(range(16)), epoch=1, from_=3, tokens=(4, 5), final=True, finish=4)
ROUND = RoundInfo(
    round=1,
    epoch=1,
    base=3,
    proposed=(4, 9),
    accepted=1,
    emitted=(4, 5),
    action=0,
    m_cap=4,
    drafter="d",
    tokens=(TokenInfo("accepted", 0.5, 0.25, -0.7, (TokenLogprob(4, -0.7),)), TokenInfo("correction", 1.0, 0.0)),
    wait_seconds=0.001,
)
CHUNK = Chunk(3, 1, (4, 5), (ROUND,), True, 4, "")


def assigned(kit: Any, **changes: Any) -> Assignment:
    return structs.replace(
        Assignment(
            session=kit.SESSION,
            epoch=2,
            contract=kit.CONTRACT,
            verifier=kit.BASES["verifier"],
            prompt=(),
            drafter=kit.BASES["drafter"],
            round=3,
            committed=9,
            digest=DIGEST,
            m_init=0,
        ),
        **changes,
    )


def test_every_method_of_the_verifier(kit: Any) -> None:
    verdict = Verdict(
        session=kit.SESSION,
        epoch=1,
        round=1,
        accepted=2,
        emitted=(4, 5, 6),
        committed=3,
        digest=DIGEST,
        action=0,
        m_cap=8,
        low=0,
        load=5,
    )
    assignment = assigned(kit, prompt="mlc://local/-/prompt/1")
    proposal = Proposal(
        session=kit.SESSION,
        epoch=1,
        round=1,
        drafter=kit.BASES["drafter"],
        base=0,
        base_digest=DIGEST,
        tokens=(4, 5),
        status=kit.STATUS,
    )
    decline = Decline(session=kit.SESSION, epoch=1, round=1, drafter=kit.BASES["drafter"])
    policy = Policy(session=kit.SESSION, from_round=3, sampling=Sampling(top_k=0))
    state = kit.STATE
    port = kit.Heard(
        open=state, assign=state, propose=verdict, decline=state, output=OUTPUT, chunk=CHUNK, policy=state, close=None
    )

    async def test() -> None:
        async with kit.verifier(port) as router:
            assert await router.card() == kit.CARD
            assert await router.open(kit.OPENING) == state
            assert await router.open(kit.OPENING, OpenOptions(lead=True, top_logprobs=0)) == state
            assert await router.assign(assignment) == state
            assert await router.output(kit.SESSION, 3) == OUTPUT
            assert await router.output(kit.SESSION, 2**40, wait_ms=0) == OUTPUT
            assert await router.chunk(kit.SESSION, 3, wait_ms=7) == CHUNK
            assert await router.policy(policy) == state
            await router.close(kit.SESSION)
        async with kit.verifier(port, "drafter", drafter=kit.BASES["drafter"]) as drafter:
            assert await drafter.propose(proposal, "nobody asks") == verdict
            assert await drafter.decline(decline, "") == state
            assert await drafter.output(kit.SESSION, 3) == OUTPUT

    kit.run(test())
    assert port.calls == [
        ("open", kit.OPENING, None),
        ("open", kit.OPENING, OpenOptions(lead=True, top_logprobs=0)),
        ("assign", assignment),
        ("output", kit.SESSION, 3, None),
        ("output", kit.SESSION, 2**40, 0),
        ("chunk", kit.SESSION, 3, 7),
        ("policy", policy),
        ("close", kit.SESSION),
        ("propose", proposal, kit.BASES["drafter"]),
        ("decline", decline, kit.BASES["drafter"]),
        ("output", kit.SESSION, 3, None),
    ]


def test_every_method_of_drafter_and_router(kit: Any) -> None:
    drafter, router = kit.Heard(), kit.Heard()
    assignment = assigned(kit, verifier="https://127.0.0.1:8443/verifier", drafter="https://127.0.0.1:8443/drafter")
    event = Event(session=kit.SESSION, epoch=1, kind=2, committed=9, digest=DIGEST)

    async def test() -> None:
        async with (
            kit.server(DrafterService(drafter), RouterService(router), role="gateway") as server,
            kit.channel(server, "router") as by_router,
            kit.channel(server, "drafter") as by_drafter,
            kit.channel(server, "verifier") as by_verifier,
        ):
            await DrafterClient(by_router).assign(assignment)
            await RouterClient(by_drafter).status(kit.STATUS)
            await RouterClient(by_verifier).event(event)

    kit.run(test())
    bases = {"verifier": kit.BASES["verifier"], "drafter": kit.BASES["drafter"]}
    assert drafter.calls == [("assign", structs.replace(assignment, **bases))]  # AMB-040: in their one spelling
    assert router.calls == [("status", structs.replace(kit.STATUS, base=bases["drafter"])), ("event", event)]


def test_follow_streams_every_chunk_once_and_ends_with_the_final_one(kit: Any) -> None:
    asked = []

    def chunk(session: bytes, from_: int, wait_ms: int) -> Chunk:
        asked.append(from_)
        return Chunk(from_, 1, (from_,) * 2 if from_ < 6 else (), (), from_ >= 6, 4 if from_ >= 6 else None)

    async def test() -> None:
        async with kit.verifier(kit.Heard(chunk=chunk), "frontend") as reader:
            seen = [(c.from_, c.tokens, c.final) async for c in reader.follow(kit.SESSION, 2)]
        assert seen == [(2, (2, 2), False), (4, (4, 4), False), (6, (), True)]

    kit.run(test())
    assert asked == [2, 4, 6]


def test_a_long_chunk_comes_in_whole_rounds(kit: Any) -> None:
    rounds = tuple(
        structs.replace(ROUND, round=i, base=1 + 50 * i, emitted=tuple(range(50)), proposed=(), tokens=())
        for i in range(200)
    )
    tokens = tuple(token for info in rounds for token in info.emitted)

    def chunk(session: bytes, from_: int, wait_ms: int) -> Chunk:
        return Chunk(from_, 1, tokens[from_ - 1 :], tuple(r for r in rounds if r.base >= from_), True, 4)

    async def test() -> None:
        async with kit.verifier(kit.Heard(chunk=chunk), "frontend") as reader:
            seen = [c async for c in reader.follow(kit.SESSION, 1)]
        assert [(c.final, c.finish) for c in seen] == [(False, None), (True, 4)]
        assert len(seen[0].tokens) == 8150  # 163 rounds; the next would end above 8,192
        assert tuple(token for c in seen for token in c.tokens) == tokens
        assert tuple(info for c in seen for info in c.rounds) == rounds

    kit.run(test())


class Polls:
    """A verifier whose output never comes."""

    def __init__(self) -> None:
        self.waiting = 0
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()

    async def output(self, session: bytes, from_: int, wait_ms: int | None = None) -> Output:
        if wait_ms == 0:
            return structs.replace(OUTPUT, tokens=(), final=False)
        self.waiting += 1
        self.arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
            self.left.set()
        raise AssertionError

    async def chunk(self, session: bytes, from_: int, wait_ms: int | None = None) -> Chunk:
        await self.output(session, from_, wait_ms)
        return Chunk(from_, 1, (), (), False)


def test_c_45_a_cancelled_poll_leaves_nothing_waiting(kit: Any) -> None:
    async def test() -> None:
        port = Polls()
        async with kit.verifier(port) as router:
            poll = asyncio.ensure_future(router.output(kit.SESSION, 0))
            await port.arrived.wait()
            poll.cancel()
            await port.left.wait()
            assert port.waiting == 0
            with pytest.raises(asyncio.CancelledError):
                await poll

    kit.run(test())


def test_c_45_leaving_a_stream_ends_its_work(kit: Any) -> None:
    async def test() -> None:
        port = Polls()
        async with kit.verifier(port) as router:
            stream = router.follow(kit.SESSION)
            reading = asyncio.ensure_future(anext(stream))
            await port.arrived.wait()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await port.left.wait()
            assert port.waiting == 0

    kit.run(test())


def test_a_server_that_stops_answers_its_polls_first(kit: Any) -> None:
    async def test() -> None:
        port = Polls()
        server = kit.server(VerifierService(port, kit.CARD, lambda session: None))
        channel = kit.channel(await server.__aenter__(), "router")
        poll = asyncio.ensure_future(VerifierClient(channel).output(kit.SESSION, 0))
        await port.arrived.wait()
        await server.__aexit__(None, None, None)
        assert await poll == structs.replace(OUTPUT, tokens=(), final=False)
        with pytest.raises(Unavailable, match="UNAVAILABLE"):
            await VerifierClient(channel).output(kit.SESSION, 0)
        await channel.close()

    kit.run(test())


# ---- refusals ----------------------------------------------------------------------------------------

KINDS = [kind for kind in vars(problems).values() if isinstance(kind, type) and issubclass(kind, Refusal)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_refusal_crosses_as_itself(kit: Any, kind: type[Refusal]) -> None:
    detail = "epoch: 3 is not 4 — „ünïcode“"
    refusal = StaleBase(detail, kit.STATE) if kind is StaleBase else kind(detail, retry_after_ms=0)

    async def test() -> None:
        async with kit.verifier(kit.Heard(open=refusal)) as router:
            with pytest.raises(Refusal) as caught:
                await router.open(kit.OPENING)
        got = caught.value
        assert (type(got), got.detail, got.retry_after_ms) == (kind, detail, refusal.retry_after_ms)
        if isinstance(got, StaleBase):
            assert got.state == kit.STATE
        assert isinstance(got.__cause__, grpc.aio.AioRpcError)
        assert got.__cause__.code() is CODES[kind]

    kit.run(test())


def test_a_refusal_of_another_package_crosses_as_what_it_derives_from(kit: Any) -> None:
    class Elsewhere(Conflict):
        pass

    async def test() -> None:
        async with kit.verifier(kit.Heard(open=Elsewhere("log: taken" + "x" * 10_000))) as router:
            with pytest.raises(Conflict, match="log: taken") as caught:
                await router.open(kit.OPENING)
            assert type(caught.value) is Conflict
            assert len(caught.value.detail) == 500

    kit.run(test())


def test_a_fault_is_unavailable_and_tells_nothing_more(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with kit.verifier(kit.Heard(open=ZeroDivisionError("secret"))) as router:
            with pytest.raises(Unavailable) as caught:
                await router.open(kit.OPENING)
            assert "secret" not in caught.value.detail
            assert "ZeroDivisionError" in caught.value.detail

    kit.run(test())
    assert [record.getMessage() for record in caplog.records] == ["/sdcp_mono.v1.Verifier/Open failed"]


def test_a_request_that_is_no_message_is_refused_and_names_the_field(kit: Any) -> None:
    async def test() -> None:
        port = kit.Heard()
        async with kit.verifier(port) as router:
            with pytest.raises(Malformed, match="session"):
                await router.output(b"short", 0)
            with pytest.raises(BadContract, match="m_max"):
                await router.open(structs.replace(kit.OPENING, contract=structs.replace(kit.CONTRACT, m_max=65)))
            with pytest.raises(Malformed, match="digest"):
                await router.assign(
                    Assignment(
                        session=kit.SESSION,
                        epoch=2,
                        contract=kit.CONTRACT,
                        verifier="v",
                        drafter="d",
                        prompt=(),
                        round=3,
                        committed=9,
                        digest=b"",
                        m_init=0,
                    )
                )
        assert port.calls == []

    kit.run(test())


def test_an_answer_that_is_no_message_is_unavailable(kit: Any) -> None:
    async def test() -> None:
        async with kit.verifier(kit.Heard(open=structs.replace(kit.STATE, digest=b""))) as router:
            with pytest.raises(Unavailable, match="digest"):
                await router.open(kit.OPENING)

    kit.run(test())


def test_a_message_beyond_the_limit_is_too_large(kit: Any) -> None:
    async def test() -> None:
        async with kit.verifier(kit.Heard(open=kit.STATE)) as router:
            await router.open(structs.replace(kit.OPENING, prompt=(2**32 - 1,) * (2**20)))  # 5 MiB
            with pytest.raises(TooLarge, match="larger than max"):
                await router.open(structs.replace(kit.OPENING, prompt=(2**32 - 1,) * (5 * 2**20)))

    kit.run(test())


# ---- deadlines and cancellation (C-45) -----------------------------------------------------------------


def test_c_45_a_deadline_is_unavailable_and_stops_the_work(kit: Any) -> None:
    async def test() -> None:
        port = Polls()
        async with (
            kit.server(VerifierService(port, kit.CARD, lambda session: None)) as server,
            kit.channel(server, "router") as channel,
        ):
            request = pb.ReadRequest(session=kit.SESSION)
            with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
                await channel.call(rpc.VerifierStub, "Output", request, 0.2)
            await port.left.wait()
            assert port.waiting == 0

    kit.run(test())


@pytest.mark.parametrize("inside", [True, False], ids=["what it waits for", "the task"])
def test_c_45_a_cancellation_on_the_server_is_answered(kit: Any, inside: bool) -> None:
    async def cancelled(*_: Any) -> None:
        if inside:
            waiting = asyncio.get_running_loop().create_future()
            waiting.cancel()
            await waiting
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def test() -> None:
        async with kit.verifier(kit.Heard(open=cancelled)) as router:
            with pytest.raises(Unavailable, match="cancelled"):
                await router.open(kit.OPENING)

    kit.run(test())


def test_c_45_what_a_handler_calls_has_no_more_time_than_the_handler(kit: Any) -> None:
    """In the handler's own task; what it starts belongs to others too."""
    left: list[float | None] = []

    async def look() -> None:
        left.append(seconds_left())

    async def opened(*_: Any) -> Any:
        await look()
        await asyncio.create_task(look())
        return kit.STATE

    async def test() -> None:
        async with (
            kit.server(VerifierService(kit.Heard(open=opened), kit.CARD, lambda session: None)) as server,
            kit.channel(server, "router") as channel,
        ):
            await channel.call(rpc.VerifierStub, "Open", pb.OpenRequest(opening=to_pb(kit.OPENING)), 5.0)
            assert seconds_left() is None

    kit.run(test())
    assert left[0] is not None
    assert 0 < left[0] <= 5.0
    assert left[1] is None


def test_a_chain_of_calls_ends_with_the_first_deadline(kit: Any) -> None:
    """A drafter's server whose handler polls a verifier: its call is given up when the caller's time is over."""

    async def test() -> None:
        port = Polls()
        async with (
            kit.server(VerifierService(port, kit.CARD, lambda session: kit.BASES["drafter"])) as far,
            kit.channel(far, "drafter") as to_far,
        ):
            refused: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()

            async def assign(_: Any) -> None:
                try:
                    await VerifierClient(to_far).output(kit.SESSION, 0)
                except Refusal as refusal:
                    refused.set_result(refusal)
                    raise

            near = kit.server(DrafterService(kit.Heard(assign=assign)), role="drafter")
            async with near as server, kit.channel(server, "router") as channel:
                request = to_pb(
                    Assignment(
                        session=kit.SESSION,
                        epoch=2,
                        contract=kit.CONTRACT,
                        verifier="v",
                        drafter="d",
                        prompt=(),
                        round=3,
                        committed=9,
                        digest=DIGEST,
                        m_init=0,
                    )
                )
                with pytest.raises(Unavailable):
                    await channel.call(rpc.DrafterStub, "Assign", request, 0.3)
                await port.left.wait()
                assert port.waiting == 0

    kit.run(test())


# ---- trace context -------------------------------------------------------------------------------------


def test_trace_context_reaches_the_handler_and_goes_on(kit: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    heard: list[Any] = []
    root = Tracing(inject=lambda: {"traceparent": parent, "tracestate": "a=1"})
    last = Tracing(extract=heard.append)

    async def test() -> None:
        async with (
            kit.server(RouterService(kit.Heard()), role="router", tracing=last) as far,
            kit.channel(far, "verifier") as onward,
        ):
            event = Event(session=kit.SESSION, epoch=1, kind=2, committed=9, digest=DIGEST)

            async def opened(*_: Any) -> Any:
                await RouterClient(onward).event(event)
                return kit.STATE

            async with kit.verifier(kit.Heard(open=opened)) as plain:
                await plain.open(kit.OPENING)
            service = VerifierService(kit.Heard(open=opened), kit.CARD, lambda session: None)
            async with kit.server(service) as server, kit.channel(server, "router", tracing=root) as channel:
                await VerifierClient(channel).open(kit.OPENING)

    kit.run(test())
    assert [metadata.get("traceparent") for metadata in heard] == [None, parent]
