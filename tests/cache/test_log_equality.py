"""Commit logs of other stores answer as SQLite's does, whatever is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from sdcp_mono.cache.bucket import Bucket
from sdcp_mono.cache.bucket_log import BucketLog
from sdcp_mono.cache.sqlite_log import SqliteCommitLog
from sdcp_mono.core.problems import Conflict, UnknownSession

from .log_records import make_append

NAMES = st.sampled_from(["a", "b"])
PLACES = st.sampled_from([0, 0, 0, -1, 1, -2])  # from the end
STEPS = st.one_of(
    st.tuples(st.just("create"), NAMES),
    st.tuples(st.just("append"), NAMES, PLACES, st.integers(1, 3), st.sampled_from([7, 8])),
    st.tuples(st.just("append"), NAMES, PLACES, st.integers(1, 3), st.sampled_from([7, 8])),
    st.tuples(st.just("fence"), NAMES, st.integers(1, 4)),
    st.tuples(st.just("read"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("drop"), NAMES),
    st.tuples(st.just("names")),
)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), STEPS), max_size=30))
def test_three_adapters_on_one_bucket_answer_as_one_sqlite_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, Any]]
) -> None:
    bucket = Bucket(MemoryStore())
    adapters = [BucketLog(bucket) for _ in range(3)]

    async def ask(log: Any, step: Any, length: int) -> Any:
        match step:
            case ("append", name, place, epoch, token):
                sequence = max(0, length + place)
                return list(await log.append([make_append(name, sequence, epoch=epoch, token=token)]))
            case (method, *arguments):
                try:
                    return await getattr(log, method)(*arguments)
                except (Conflict, UnknownSession) as refusal:
                    return type(refusal)

    async def compare(reference: SqliteCommitLog) -> None:
        for number, step in steps:
            length = len(await reference.read(step[1])) if len(step) > 1 else 0
            assert await ask(adapters[number], step, length) == await ask(reference, step, length), step

    with SqliteCommitLog(tmp_path_factory.mktemp("reference") / "commits.db") as reference:
        asyncio.run(compare(reference))
