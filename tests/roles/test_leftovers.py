"""What dead and paused processes leave behind, and what a seeded session owes to its seed while others are away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core import digest as digests
from sdcp_mono.core.messages import Assignment, Contract, Proposal, Role, Sampling, SessionState
from sdcp_mono.core.problems import QUnavailable, SessionClosed, Unavailable
from sdcp_mono.roles import drafter as drafter_module
from sdcp_mono.roles import router as router_module
from sdcp_mono.roles.drafter import Drafter, Source
from sdcp_mono.roles.verifier import SILENT_AFTER_MS, UNDRAFTED_AFTER_MS

SESSION = b"s" * 16


def right(kit: Any) -> Any:
    return kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))


def test_a_reader_does_not_wait_for_a_verifier_that_the_session_has_left(kit: Any, run: Any) -> None:
    """A paused process takes the question and never answers."""

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            generation = await world.serving.generate(kit.request(max_new=400))
            reader = generation.chunks()
            chunks = [await anext(reader)]
            (active,) = world.serving._active.values()
            verifier, asked = world.serving._verifiers[active.verifier], [0]
            answer = verifier.chunk

            async def paused(*arguments: Any) -> Any:
                asked[0] += 1
                if asked[0] == 1:
                    await asyncio.get_running_loop().create_future()
                return await answer(*arguments)

            verifier.chunk = paused

            async def rest() -> list[Any]:
                return [chunk async for chunk in reader]

            reading = asyncio.create_task(rest())
            await kit.until(lambda: asked[0])
            world.serving._carry_out(world.serving.machine.verifier_lost(active.session, 1))
            chunks += await reading
            assert tuple(t for c in chunks for t in c.tokens) == kit.follow(3, 400)
            assert chunks[-1].epoch == 2
            await generation.close()
            world.objects._clock = lambda: float("inf")  # the tokens for the new verifier have expired by then
            await world.assert_empty()

    run(main())


@pytest.mark.parametrize("answer", ["late", "lost", "before the move"])
def test_an_opening_that_was_given_up_changes_nothing_when_it_is_answered(kit: Any, run: Any, answer: str) -> None:
    """The router was cut off while it opened a session, and has opened it elsewhere when the answer comes."""

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            (verifier,) = world.serving._verifiers.values()
            opened, asked, go = verifier.open, [0], asyncio.Event()

            async def slow(opening: Any, options: Any = None) -> Any:
                asked[0] += 1
                state = await opened(opening, options)
                if opening.epoch == 1 or answer == "before the move":
                    await go.wait()
                if opening.epoch == 1 and answer == "lost":
                    raise Unavailable("no answer")
                return state

            verifier.open = slow
            text = asyncio.create_task(world.text(kit.request()))
            await kit.until(lambda: asked[0])
            (active,) = world.serving._active.values()
            world.serving._carry_out(world.serving.machine.verifier_lost(active.session, 1))
            await kit.until(lambda: active.epoch == 2 or (answer == "before the move" and asked[0] == 2))
            go.set()
            assert await text == kit.follow(3, 40)
            world.objects._clock = lambda: float("inf")  # the tokens for the new verifier have expired by then
            await world.assert_empty()

    run(main())


def test_a_seeded_request_waits_for_what_its_dead_router_left_at_work(kit: Any, run: Any, monkeypatch: Any) -> None:
    """The id follows from the request, so the repetition meets the earlier session at the verifier."""
    monkeypatch.setattr(router_module, "ROOM_RETRY_SECONDS", 0.0)
    wish = kit.request(max_new=40, sampled=True, seed=7, session=SESSION)

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            serving = world.serving
            first = await serving.generate(wish)
            held = kit.hold(world.thread)
            serving._active.clear()  # as a router that starts knows nothing
            serving._slots.release()
            serving.machine.forget(SESSION)
            tries, admit = [0], serving.machine.admit

            def counted(*arguments: Any, **named: Any) -> Any:
                tries[0] += 1
                return admit(*arguments, **named)

            monkeypatch.setattr(serving.machine, "admit", counted)
            again = asyncio.create_task(world.text(wish))
            await kit.until(lambda: tries[0] > 2)
            held.set()
            assert await again == kit.follow(3, 40)
            assert first.session == SESSION
            await world.log.drop(first._active.commit_log)
            await world.assert_empty()

    run(main())


def test_a_seeded_session_does_not_decode_by_itself_because_an_assignment_is_late(kit: Any, run: Any) -> None:
    """That would cut its rounds elsewhere; only when nobody has come for long it goes on alone."""

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            for instance in world.serving.machine.instances.values():
                if instance.role is Role.DRAFTER:
                    instance.expires_ms = 0
            wish = kit.request(sampled=True, seed=7, session=SESSION)
            text = asyncio.create_task(world.text(wish))
            await kit.until(lambda: any(s.committed for s in world.engine.sessions.values()))
            (session,) = world.engine.sessions.values()
            now = world.verifier.moment()
            for ms, alone in ((UNDRAFTED_AFTER_MS, False), (SILENT_AFTER_MS, True)):
                world.verifier.moment = lambda ms=ms: structs.replace(now, ms=now.ms + ms)
                await world.verifier._tick()
                assert session.undrafted is alone
            assert await text == kit.follow(3, 40)
            await world.assert_empty()

    run(main())


def test_how_much_a_seeded_session_proposes_does_not_follow_from_earlier_rounds(kit: Any, run: Any) -> None:
    """A failover forgets them. Here nothing that is proposed is right, for which others propose less and less."""
    wrong = kit.toy.chain({token: (token + 1) % 64 for token in range(64)})

    async def main() -> None:
        async with kit.node(kit.toy.ToyDraft(wrong)) as world:
            chunks = await world.read(kit.request(max_new=60, sampled=True, seed=7, session=SESSION))
            rounds = [info for chunk in chunks for info in chunk.rounds]
            assert len(rounds) == 60
            assert [len(info.proposed) for info in rounds] == [0, *[4] * 55, 3, 2, 1, 1]
            await world.assert_empty()

    run(main())


# ---- rows that find no place ---------------------------------------------------------------------------------------


class Rows:
    """A cache that is away for a while."""

    def __init__(self, away: int) -> None:
        self.away, self.published = away, 0

    async def publish(self, rows: Any, scope: Any) -> str:
        if self.away:
            self.away -= 1
            raise Unavailable("the cache is away")
        self.published += 1
        return f"mlc://c/-/q_rows/{self.published}"

    async def release(self, uri: str) -> None: ...


class Verifier:
    """Refuses ``lost`` proposals because their rows are gone, then ends the session."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.proposals: list[Proposal] = []
        self.declined = 0

    async def propose(self, proposal: Proposal, caller: str) -> Any:
        self.proposals.append(proposal)
        if len(self.proposals) <= self.lost:
            raise QUnavailable("q_rows names rows that are not there")
        raise SessionClosed("over")

    async def decline(self, decline: Any, caller: str) -> SessionState:
        self.declined += 1
        raise SessionClosed("over")


