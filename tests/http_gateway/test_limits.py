"""Floods and slow peers: what one does, others don't feel (SDCP-202, AMB-166, AMB-189)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sdcp_mono.core.problems import TooManyRequests
from sdcp_mono.http_gateway import server
from sdcp_mono.http_gateway.limits import GatewayLimits, Rates, Slots


def test_amb_189_rates() -> None:
    now = 0.0
    rates = Rates(10.0, clock=lambda: now)
    for _ in range(10):
        rates.take("a")
    with pytest.raises(TooManyRequests) as refused:
        rates.take("a")
    assert refused.value.retry_after_ms == 101
    rates.take("b")  # another key has tokens of its own
    now = 0.25
    rates.take("a")
    rates.take("a")
    with pytest.raises(TooManyRequests):
        rates.take("a")


def test_slots_are_given_back() -> None:
    slots = Slots(1, "polls")
    with slots.hold("a"), slots.hold("b"), pytest.raises(TooManyRequests), slots.hold("a"):
        raise AssertionError
    with slots.hold("a"):
        pass


@pytest.mark.parametrize(
    ("limits", "session"), [(GatewayLimits(session_rate=3), True), (GatewayLimits(drafter_rate=3), False)]
)
def test_sdcp_202_proposals_are_limited(kit: Any, limits: GatewayLimits, session: bool) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        other = await kit.assigned(site, session=b"o" * 16)
        async with kit.Wire.connect(site.gateway.port, site.files("drafter")) as wire:

            async def propose(of: Any, **changes: Any) -> Any:
                return await wire.request("POST", "/verifier/proposals", kit.proposal(of, (5,), **changes))

            kinds = [(await propose(state, base=9)).kind for _ in range(6)]
            assert kinds[:3] == [(409, "sdcp-stale-base")] * 3
            assert kinds[-1] == (429, "")
            limited = await propose(state)
            assert limited.kind == (429, "")
            assert int(limited.headers["retry-after"]) >= 1
            assert (await propose(other)).status == (200 if session else 429)

    kit.run(test, limits=limits)


def test_64_long_polls_beside_posts(kit: Any) -> None:
    """All polls wait on one connection while proposals on the same one are answered; the commit wakes them all."""

    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        async with kit.Wire.connect(site.gateway.port, site.files("drafter")) as wire:
            path = f"/verifier/sessions/{kit.path}/output?from=3"
            polls = [await wire.start("GET", path, end=True) for _ in range(64)]
            first = await wire.request("POST", "/verifier/proposals", kit.proposal(state, (5, 6)))
            assert first.cbor["emitted"] == [5, 6, 7]
            assert not any(wire.replies[poll].done() for poll in polls)  # they wait for index 3
            second = await wire.request("POST", "/verifier/proposals", kit.proposal(first.cbor, (8,)))
            assert second.cbor["emitted"] == [8, 9]
            answers = await asyncio.gather(*map(wire.answer, polls))
            assert [answer.cbor["tokens"] for answer in answers] == [[8, 9]] * 64

    kit.run(test)


def test_polls_are_capped_per_identity(kit: Any) -> None:
    async def test(site: Any) -> None:
        await kit.assigned(site)
        async with kit.Wire.connect(site.gateway.port, site.files("frontend")) as wire:
            path = f"/verifier/sessions/{kit.path}/output"
            polls = [await wire.start("GET", path, end=True) for _ in range(2)]
            refused = await wire.request("GET", path)
            assert (refused.kind, refused.headers["retry-after"]) == ((429, ""), "1")
            assert (await wire.request("GET", path, prefer="wait=0")).status == 200
            wire.h2.reset_stream(polls[0])  # the client has lost interest: the slot is free again
            await wire.flush()
            while (again := await wire.request("GET", path, prefer="wait=1")).status == 429:
                pass
            assert again.cbor["tokens"] == []

    kit.run(test, limits=GatewayLimits(polls=2, poll_seconds=15))


def test_a_poll_ends_by_itself(kit: Any) -> None:
    async def test(site: Any) -> None:
        await kit.assigned(site)
        output = await site.curl("router", "GET", f"/verifier/sessions/{kit.path}/output")
        assert output.cbor == {"session": kit.SESSION, "epoch": 1, "from": 0, "tokens": [], "final": False}  # AMB-165

    kit.run(test, limits=GatewayLimits(poll_seconds=0.05))


def test_shutdown_answers_open_polls(kit: Any) -> None:
    async def both() -> None:
        async with kit.site() as site:
            await kit.assigned(site)
            manager = kit.Wire.connect(site.gateway.port, site.files("router"))
            wire = await manager.__aenter__()
            poll = await wire.start("GET", f"/verifier/sessions/{kit.path}/output", end=True)
            assert (await wire.request("GET", "/verifier/")).status == 200
        assert (await wire.answer(poll)).cbor["tokens"] == []
        await asyncio.wait_for(wire.ended.wait(), kit.WAIT_S)
        await manager.__aexit__(None, None, None)

    asyncio.run(both())


def test_a_slow_sender_is_cut(kit: Any) -> None:
    async def test(site: Any) -> None:
        async with kit.Wire.connect(site.gateway.port, site.files("router")) as wire:
            slow = await wire.start("POST", "/verifier/sessions", end=False, content_type="application/sdcp+cbor")
            await wire.send(slow, b"\xa1", end=False)
            assert (await wire.request("GET", "/verifier/")).status == 200
            assert (await wire.answer(slow)).kind == (408, "")

    kit.run(test, limits=GatewayLimits(body_seconds=0.2))


def test_amb_147_a_client_that_leaves_still_gets_its_verdict_later(kit: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        async with kit.Wire.connect(site.gateway.port, site.files("drafter")) as wire:
            proposal = kit.proposal(state, (5, 6))
            import cbor2

            stream = await wire.start("POST", "/verifier/proposals", end=False, content_type="application/sdcp+cbor")
            await wire.send(stream, cbor2.dumps(proposal))
            wire.h2.reset_stream(stream)
            await wire.flush()
            verdict = await wire.request("POST", "/verifier/proposals", proposal)
            assert verdict.cbor["emitted"] == [5, 6, 7]
            assert len(site.engine.sessions[kit.SESSION].rounds) == 1

    kit.run(test)


def test_a_body_budget_over_all_callers(kit: Any) -> None:
    async def test(site: Any) -> None:
        path = "/mlc/-/blob/"
        async with kit.Wire.connect(site.gateway.port, site.files("drafter")) as wire:
            held = await wire.start("PUT", f"{path}a", end=False)
            await wire.send(held, b"x" * 800, end=False)
            while site.gateway.gate.bodies < 800:
                await wire.request("GET", "/verifier/")
            refused = await wire.request("PUT", f"{path}b", b"y" * 800)
            assert (refused.kind, refused.headers["retry-after"]) == ((503, ""), "1")
            await wire.send(held, b"x")
            assert (await wire.answer(held)).status == 201
            assert (await wire.request("PUT", f"{path}b", b"y" * 800)).status == 201

    kit.run(test, limits=GatewayLimits(bodies=1000))


def test_a_client_that_stops_reading_holds_nothing_up(kit: Any, monkeypatch: Any) -> None:
    """It asks for 8 MiB, never reads, and keeps its connection open: others are served and the gateway stops."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.2)

    async def both() -> None:
        async with kit.site() as site:
            await site.objects.put("mlc://local/-/blob/big", bytes(8 * 2**20))
            connection = kit.Wire.connect(site.gateway.port, site.files("verifier"))
            wire = await connection.__aenter__()
            wire.task.cancel()  # nobody reads from here on
            wire.h2.increment_flow_control_window(2**30)
            stream = await wire.start("GET", "/mlc/-/blob/big", end=True)
            wire.h2.increment_flow_control_window(2**30, stream)
            await wire.flush()
            assert (await site.curl("router", "GET", "/verifier/")).status == 200
        await connection.__aexit__(None, None, None)

    asyncio.run(asyncio.wait_for(both(), 2 * kit.WAIT_S))
