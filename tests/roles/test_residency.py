"""Room in the KV cache: who gets it, who has to give it up, and that nobody waits for ever (C-37, C-38)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sdcp_mono.core.problems import Unavailable, Unprocessable
from sdcp_mono.roles.residency import GROWTH, Residency

BLOCK = 16
PREFIX: tuple[int, ...] = tuple(range(4096))


class Rooms:
    """What a target model does about room, and nothing else. ``log`` says in which order things happened."""

    block_tokens = BLOCK

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.longest = blocks * BLOCK
        self.blocks: dict[bytes, int] = {}
        self.log: list[tuple[str, bytes]] = []

    @property
    def free_tokens(self) -> int:
        return (self.total - sum(self.blocks.values())) * BLOCK

    def admit(self, session: bytes, tokens: int, *, scope: bytes | None = None) -> bool:
        more = -(-tokens // BLOCK) - self.blocks.get(session, 0)
        if more * BLOCK > self.free_tokens:
            return False
        self.blocks[session] = self.blocks.get(session, 0) + max(more, 0)
        self.log.append(("admit", session))
        return True

    def release(self, session: bytes) -> None:
        if self.blocks.pop(session, None) is not None:
            self.log.append(("release", session))


class Restored:
    """Notes whose KV was brought back, and how much of the prefix."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, int]] = []

    async def __call__(self, session: bytes, prefix: Sequence[int], scope: bytes | None) -> int:
        self.calls.append((session, len(prefix)))
        return 0


class World:
    def __init__(self, blocks: int) -> None:
        self.rooms = Rooms(blocks)
        self.thread = ThreadPoolExecutor(1)
        self.restored = Restored()
        self.residency = Residency(self.rooms, self.call, self.restored)  # type: ignore[arg-type]

    def call(self, function: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self.thread, function)

    async def open(self, session: bytes, prompt: int, limit: int) -> None:
        await self.residency.open(session, PREFIX[:prompt], limit, None)

    async def work(self, session: bytes, tokens: int) -> None:
        """One pass."""
        async with self.residency.hold(session, tokens, PREFIX, tokens - 1):
            assert self.rooms.blocks[session] * BLOCK >= tokens
            await self.call(lambda: None)
            assert self.rooms.blocks[session] * BLOCK >= tokens


