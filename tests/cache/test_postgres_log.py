"""What only the log in PostgreSQL can meet: lost lines, restarts, a server that is not safe (6.8, AMB-147 to 151)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sdcp_mono.cache import postgres_log
from sdcp_mono.cache.commit_log import CommitLogUnusable
from sdcp_mono.cache.postgres_log import PostgresLog
from sdcp_mono.core.problems import Unavailable

from .log_records import make_append, run
from .postgres import Line, PostgresServer, binaries, running

ROOT = Path(__file__).parents[2]
APPEND = b"UPDATE sdcp_log SET length = length + 1\n        FROM"


@pytest.fixture
def line(postgres_server: PostgresServer) -> Iterator[Line]:
    line = Line(postgres_server.port)
    yield line
    line.close()


@pytest.fixture
def log(line: Line, postgres_server: PostgresServer, postgres_url: str) -> Iterator[PostgresLog]:
    """Through a line that can be cut."""
    with PostgresLog(postgres_url.replace(f":{postgres_server.port}/", f":{line.port}/")) as log:
        yield log


async def patiently(log: PostgresLog, append: Any) -> Any:
    """The outcome once the connection is there again."""
    async with asyncio.timeout(20):
        while (outcomes := await log.append([append])) == ["unknown"]:
            pass
    return outcomes


def test_amb_150_stored_but_the_answer_is_lost(log: PostgresLog, line: Line) -> None:
    run(log.create("a"), log.append([make_append("a", 0)]))
    line.lose = APPEND
    assert run(log.append([make_append("a", 1)])) == [["unknown"]]
    assert line.lost.is_set()
    assert run(patiently(log, make_append("a", 1))) == [["ok"]]
    assert run(log.read("a")) == [tuple(make_append("a", sequence).record for sequence in range(2))]


def test_amb_150_another_writer_came_while_the_answer_was_lost(log: PostgresLog, line: Line, postgres_url: str) -> None:
    run(log.create("a"))
    line.refuse = APPEND
    assert run(log.append([make_append("a", 0)])) == [["unknown"]]
    with PostgresLog(postgres_url) as router:
        assert run(router.fence("a", 2)) == [True]
    assert run(patiently(log, make_append("a", 0))) == [["fenced"]]


def test_a_server_that_stops_answering_is_given_up(
    log: PostgresLog, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line stays open, as where a process is stopped: the caller's wait ends, and a new line is taken."""
    run(log.create("a"))
    monkeypatch.setattr(postgres_log, "ANSWER_SECONDS", 0.3)
    line.hold, line.lose = True, APPEND
    assert run(log.append([make_append("a", 0)])) == [["unknown"]]
    assert run(patiently(log, make_append("a", 0))) == [["ok"]]


def test_a_server_that_restarts_is_found_again(postgres_server: PostgresServer, postgres_url: str) -> None:
    with PostgresLog(postgres_url) as log:
        run(log.create("a"), log.append([make_append("a", 0)]))
        postgres_server.stop()
        assert run(log.append([make_append("a", 1)])) == [["unknown"]]
        with pytest.raises(Unavailable, match="can't be written"):
            run(log.read("a"))
        postgres_server.start()
        assert run(patiently(log, make_append("a", 1))) == [["ok"]]
        assert len(run(log.read("a"))[0]) == 2


def test_two_processes_append_to_the_same_logs_in_opposite_orders(postgres_url: str) -> None:
    """Each call locks many heads: what ends as a deadlock there is repeated call by call, and loses nothing."""
    names = [f"log-{number}" for number in range(32)]

    async def main(one: PostgresLog, other: PostgresLog) -> None:
        for name in names:
            await one.create(name)
        for sequence in range(0, 40, 2):
            ups = [make_append(name, sequence) for name in names]
            downs = [make_append(name, sequence + 1) for name in reversed(names)]
            first, second = await asyncio.gather(one.append(ups), other.append(downs))
            again = await one.append(ups), await other.append(downs)
            assert again == (["ok"] * 32, ["ok"] * 32), (first, second)

    with PostgresLog(postgres_url) as one, PostgresLog(postgres_url) as other:
        asyncio.run(main(one, other))
        assert [len(run(one.read(name))[0]) for name in names] == [40] * 32


def test_appends_that_wait_together_share_a_statement(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    store = postgres_log._store

    def counting(connection: Any, rows: Any) -> Any:
        sizes.append(len(rows))
        return store(connection, rows)

    async def main(log: PostgresLog) -> None:
        await asyncio.gather(*(log.create(f"log-{number}") for number in range(8)))
        monkeypatch.setattr(postgres_log, "_store", counting)
        holding = asyncio.create_task(log._call(lambda connection: connection.execute("SELECT pg_sleep(0.1)")))
        await asyncio.sleep(0)
        await asyncio.gather(holding, *(log.append([make_append(f"log-{number}", 0)]) for number in range(8)))

    with PostgresLog(postgres_url) as log:
        asyncio.run(main(log))
    assert sum(sizes) == 8
    assert len(sizes) <= 2  # one may have been taken with the sleep


def test_a_name_that_can_not_be_stored_leaves_its_neighbours_alone(postgres_url: str) -> None:
    async def main(log: PostgresLog) -> list[Any]:
        await log.create("a")
        calls = [log.append([make_append("a", 0)]), log.append([make_append("nul\0", 0)]), log.create("\ud800")]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with PostgresLog(postgres_url) as log:
        stored, refused, failed = asyncio.run(main(log))
        assert stored == ["ok"]
        assert refused == ["unknown"]
        assert isinstance(failed, Exception)
        assert len(run(log.read("a"))[0]) == 1


def test_after_close_calls_are_refused(postgres_url: str) -> None:
    log = PostgresLog(postgres_url)
    log.close()
    log.close()
    assert run(log.append([make_append("a", 0)])) == [["unknown"]]


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_a_server_without_fsync_is_refused() -> None:
    place = binaries()
    if place is None:
        pytest.skip("PostgreSQL is not installed")
    with running(place) as server:
        server.stop()
        server.start("-c fsync=off")
        with pytest.raises(CommitLogUnusable, match="fsync off"):
            PostgresLog(server.url)


@pytest.mark.parametrize(("server", "session"), [("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")])
def test_an_answer_waits_for_the_disk(postgres_url: str, server: str, session: str) -> None:
    with PostgresLog(f"{postgres_url}%20-csynchronous_commit%3D{server}") as log:
        (row,) = run(log._call(lambda connection: connection.execute("SHOW synchronous_commit").fetchone()))
        assert row == (session,)


def test_another_format_is_refused(postgres_url: str) -> None:
    with PostgresLog(postgres_url):
        pass
    with psycopg.connect(postgres_url) as connection:
        connection.execute("UPDATE sdcp_format SET version = 9")
    with pytest.raises(CommitLogUnusable, match="format 9; this release reads format 1"):
        PostgresLog(postgres_url)


def test_who_can_not_connect_is_told_where_and_no_password(postgres_server: PostgresServer) -> None:
    url = f"postgresql://sdcp:a-password@127.0.0.1:{postgres_server.port}/nowhere"
    with pytest.raises(CommitLogUnusable) as refused:
        PostgresLog(url)
    assert "127.0.0.1" in str(refused.value)
    assert '"nowhere" does not exist' in str(refused.value)
    assert "a-password" not in str(refused.value)


def test_without_psycopg_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from sdcp_mono.cache.commit_log import CommitLogUnusable\n"
        "try: import sdcp_mono.cache.postgres_log\n"
        "except CommitLogUnusable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "a commit log in PostgreSQL needs psycopg: pip install 'sdcp-mono[postgres]'\n"
