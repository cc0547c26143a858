"""Roles that die, hang or lie, and logs that do not answer: the text stays the target's and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from sdcp_mono.core import digest as digests
from sdcp_mono.core.effects import Moment
from sdcp_mono.core.messages import Action, Assignment, Contract, Output, Proposal, Role, SessionState, Verdict
from sdcp_mono.core.ports import Draft, DraftRequest, LogAppend, PassCost
from sdcp_mono.core.problems import Conflict, SessionClosed, StaleEpoch, Unavailable
from sdcp_mono.roles import drafter as drafter_module
from sdcp_mono.roles import verifier as verifier_module
from sdcp_mono.roles.drafter import Drafter, Source
from sdcp_mono.roles.router import _now_ms
from sdcp_mono.roles.verifier import SILENT_AFTER_MS, STATUS_TTL_MS, UNDRAFTED_AFTER_MS


def right(kit: Any) -> Any:
    return kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))


class Hanging:
    """A drafter whose thread never comes back, as long as nobody lets it."""

    def __init__(self, kit: Any) -> None:
        self.kit, self.hanging, self.asked = kit, True, 0

    async def submit(self, request: DraftRequest) -> tuple[Draft, float]:
        self.asked += 1
        await self.kit.until(lambda: not self.hanging)
        (draft,) = right(self.kit).draft([request])
        return draft, PassCost(1, 1, 0.0)


def later(world: Any, ms: int) -> None:
    """The verifier's clock goes on by so much."""
    real = type(world.verifier).moment

    def moment() -> Moment:
        at = real(world.verifier)
        return Moment(at.ms + ms, at.load)

    world.verifier.moment = moment


# ---- drafters --------------------------------------------------------------------------------------------------


def test_a_hanging_drafter_stops_no_session(kit: Any, run: Any) -> None:
    """C-44: it takes the assignment and is not heard of again."""

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            hanging = Hanging(kit)
            world.drafter._sources[0].batcher.submit = hanging.submit
            text = asyncio.create_task(world.text(kit.request()))
            await kit.until(lambda: hanging.asked)
            later(world, SILENT_AFTER_MS)
            await world.verifier._tick()
            assert await text == kit.follow(3, 40)
            hanging.hanging = False
            await world.assert_empty()

    run(main())


def test_a_drafter_that_comes_back_is_used_again(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit)) as world:
            hanging = Hanging(kit)
            world.drafter._sources[0].batcher.submit = hanging.submit
            generation = await world.serving.generate(kit.request(max_new=3000))
            reading = asyncio.create_task(kit.collect(generation))
            await kit.until(lambda: hanging.asked)
            later(world, SILENT_AFTER_MS)
            await world.verifier._tick()
            (session,) = world.engine.sessions.values()
            await kit.until(lambda: session.committed > 5)
            assert session.silent
            hanging.hanging = False
            chunks = await reading
            assert tuple(t for c in chunks for t in c.tokens) == kit.follow(3, 3000)
            origins = [t.origin for c in chunks for r in c.rounds for t in r.tokens]
            assert "accepted" in origins[-200:]
            await generation.close()
            await world.assert_empty()

    run(main())


def test_sdcp_175_a_dead_drafters_sessions_finish_without_it(kit: Any, run: Any) -> None:
    """Its reports stop and its workers are gone; there is no other drafter."""

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            generation = await world.serving.generate(kit.request(max_new=300))
            reader = generation.chunks()
            chunks = [await anext(reader)]
            await world.drafter.stop()
            serving = world.serving
            dead = _now_ms() + STATUS_TTL_MS
            serving.machine.status(structs.replace(_verifier_status(serving), ttl_ms=60_000), _now_ms())
            serving._carry_out(serving.machine.tick(dead))
            assert serving.machine.alive(Role.DRAFTER, dead) == []
            later(world, SILENT_AFTER_MS)
            await world.verifier._tick()
            chunks += [chunk async for chunk in reader]
            assert tuple(t for c in chunks for t in c.tokens) == kit.follow(3, 300)
            assert (chunks[-1].finish, chunks[-1].error) == (4, "")
            await generation.close()
            world.drafter = None
            await world.assert_empty()

    run(main())


def _verifier_status(serving: Any) -> Any:
    (verifier,) = serving.machine.alive(Role.VERIFIER, _now_ms())
    return verifier.status


def test_amb_124_a_session_without_any_live_drafter_decodes_by_itself(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit)) as world:
            for instance in world.serving.machine.instances.values():
                if instance.role is Role.DRAFTER:
                    instance.expires_ms = 0
            text = asyncio.create_task(world.text(kit.request()))
            await kit.until(lambda: any(s.committed for s in world.engine.sessions.values()))
            later(world, UNDRAFTED_AFTER_MS)
            await world.verifier._tick()
            assert await text == kit.follow(3, 40)
            await world.assert_empty()

    run(main())