def test_a_session_gets_room_for_its_prompt_and_grows(run: Any) -> None:
    async def main() -> None:
        world = World(40)
        await world.open(b"a", 20, 500)
        assert world.rooms.blocks[b"a"] == -(-(20 + GROWTH) // BLOCK)
        for tokens in range(21, 501):
            await world.work(b"a", tokens)
        assert world.rooms.log.count(("admit", b"a")) == 1 + 3  # at 20, 149, 277 and 405 tokens
        assert world.residency.preempted == 0
        await world.residency.close(b"a")
        assert world.rooms.blocks == {}

    run(main())


def test_what_never_fits_and_what_does_not_fit_now(run: Any) -> None:
    async def main() -> None:
        world = World(12)
        with pytest.raises(Unprocessable, match="193 tokens does not fit; 192 is the most"):
            await world.open(b"x", 10, 12 * BLOCK + 1)
        await world.open(b"a", 40, 192)
        with pytest.raises(Unavailable, match="no room"):  # opening preempts nobody
            await world.open(b"b", 60, 192)
        await world.residency.close(b"b")
        assert world.rooms.blocks == {b"a": 11}
        await world.residency.close(b"a")
        await world.open(b"b", 60, 192)

    run(main())


def test_the_youngest_gives_way_and_comes_back(run: Any) -> None:
    async def main() -> None:
        world = World(30)
        for name in (b"a", b"b", b"c"):
            await world.open(name, 10, 300)  # 9 blocks each
        for tokens in range(11, 170):  # a grows past its 9 blocks, which needs c's
            await world.work(b"a", tokens)
        assert world.residency.preempted == 1
        assert b"c" not in world.rooms.blocks
        assert b"b" in world.rooms.blocks
        waiting = asyncio.ensure_future(world.work(b"c", 11))
        await asyncio.wait((waiting,), timeout=0.2)
        assert not waiting.done()  # a has 18 blocks, b has 9
        await world.residency.close(b"a")
        await waiting
        assert world.restored.calls[-1] == (b"c", 10)
        assert world.residency.preempted == 1

    run(main())


def test_c_37_who_is_in_a_pass_is_not_preempted_before_it_ends(run: Any) -> None:
    async def main() -> None:
        world = World(20)
        await world.open(b"a", 10, 300)
        await world.open(b"b", 10, 300)
        order: list[str] = []
        in_pass, go_on = asyncio.Event(), asyncio.Event()

        async def long_pass() -> None:
            async with world.residency.hold(b"b", 11, PREFIX, 10):
                in_pass.set()
                await go_on.wait()
                assert b"b" in world.rooms.blocks
                order.append("b's pass")

        async def elder() -> None:
            await world.work(b"a", 200)
            order.append("a has grown")

        tasks = [asyncio.ensure_future(long_pass())]
        await in_pass.wait()
        tasks += [asyncio.ensure_future(elder()), asyncio.ensure_future(world.residency.preempt(b"b"))]
        await asyncio.wait(tasks, timeout=0.2)
        assert order == []
        go_on.set()
        await asyncio.gather(*tasks)
        assert order == ["b's pass", "a has grown"]

    run(main())


def test_a_session_that_is_closed_while_it_waits_takes_nothing(run: Any) -> None:
    async def main() -> None:
        world = World(20)
        await world.open(b"a", 10, 300)
        await world.open(b"b", 10, 300)
        await world.work(b"a", 200)
        waiting = asyncio.ensure_future(world.residency.hold(b"b", 11, PREFIX, 10).__aenter__())
        await asyncio.wait((waiting,), timeout=0.2)
        await world.residency.close(b"b")
        await waiting  # its pass, were there one, would be told that there is no such session
        assert set(world.rooms.blocks) == {b"a"}
        await world.residency.close(b"a")
        assert world.rooms.blocks == {}

    run(main())


def test_a_cancelled_wait_leaves_nothing_held(run: Any) -> None:
    async def main() -> None:
        world = World(20)
        await world.open(b"a", 10, 300)
        await world.open(b"b", 10, 300)
        await world.work(b"a", 200)
        waiting = asyncio.ensure_future(world.work(b"b", 11))
        await asyncio.wait((waiting,), timeout=0.2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await world.residency.close(b"a")
        await world.work(b"b", 11)
        assert await world.residency.preempt(b"b")  # so nothing holds it

    run(main())


@pytest.mark.parametrize("seed", range(8))
def test_c_38_all_finish_under_pressure(run: Any, seed: int) -> None:
    """Twelve sessions that together want several times what there is, one of them all of it; some leave early."""

    async def main() -> None:
        source = random.Random(seed)
        world = World(40)
        finished: list[int] = []

        async def session(number: int) -> None:
            name, prompt = bytes([number]), source.randrange(5, 50)
            end = 40 * BLOCK if number == 3 else prompt + source.randrange(200, 500)
            end = min(end, 40 * BLOCK)
            while True:
                try:
                    await world.open(name, prompt, end)
                    break
                except Unavailable:
                    await world.residency.close(name)
                    await asyncio.wait((asyncio.ensure_future(world.call(lambda: None)),))
            tokens = prompt
            while tokens < end and not (number % 5 == 4 and tokens > prompt + 20):
                tokens = min(end, tokens + source.randrange(1, 9))
                await world.work(name, tokens)
            await world.residency.close(name)
            finished.append(number)

        await asyncio.gather(*(session(number) for number in range(12)))
        assert sorted(finished) == list(range(12))
        assert world.rooms.blocks == {}
        assert world.residency.preempted > 0

    run(main())