class Nothing:
    async def status(self, status: Any) -> None: ...


@pytest.mark.parametrize(("away", "lost"), [(5, 0), (0, 5), (3, 3)])
@pytest.mark.parametrize("seeded", [True, False])
def test_a_seeded_session_proposes_as_it_would_have_when_the_cache_is_back(
    kit: Any, run: Any, monkeypatch: Any, seeded: bool, away: int, lost: int
) -> None:
    """Others decode that round without a proposal; here it would change every later token."""
    monkeypatch.setattr(drafter_module, "RETRY_SECONDS", (0.0,))
    sampling = {"sampling": Sampling(temperature_milli=1000, seed=7)} if seeded else {}
    contract = Contract(
        target=b"t" * 32, tokenizer=b"k" * 32, rule=2, m_max=8, max_new=100, stop=(), low_rounds=3, fallback=(1, 5),
        **sampling,
    )  # fmt: skip
    digest = digests.prefix_digest(digests.contract_digest(contract), (1, 2))
    assignment = Assignment(
        session=SESSION, epoch=1, contract=contract, verifier="v", drafter="d", prompt=(1, 2), round=0, committed=0,
        digest=digest, m_init=4,
    )  # fmt: skip

    async def main() -> None:
        verifier, rows, nothing = Verifier(lost), Rows(away), Nothing()
        drafter = Drafter("d", [Source(right(kit), None)], {"v": verifier}, rows, nothing, nothing)
        await drafter.assign(assignment)
        await kit.until(lambda: drafter.sessions == 0)
        await drafter.stop()
        if seeded:
            assert verifier.declined == 0
            assert [p.tokens for p in verifier.proposals] == [kit.follow(2, 4)] * (lost + 1)
        else:
            assert verifier.declined == 1

    run(main())
