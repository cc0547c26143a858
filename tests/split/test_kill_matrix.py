"""A few runs of ``benchmarks.kill_matrix`` on real processes: what a dead, paused or cut off role costs is time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.kill_matrix import MEMBERS, plans
from benchmarks.kill_run import Bench, Plan, compared, linear
from benchmarks.namespaces import Namespaces, why_not
from sdcp_mono.core.messages import CommitRecord, FenceRecord

D = bytes(32)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """With namespaces where they may be made; elsewhere a cut is a pause."""
    with ExitStack() as stack:
        spaces = None if why_not() else stack.enter_context(Namespaces(MEMBERS))
        yield stack.enter_context(Bench(tmp_path_factory.mktemp("kill"), spaces))


@pytest.mark.parametrize(
    "case",
    [
        "verifier kill prefill n=2 1",
        "verifier kill appended seeded 3",
        "verifier pause proposed greedy 2",
        "verifier cut proposed seeded 3",
        "drafter kill drafting seeded 2",
        "drafter pause idle greedy 2",
        "router kill appended n=2 3",
        "router kill prefill seeded 1",
        "cache kill proposed n=2 2",
    ],
)
def test_no_token_is_lost_repeated_or_changed(bench: Bench, case: str) -> None:
    role, fault, phase, workload, call = case.split()
    fault = "pause" if fault == "cut" and bench.spaces is None else fault
    result = bench.run(Plan(case, role, fault, phase, workload, int(call)))
    assert result.fired
    assert result.problems == []
    assert result.refused == result.forged
    if role == "verifier":
        assert result.epoch > 1
        assert result.forged


def test_the_plan_covers_every_cell_once_before_any_twice() -> None:
    cells = [(p.role, p.fault, p.phase, p.workload) for p in plans(200, seed=3)]
    assert len(set(cells[:180])) == 4 * 3 * 5 * 3
    assert plans(200, seed=3) == plans(200, seed=3) != plans(200, seed=4)


def record(epoch: int, round_: int, tokens: tuple[int, ...], committed: int) -> CommitRecord:
    return CommitRecord(epoch=epoch, round=round_, emitted=tokens, committed=committed, digest=D)


def test_the_judges_see_what_they_are_there_for() -> None:
    first, fence, second = record(1, 1, (7, 8), 2), FenceRecord(epoch=2), record(2, 2, (9,), 3)
    assert linear([first, fence, second], [7, 8, 9]) == []
    assert "fence" in linear([first, fence, record(1, 2, (9,), 3)], [7, 8, 9])[0]
    assert "round" in linear([first, first], [7, 8, 7, 8])[0]
    assert "not those that were read" in linear([first], [7])[0]
    assert compared({0: [1, 2]}, {0: [1, 2]}) == []
    for found, problem in (([1], "lost"), ([1, 2, 2], "duplicated"), ([1, 3], "changed")):
        assert compared({0: found}, {0: [1, 2]})[0].startswith(problem)
