"""Sessions that come and go: slots, queue, readers, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from sdcp_mono.core.ports import Draft, DraftRequest, ScoreRequest
from sdcp_mono.core.problems import BadContract, TooManyRequests, Unavailable, Unprocessable


def right(kit: Any) -> Any:
    return kit.toy.ToyDraft(kit.toy.chain(kit.EDGES))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_forty_sessions_that_join_and_leave(kit: Any, run: Any) -> None:
    async def one(world: Any, index: int, rng: random.Random) -> None:
        wish = kit.request((index,), 20 + index, sampled=index % 4 == 3)
        await turns(rng.randrange(300))
        if index % 5 == 4:  # leaves when it has had enough
            generation = await world.serving.generate(wish)
            async for chunk in generation.chunks():
                assert chunk.tokens == kit.follow(index, 20 + index)[chunk.from_ :][: len(chunk.tokens)]
                if chunk.from_ > 5:
                    break
            await generation.close()
        else:
            assert await world.text(wish) == kit.follow(index, 20 + index)

    async def main() -> None:
        rng = random.Random(1)
        half = {t: n for t, n in kit.EDGES.items() if t % 2}
        async with kit.node(kit.toy.ToyDraft(kit.toy.chain(half)), max_sessions=8) as world:
            await asyncio.gather(*(one(world, index, rng) for index in range(40)))
            await world.assert_empty()

    run(main())


def test_sdcp_106_rounds_of_many_sessions_share_passes(kit: Any, run: Any) -> None:
    sizes: list[int] = []

    class Counting(kit.toy.ToyTarget):  # type: ignore[misc, name-defined]
        def step(self, requests: Any) -> Any:
            sizes.append(len(requests))
            return super().step(requests)

    async def main() -> None:
        async with kit.node(right(kit), target=Counting(kit.toy.chain(kit.EDGES), kit.CARD), instant=True) as world:
            readers = [asyncio.create_task(world.text(kit.request((i,), 60))) for i in range(8)]
            await kit.until(lambda: len(world.engine.sessions) == 8)
            held = kit.hold(world.thread)
            live = [s for s in world.engine.sessions.values() if s.ended is None]
            await kit.until(lambda: world.verifier._batcher.queue == sum(s.ended is None for s in live))
            waiting = world.verifier._batcher.queue
            before = len(sizes)
            held.set()
            texts = await asyncio.gather(*readers)
            assert waiting > 1
            assert waiting in sizes[before : before + 2]  # all of them in one pass
            assert texts == [kit.follow(i, 60) for i in range(8)]
            await world.assert_empty()

    run(main())


# ---- slots and queue ---------------------------------------------------------------------------------------------


def test_a_full_queue_is_refused_and_the_others_are_served(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit), max_sessions=2, max_queue=3) as world:
            first = [await world.serving.generate(kit.request((i,))) for i in range(2)]
            queued = [asyncio.create_task(world.text(kit.request((i,)))) for i in range(2, 5)]
            await turns(3)
            assert (world.serving.stats()["active"], world.serving.stats()["waiting"]) == (2, 3)
            with pytest.raises(TooManyRequests) as refusal:
                await world.serving.generate(kit.request((9,)))
            assert refusal.value.retry_after_ms
            assert len(world.engine.sessions) == 2
            for generation in first:
                await generation.close()
            assert [await task for task in queued] == [kit.follow(i, 40) for i in range(2, 5)]
            await world.assert_empty()

    run(main())


def test_no_queue_at_all(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(max_sessions=1, max_queue=0) as world:
            generation = await world.serving.generate(kit.request())
            with pytest.raises(TooManyRequests):
                await world.serving.generate(kit.request())
            await generation.close()
            assert await world.text(kit.request()) == kit.follow(3, 40)
            await world.assert_empty()

    run(main())


def test_who_waits_too_long_is_told(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(max_sessions=1, queue_seconds=1e-9) as world:
            generation = await world.serving.generate(kit.request())
            with pytest.raises(Unavailable) as refusal:
                await world.serving.generate(kit.request((4,)))
            assert refusal.value.retry_after_ms
            await generation.close()
            await world.assert_empty()

    run(main())


def test_a_waiter_that_gives_up_leaves_no_gap_in_the_queue(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(max_sessions=1) as world:
            generation = await world.serving.generate(kit.request())
            waiting = [asyncio.create_task(world.text(kit.request((i,)))) for i in range(4)]
            await turns(3)
            waiting[0].cancel(), waiting[2].cancel()
            await generation.close()
            assert [await waiting[i] for i in (1, 3)] == [kit.follow(i, 40) for i in (1, 3)]
            await asyncio.wait(waiting)
            await world.assert_empty()

    run(main())


def test_a_session_without_room_waits_for_one_that_ends(kit: Any, run: Any) -> None:
    """Several wait; none of them hurries the others in circles."""

    async def main() -> None:
        async with kit.node(right(kit), max_sessions=8) as world:
            world.target.room = 1
            generation = await world.serving.generate(kit.request())
            waiting = [asyncio.create_task(world.text(kit.request((i,)))) for i in range(3)]
            await kit.until(lambda: len(world.serving._active) == 4)
            opened: list[Any] = []
            admit = world.target.admit
            world.target.admit = lambda *args, **scope: (opened.append(args), admit(*args, **scope))[1]
            await turns(2000)
            assert len(opened) <= 6  # each once now, perhaps once more; not once a turn
            await generation.close()
            assert [await task for task in waiting] == [kit.follow(i, 40) for i in range(3)]
            await world.assert_empty()

    run(main())


def test_what_can_never_fit_is_refused_at_once(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit)) as world:
            for wish, refusal in (
                (kit.request(max_new=4096), BadContract),
                (kit.request(()), Unprocessable),
                (kit.request((64,)), Unprocessable),
            ):
                with pytest.raises(refusal):
                    await world.serving.generate(wish)
                await world.assert_empty()
            world.target.longest = 4
            with pytest.raises(Unprocessable, match=r"max_new: a session of .* tokens does not fit; 4 is the most"):
                await world.serving.generate(kit.request())
            await world.assert_empty()

    run(main())


# ---- readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
def test_c_42_a_reader_that_leaves_midway_frees_everything(kit: Any, run: Any, sampled: bool) -> None:
    async def main() -> None:
        async with kit.node(right(kit)) as world:
            for chunks in range(6):
                generation = await world.serving.generate(kit.request(max_new=200, sampled=sampled))
                reader = generation.chunks()
                for _ in range(chunks):
                    await anext(reader)
                await generation.close()
                await generation.close()  # any number of times
                await world.assert_empty()

    run(main())


@pytest.mark.parametrize("first", range(0, 120, 24))
def test_a_request_that_is_cancelled_anywhere_leaves_nothing(kit: Any, run: Any, first: int) -> None:
    """At every turn of the event loop: in the queue, while opening, reading, closing."""

    async def main() -> None:
        draft = kit.toy.ToyDraft(kit.toy.chain({t: n for t, n in kit.EDGES.items() if t % 2}))
        async with kit.node(draft, max_sessions=2) as world:
            for after in range(first, first + 24):
                tasks = [asyncio.create_task(world.text(kit.request((i,), 12, sampled=i == 1))) for i in range(3)]
                await turns(after)
                for task in tasks:
                    task.cancel()
                if after % 2:
                    await turns(1)
                    for task in tasks:
                        task.cancel()  # and again, while it cleans up
                await asyncio.wait(tasks)
                await kit.until(lambda: not world.serving._active)
                await world.assert_empty()
            assert await world.text(kit.request()) == kit.follow(3, 40)

    run(main())


def test_two_readers_of_one_seeded_session(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit), max_sessions=1) as world:
            wish = kit.request(max_new=40, sampled=True, seed=7, session=b"s" * 16)
            first, second = await asyncio.gather(world.serving.generate(wish), world.serving.generate(wish))
            assert first.session == second.session == b"s" * 16
            assert len(world.engine.sessions) == 1
            reader = first.chunks()
            head = await anext(reader)
            await first.close()
            late = await world.serving.generate(wish)  # a third, in the middle
            await late.close()
            texts = [tuple(t for c in [c async for c in second.chunks()] for t in c.tokens)]
            assert texts[0] == kit.follow(3, 40)
            assert head.tokens == texts[0][: len(head.tokens)]
            await second.close()
            await world.assert_empty()

    run(main())


@pytest.mark.parametrize("patience", range(0, 40, 3))
def test_the_second_reader_does_not_depend_on_the_first(kit: Any, run: Any, patience: int) -> None:
    """Who asked first leaves while the session is being opened."""

    async def main() -> None:
        async with kit.node(right(kit), max_sessions=1) as world:
            wish = kit.request(max_new=30, sampled=True, seed=7, session=b"s" * 16)
            first = asyncio.create_task(world.text(wish))
            await turns(1)
            second = asyncio.create_task(world.text(wish))
            await turns(patience)
            first.cancel()
            assert await second == kit.follow(3, 30)
            await asyncio.wait((first,))
            await world.assert_empty()

    run(main())


@pytest.mark.parametrize("patience", range(0, 60, 4))
def test_c_41_a_retry_of_a_cut_seeded_request_gives_the_same_text(kit: Any, run: Any, patience: int) -> None:
    def p(last: int) -> Any:
        weights = [1 + (3 * last + 5 * x) % 7 for x in range(64)]
        return [w / sum(weights) for w in weights]

    wish = kit.request(max_new=40, sampled=True, seed=7, session=b"s" * 16)

    async def main() -> None:
        draft = kit.toy.ToyDraft(lambda last: [1 / 64] * 64)
        async with kit.node(draft, target=kit.toy.ToyTarget(p, kit.CARD)) as world:
            text = await world.text(wish)
            for cut in range(3):
                gone = asyncio.create_task(world.text(wish))
                await turns(patience + cut)
                gone.cancel()
                await turns(cut)
                assert await world.text(wish) == text
                await asyncio.wait((gone,))
            await world.assert_empty()

    run(main())


def test_a_failed_opening_is_every_readers_refusal(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit)) as world:
            wish = kit.request((64,), sampled=True, seed=7, session=b"s" * 16)
            outcomes = await asyncio.gather(*(world.text(wish) for _ in range(3)), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [Unprocessable] * 3
            await world.assert_empty()

    run(main())


def test_closing_while_somebody_reads_ends_the_reading(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit)) as world:
            generation = await world.serving.generate(kit.request(max_new=200))
            held = kit.hold(world.thread)
            reading = asyncio.create_task(kit.collect(generation))
            await turns(20)
            closing = asyncio.create_task(generation.close())
            chunks = await reading
            held.set()
            await closing
            assert (chunks[-1].final, chunks[-1].finish) == (True, 5)
            await world.assert_empty()

    run(main())


def test_a_drafter_that_learns_too_late_lets_go(kit: Any, run: Any) -> None:
    """The session is over while its draft is computed: the draft goes nowhere, the next session is not disturbed."""
    seen: list[tuple[bytes, int]] = []

    class Watching(kit.toy.ToyDraft):  # type: ignore[misc, name-defined]
        def _draft(self, request: DraftRequest) -> Draft:
            seen.append((request.session, request.round))
            answer: Draft = super()._draft(request)
            return answer

    async def main() -> None:
        async with kit.node(Watching(kit.toy.chain(kit.EDGES))) as world:
            generation = await world.serving.generate(kit.request(max_new=100))
            reader = generation.chunks()
            while not seen:
                await anext(reader)
            held = kit.hold(world.thread)
            closing = asyncio.create_task(generation.close())
            await turns(30)
            held.set()
            await closing
            await world.assert_empty()
            assert world.drafter.sessions == 0
            assert await world.text(kit.request()) == kit.follow(3, 40)

    run(main())


def test_requests_beyond_what_the_verifier_holds_wait(kit: Any, run: Any) -> None:
    async def main() -> None:
        async with kit.node(right(kit), max_sessions=4) as world:
            room: set[bytes] = set()

            def watch(request: ScoreRequest) -> None:
                room.add(request.session)

            world.target.fail = lambda request: watch(request)
            texts = await asyncio.gather(*(world.text(kit.request((i,), 10)) for i in range(20)))
            assert list(texts) == [kit.follow(i, 10) for i in range(20)]
            assert len(room) == 20
            await world.assert_empty()

    run(main())
