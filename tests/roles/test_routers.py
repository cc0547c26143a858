"""A role that several routers use: who hears what (AMB-180, AMB-182)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core.messages import Event, Status
from sdcp_mono.core.problems import Refusal, Unavailable, UnknownSession
from sdcp_mono.roles.routers import EveryRouter

STATUS = Status(instance="v", role=2, load=0, queue=0, ttl_ms=3000)
EVENT = Event(session=bytes(16), epoch=1, kind=2, committed=0, digest=bytes(32))


class Ear:
    """A router that answers ``answer`` to everything; reports wait until it is ``free``."""

    def __init__(self, answer: Refusal | None = None) -> None:
        self.answer = answer
        self.heard: list[Any] = []
        self.free = asyncio.Event()
        self.free.set()

    async def status(self, status: Status) -> None:
        self.heard.append(status)
        await self.free.wait()
        if self.answer is not None:
            raise self.answer

    async def event(self, event: Event) -> None:
        if self.answer is not None:
            raise self.answer
        self.heard.append(event)


def test_a_router_that_does_not_answer_delays_nobodys_report(run: Any) -> None:
    async def work() -> None:
        own, slow, gone = Ear(), Ear(), Ear(Unavailable("gone"))
        slow.free.clear()
        every = EveryRouter(own, {"https://slow/": slow, "https://gone/": gone})
        for _ in range(3):
            await every.status(STATUS)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert (len(own.heard), len(slow.heard), len(gone.heard)) == (3, 1, 3)
        await every.stop()

    run(work())


def test_a_withdrawal_comes_last_and_is_waited_for(run: Any) -> None:
    """Whoever leaves may end when it has said so; a report that is still under way must not arrive after that."""

    async def work() -> None:
        slow = Ear()
        slow.free.clear()
        every = EveryRouter(None, {"https://slow/": slow})
        await every.status(STATUS)
        leaving = structs.replace(STATUS, ttl_ms=1)
        told = asyncio.ensure_future(every.status(leaving))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert slow.heard == [STATUS]
        assert not told.done()
        slow.free.set()
        await told
        assert slow.heard == [STATUS, leaving]
        await every.stop()

    run(work())


def test_routers_come_and_go(run: Any) -> None:
    async def work() -> None:
        first, second = Ear(), Ear()
        known = {"https://1/": first}
        every = EveryRouter(None, known)
        for change in (lambda: None, lambda: known.update({"https://2/": second}), lambda: known.pop("https://1/")):
            change()
            await every.status(structs.replace(STATUS, ttl_ms=0))
        assert (len(first.heard), len(second.heard)) == (2, 2)
        await every.event(EVENT)
        assert second.heard[-1] == EVENT

    run(work())


def test_an_event_goes_to_the_router_whose_session_it_is(run: Any) -> None:
    async def work() -> None:
        unknown, gone, right = Ear(UnknownSession("")), Ear(Unavailable("gone")), Ear()
        await EveryRouter(unknown, {"https://gone/": gone, "https://right/": right}).event(EVENT)
        assert right.heard == [EVENT]
        with pytest.raises(Unavailable):  # it may be that router's: to be sent again
            await EveryRouter(unknown, {"https://gone/": gone}).event(EVENT)
        with pytest.raises(UnknownSession):
            await EveryRouter(unknown, {}).event(EVENT)

    run(work())