class Verifier:
    """A verifier as the drafter sees it; ``answer`` gets each proposal."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.proposals: list[Proposal] = []
        self.declined = 0

    async def propose(self, proposal: Proposal, caller: str) -> Verdict:
        self.proposals.append(proposal)
        verdict: Verdict = await self.answer(len(self.proposals), proposal)
        return verdict

    async def decline(self, decline: Any, caller: str) -> SessionState:
        self.declined += 1
        raise SessionClosed("over")

    async def output(self, session: bytes, from_: int, wait_ms: int | None = None) -> Output:
        return Output(session=session, epoch=1, from_=from_, tokens=(), final=False)


class Nothing:
    async def status(self, status: Any) -> None: ...


CONTRACT = Contract(
    target=b"t" * 32, tokenizer=b"k" * 32, rule=1, m_max=8, max_new=100, stop=(), low_rounds=3, fallback=(1, 5)
)


def assignment(round_: int = 0, **changes: Any) -> Assignment:
    digest = digests.prefix_digest(digests.contract_digest(CONTRACT), (1, 2))
    base = Assignment(
        session=b"s" * 16, epoch=1, contract=CONTRACT, verifier="v", drafter="d", prompt=(1, 2), round=round_,
        committed=0, digest=digest, m_init=2,
    )  # fmt: skip
    return structs.replace(base, **changes)


def alone(kit: Any, verifier: Any) -> Drafter:
    nothing: Any = Nothing()
    return Drafter("d", [Source(right(kit), None)], {"v": verifier}, nothing, nothing, nothing)


def closed(count: int, proposal: Proposal) -> Any:
    raise SessionClosed("over")


def test_sdcp_182_an_answer_that_never_comes_is_asked_for_again(kit: Any, run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafter_module, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(drafter_module, "RETRY_SECONDS", (0.0,))

    async def never(count: int, proposal: Proposal) -> Any:
        if count == 4:
            raise SessionClosed("over")
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        verifier = Verifier(never)
        drafter = alone(kit, verifier)
        await drafter.assign(assignment())
        await kit.until(lambda: drafter.sessions == 0)
        assert len(verifier.proposals) == 4
        assert all(proposal == verifier.proposals[0] for proposal in verifier.proposals)
        await drafter.stop()

    run(main())


def test_a_verifier_that_never_answers_does_not_keep_a_drafter_for_ever(kit: Any, run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafter_module, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(drafter_module, "RETRY_SECONDS", (0.0,))

    async def never(count: int, proposal: Proposal) -> Any:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        drafter = alone(kit, Verifier(never))
        await drafter.assign(assignment())
        await kit.until(lambda: drafter.sessions == 0)
        await drafter.stop()

    run(main())


def test_sdcp_090_amb_086_one_worker_a_session(kit: Any, run: Any) -> None:
    """Repeated, concurrent and newer assignments: at most one proposal is on its way at any time."""
    outstanding, most = 0, 0

    async def slow(count: int, proposal: Proposal) -> Any:
        nonlocal outstanding, most
        outstanding += 1
        most = max(most, outstanding)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            outstanding -= 1

    async def main() -> None:
        verifier = Verifier(slow)
        drafter = alone(kit, verifier)
        for _ in range(5):
            await asyncio.gather(*(drafter.assign(assignment()) for _ in range(3)))
            await kit.until(lambda: outstanding)
        await drafter.assign(assignment(3, epoch=2))
        await kit.until(lambda: verifier.proposals[-1].epoch == 2)
        with pytest.raises(StaleEpoch):
            await drafter.assign(assignment())
        with pytest.raises(Conflict):
            await drafter.assign(assignment(2, epoch=2))
        assert (most, outstanding, drafter.sessions) == (1, 1, 1)
        await drafter.stop()
        assert (outstanding, drafter.sessions) == (0, 0)

    run(main())


# ---- loops that must go on ---------------------------------------------------------------------------------------


def test_sdcp_085_reports_go_on_when_the_router_does_not_take_them(kit: Any, run: Any, monkeypatch: Any) -> None:
    """One failed report, whatever it fails with, must not silence a role until it expires."""
    assert STATUS_TTL_MS / 3 < STATUS_TTL_MS  # the interval, SDCP-066
    reports: dict[str, int] = {}

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            taken = world.serving.machine.status

            def status(report: Any, now_ms: int) -> None:
                reports[report.instance] = reports.get(report.instance, 0) + 1
                if reports[report.instance] == 1:
                    raise Unavailable("starting")
                if reports[report.instance] == 2:
                    raise RuntimeError("a fault")
                taken(report, now_ms)

            monkeypatch.setattr(world.serving.machine, "status", status)
            monkeypatch.setattr("sdcp_mono.roles.tasks.asyncio.sleep", kit.no_sleep)
            for role in (world.verifier, world.drafter):
                role._tasks.start(kit.repeat(0.0, role._report))
            await kit.until(lambda: sorted(min(count, 3) for count in reports.values()) == [3, 3])
            monkeypatch.undo()

    run(main())


def test_a_fault_in_a_tick_is_not_the_last_tick(kit: Any, run: Any, monkeypatch: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit)) as world:
            ticks = []

            def tick(at: Any) -> Any:
                ticks.append(at)
                if len(ticks) < 3:
                    raise RuntimeError("a fault")
                return []

            monkeypatch.setattr("sdcp_mono.roles.tasks.asyncio.sleep", kit.no_sleep)
            monkeypatch.setattr(world.engine, "tick", tick)
            monkeypatch.setattr(world.serving.machine, "tick", tick)
            for role in (world.verifier, world.serving):
                role._tasks.start(kit.repeat(0.0, role._tick))
            await kit.until(lambda: len(ticks) > 6)
            monkeypatch.undo()

    run(main())


# ---- logs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["unknown", "lost", "raises", "unreadable"])
def test_amb_150_a_log_that_loses_answers_loses_no_token(kit: Any, run: Any, monkeypatch: Any, trouble: str) -> None:
    monkeypatch.setattr(verifier_module, "APPEND_BACKOFF_SECONDS", (0.0,))

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            log, calls, reads = world.verifier._log, [0], [0]
            append, read = log.append, log.read

            async def doubtful(appends: Sequence[LogAppend]) -> Any:
                calls[0] += 1
                if calls[0] % 3:
                    return await append(appends)
                if trouble == "raises":
                    raise OSError("connection lost")
                if trouble != "unknown":
                    await append(appends)
                return ["unknown"] * len(appends)

            async def unreadable(name: str, from_: int = 0) -> Any:
                reads[0] += 1
                if trouble == "unreadable" and reads[0] % 2:
                    raise ConnectionError("not now")
                return await read(name, from_)

            log.append, log.read = doubtful, unreadable
            texts = await asyncio.gather(*(world.text(kit.request((i,), 60)) for i in range(3)))
            assert list(texts) == [kit.follow(i, 60) for i in range(3)]
            assert reads[0] > 0
            await world.assert_empty()

    run(main())


def test_a_fenced_verifier_moves_the_session_on_without_losing_a_token(kit: Any, run: Any) -> None:
    """Somebody fences the log; the router opens the session again, here at the same verifier, at a higher epoch."""

    async def main() -> None:
        async with kit.node(right(kit)) as world:
            generation = await world.serving.generate(kit.request(max_new=400))
            reader = generation.chunks()
            chunks = [await anext(reader)]
            (active,) = world.serving._active.values()
            assert await world.log.fence(active.commit_log, 2)
            chunks += [chunk async for chunk in reader]
            assert tuple(t for c in chunks for t in c.tokens) == kit.follow(3, 400)
            assert [c.from_ for c in chunks[1:]] == [c.from_ + len(c.tokens) for c in chunks[:-1]]
            assert chunks[-1].epoch == active.epoch >= 3
            await generation.close()
            world.objects._clock = lambda: float("inf")  # the tokens for the new verifier have expired by then
            await world.assert_empty()

    run(main())


def test_sdcp_148_a_switch_comes_back_to_the_only_drafter_after_a_while(kit: Any, run: Any, monkeypatch: Any) -> None:
    """Meanwhile the verifier decodes by itself (AMB-117, AMB-124)."""
    wrong = {t: (t + 1) % 64 for t in range(64)}

    async def main() -> None:
        async with kit.node(kit.toy.ToyDraft(kit.toy.chain(wrong)), m_fixed=2) as world:
            terms = structs.replace(world.serving.terms, fallback=(Action.SWITCH,), low_rounds=1)
            world.serving.terms = terms
            text = asyncio.create_task(world.text(kit.request(max_new=20)))
            await kit.until(lambda: any(r.stage.name == "WAITING" for r in world.serving.machine.sessions.values()))
            later(world, UNDRAFTED_AFTER_MS)
            await world.verifier._tick()
            assert await text == kit.follow(3, 20)
            await world.assert_empty()

    run(main())
