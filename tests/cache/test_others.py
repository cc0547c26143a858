"""What other machines hold: they may lie, hang or leave, and are believed, waited for and asked accordingly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sdcp_mono.cache import others
from sdcp_mono.cache.blob import pack
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.cache.stats import Rate
from sdcp_mono.core.ports import Got

from .gated import SIZE, blob, content, opened, run, until


class Answering(MemoryObjects):
    """Others that answer a batch as the test says."""

    def __init__(self, answer: Any) -> None:
        super().__init__(1 << 22)
        self._answer = answer

    async def get_many(self, uris: Sequence[str], scope: bytes | None) -> Sequence[Got]:
        return await self._answer(uris)


class Unreadable:
    """A value whose bytes can't be had."""

    nbytes = SIZE

    def to_bytes(self) -> bytes:
        raise OSError(5, "gone")


@pytest.mark.parametrize("answer", ["too few", "too many", "unreadable", "nothing"])
def test_answers_that_no_store_should_give_are_a_miss_and_a_counter(tmp_path: Path, answer: str) -> None:
    async def answered(uris: Sequence[str]) -> Any:
        match answer:
            case "too few":
                return [Got("missing")] * (len(uris) - 1)
            case "too many":
                return [Got("missing")] * (len(uris) + 1)
            case "unreadable":
                return [Got("ok", Unreadable())] * len(uris)  # type: ignore[arg-type]
            case _:
                return None

    async def main() -> None:
        async with opened(tmp_path, Answering(answered)) as (made, _):
            loaded = await made.load([blob(0), blob(1)], 5.0)
            assert list(loaded.blocks) == []
            assert made.stats()[-1].errors > 0

    run(main())


def test_a_disk_that_raises_while_others_answer_is_a_miss(tmp_path: Path) -> None:
    """Their blob needs room, and whatever goes wrong in making it is no business of who asks."""

    async def answered(uris: Sequence[str]) -> Any:
        return [Got("ok", pack(blob(0), content(0)))]

    async def main() -> None:
        async with opened(tmp_path, Answering(answered)) as (made, disk):
            find = disk.find
            asked = []

            def failing(key: bytes) -> Any:
                asked.append(key)
                if len(asked) > 1:  # not where it is asked what is missing, but while room is made
                    raise RuntimeError("nobody thought of it")
                return find(key)

            made.host.reserve = lambda blob, *, staging=False: made._saved(blob.key)  # type: ignore[assignment, return-value]
            disk.find = failing  # type: ignore[method-assign]
            loaded = await made.load([blob(0)], 5.0)
            assert list(loaded.blocks) == []
            await asyncio.to_thread(made.settle)  # a job is counted when it is over
            assert sum(stats.errors for stats in made.stats()) > 0
            del made.host.reserve
            disk.find = find  # type: ignore[method-assign]

    run(main())


def test_a_load_that_is_cancelled_while_others_are_asked_holds_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        asked, never = asyncio.Event(), asyncio.Event()

        async def answered(uris: Sequence[str]) -> Any:
            asked.set()
            await never.wait()

        async with opened(tmp_path, Answering(answered)) as (made, _):
            await made.put(blob(0), content(0))
            loading = asyncio.ensure_future(made.load([blob(0), blob(1)], 30.0))
            await asked.wait()
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert made.host.stats().pinned_bytes == 0

    run(main())


def test_nothing_is_sent_after_the_end(tmp_path: Path) -> None:
    """What was being copied at the end would begin to be sent when nobody waits for it any more."""

    async def main() -> None:
        shared = MemoryObjects(1 << 22)
        begun, go = threading.Event(), threading.Event()

        def done() -> None:
            begun.set()
            assert go.wait(30)

        async with opened(tmp_path, shared) as (made, _):
            assert made.others is not None
            assert made.offer(blob(0), content(0), done)
            await until(begun.is_set)
            stopping = asyncio.ensure_future(made.stop())
            await asyncio.sleep(0)
            go.set()
            await stopping
            for _ in range(20):
                await asyncio.sleep(0)
            assert made.others._sending == set()
            assert shared.stats().objects == 0

    run(main())


def test_others_that_hang_are_predicted_to_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    """No byte came, so no rate was measured; but it is known that it was not faster than this."""
    monkeypatch.setattr(others.time, "perf_counter", clock)

    async def answered(uris: Sequence[str]) -> Any:
        clock.pass_ms(1000)
        await asyncio.Event().wait()

    async def main() -> None:
        async with opened(tmp_path, Answering(answered)) as (made, _):
            _, before = made.predict([blob(0)])
            for _ in range(3):
                (await made.load([blob(0)], 0.02)).close()
            _, after = made.predict([blob(0)])
            assert after > 1.5 * before

    run(main())


@pytest.mark.parametrize("status", ["missing", "failed"])
def test_a_quick_no_says_nothing_about_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any, status: Any
) -> None:
    monkeypatch.setattr(others.time, "perf_counter", clock)

    async def answered(uris: Sequence[str]) -> Any:
        clock.pass_ms(0.01)  # type: ignore[arg-type]
        return [Got(status)] * len(uris)

    async def main() -> None:
        async with opened(tmp_path, Answering(answered)) as (made, _):
            before = made.predict([blob(0)])
            (await made.load([blob(0)], 5.0)).close()
            assert made.predict([blob(0)]) == before

    run(main())


def test_what_was_slow_is_tried_again_after_a_while(clock: Any) -> None:
    """Otherwise a slow minute were for ever: what is predicted to be slow is never asked, and so never measured."""
    rate = Rate(1e6, clock)
    for _ in range(20):
        rate.measured(1000, 1.0)
    assert rate.seconds(1_000_000) > 10.0
    clock.pass_ms(59_000)
    assert rate.seconds(1_000_000) > 10.0
    clock.pass_ms(2_000)
    assert rate.seconds(1_000_000) == 1.0
    rate.measured(1000, 1.0)  # still slow
    assert rate.seconds(1_000_000) > 10.0


def test_what_was_fast_stays_fast(clock: Any) -> None:
    rate = Rate(1e6, clock)
    for _ in range(20):
        rate.measured(1_000_000, 0.1)
    clock.pass_ms(3_600_000)
    assert rate.seconds(1_000_000) < 0.2
