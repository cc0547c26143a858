"""Commit logs in PostgreSQL, shared by any number of processes: the choice for high availability (6.8; design, 3).

Law of this module:
- Every call is one statement and its own transaction; it is answered after the commit is durable, never before.
- Appends that wait together share a statement, whose guard on the head rows is SQLite's: sequence and fence. So
  the cost of an append does not depend on the log's length, and a refused append writes nothing.
- A lost connection answers ``unknown`` for what was under way: whether it was carried out is read from the log.

A standby that becomes the primary must have every acknowledged commit: replicate synchronously.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from sdcp_mono.cache.commit_log import RETRY_MS, Call, CommitLogUnusable, OwnedLog, whole_records
from sdcp_mono.core.cbor import encode_record
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import AppendOutcome, LogAppend
from sdcp_mono.core.problems import Conflict, Unavailable, UnknownSession

try:
    import psycopg
except ImportError as error:
    raise CommitLogUnusable("a commit log in PostgreSQL needs psycopg: pip install 'sdcp-mono[postgres]'") from error

CONNECT_SECONDS: Final = 3  # what waits when the server is down is answered after this
STATEMENT_MS: Final = 5000  # a round waits no longer for its append; a healthy one takes a few milliseconds
ANSWER_SECONDS: Final = 10.0  # a new connection and a statement; then the server is stopped rather than slow
RECONNECT_SECONDS: Final = 0.5  # between two attempts: a server that restarts isn't besieged by every round
FORMAT: Final = 1
LOCK: Final = 0x53444350  # "SDCP": one process at a time makes the tables

_SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS sdcp_format (version integer NOT NULL);
    INSERT INTO sdcp_format SELECT 1 WHERE NOT EXISTS (SELECT FROM sdcp_format);
    -- An epoch is a uint64, which bigint is not. Half-filled pages, so that a moved head stays on its page.
    CREATE TABLE IF NOT EXISTS sdcp_log (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE,
        length bigint NOT NULL DEFAULT 0, fence numeric(20) NOT NULL DEFAULT 0) WITH (fillfactor = 50);
    CREATE TABLE IF NOT EXISTS sdcp_record (log bigint NOT NULL REFERENCES sdcp_log ON DELETE CASCADE,
        sequence bigint NOT NULL, body bytea NOT NULL, PRIMARY KEY (log, sequence));
"""
_CREATE: Final = """
    INSERT INTO sdcp_log (name) VALUES (%s) ON CONFLICT (name) DO UPDATE SET length = sdcp_log.length RETURNING length
"""
# A fence with the writer's own epoch does not stop it (AMB-156).
_APPEND: Final = """
    WITH moved AS (
        UPDATE sdcp_log SET length = length + 1
        FROM unnest(%s::text[], %s::bigint[], %s::numeric[], %s::bytea[]) AS new (log, sequence, epoch, body)
        WHERE name = new.log AND length = new.sequence AND fence <= new.epoch
        RETURNING id, name, sequence, body
    ), stored AS (INSERT INTO sdcp_record SELECT id, sequence, body FROM moved)
    SELECT name FROM moved
"""
_THERE: Final = """
    SELECT name, sequence, body FROM sdcp_record JOIN sdcp_log ON log = id
    WHERE (name, sequence) IN (SELECT * FROM unnest(%s::text[], %s::bigint[]))
"""
_FENCE: Final = """
    WITH moved AS (
        UPDATE sdcp_log SET length = length + 1, fence = %(epoch)s
        WHERE name = %(log)s AND fence < %(epoch)s RETURNING id, length - 1 AS sequence
    ), stored AS (INSERT INTO sdcp_record SELECT id, sequence, %(body)s FROM moved)
    SELECT EXISTS (SELECT FROM moved), EXISTS (SELECT FROM sdcp_log WHERE name = %(log)s)
"""
_READ: Final = """
    SELECT length, body FROM sdcp_log LEFT JOIN sdcp_record ON log = id AND sequence >= %s AND sequence < length
    WHERE name = %s ORDER BY sequence
"""
_NAMES: Final = "SELECT name FROM sdcp_log ORDER BY id"

Connection = Any  # psycopg.Connection, whose rows are typed by how they are fetched
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Append:
    """One call's appends, as rows for the statement that they share with others'."""

    appends: Sequence[LogAppend]
    bodies: Sequence[bytes]

    def __call__(self, connection: Connection) -> list[AppendOutcome]:
        return _append(connection, [self])[0]


class PostgresLog(OwnedLog[Connection]):
    """``core.ports.CommitLog`` in the database that ``url`` names; one connection on one thread. For any event loop.

    Raises ``CommitLogUnusable`` when opened. Afterwards ``append`` answers ``unknown`` while the server can't be
    reached, and the other methods raise ``Unavailable``; the connection is made again when somebody calls.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._next_try = 0.0
        self._connection: Connection = None
        super().__init__()

    async def create(self, log: str) -> None:
        """Make an empty log (AMB-071, AMB-153); raises ``Conflict`` if it exists and is not empty."""
        (length,) = await self._call(lambda connection: connection.execute(_CREATE, (log,)).fetchone())
        if length:
            raise Conflict("commit_log names a log that has records already")

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        """Many logs in one durable transaction; each append succeeds or fails on its own (6.3 step 8).

        ``ok``: the record is durable at its sequence number, now or since an earlier call whose answer was lost
        (AMB-150). ``fenced``: a higher fence or a foreign record came first, or the log is gone (AMB-151).
        ``unknown``: the server failed, or the connection to it.
        """
        try:
            return await self._call(_Append(appends, [encode_record(append.record) for append in appends]))
        except Unavailable:
            return ["unknown"] * len(appends)

    async def fence(self, log: str, epoch: int) -> bool:
        """Append a fence; False if one with this or a higher epoch is there (AMB-154).

        Raises ``UnknownSession`` if there is no such log: resuming from a log that was lost would repeat its output.
        """
        values = {"log": log, "epoch": epoch, "body": encode_record(FenceRecord(epoch=epoch))}
        done, exists = await self._call(lambda connection: connection.execute(_FENCE, values).fetchone())
        if not exists:
            raise UnknownSession("commit_log names a log that does not exist")
        return bool(done)

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]:
        """The records from sequence number ``from_`` on; none where the log is empty or missing.

        Raises ``Unavailable`` if one of them is damaged or gone.
        """
        rows = await self._call(lambda connection: connection.execute(_READ, (from_, log), binary=True).fetchall())
        return whole_records([body for _, body in rows if body is not None], from_, rows[0][0] if rows else 0)

    async def drop(self, log: str) -> None:
        """Forget a log and its records; later appends to it are ``fenced``."""
        await self._call(lambda connection: connection.execute("DELETE FROM sdcp_log WHERE name = %s", (log,)))

    async def names(self) -> Sequence[str]:
        """Every log in the database, in the order of creation: what recovery and ``replay`` start from."""
        rows = await self._call(
            lambda connection: connection.execute("SELECT name FROM sdcp_log ORDER BY id").fetchall()
        )
        return [name for (name,) in rows]

    async def _call(self, operation: Callable[[Connection], T]) -> T:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await super()._call(operation)
        except TimeoutError:
            self._cut()
            raise Unavailable("the commit log did not answer in time", retry_after_ms=RETRY_MS) from None

    def _cut(self) -> None:
        """Wake the thread where the server has stopped answering: its connection is lost from here on."""
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    # ---- on the thread ---------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._connection = _connect(self._url)
            _adopt(self._connection)
        except psycopg.Error as error:
            raise _unusable(self._url, error) from error

    def _serve(self) -> None:
        for calls in self._inbox.batches():
            for some in _together(calls):
                self._reconnect()
                _answer(self._connection, some)
        self._connection.close()

    def _reconnect(self) -> None:
        """Make a lost connection anew, unless the last attempt was just now."""
        if self._connection.closed and time.monotonic() >= self._next_try:
            with suppress(psycopg.Error):
                self._connection = _connect(self._url)
            self._next_try = time.monotonic() + RECONNECT_SECONDS


def _together(calls: Sequence[Call[Connection]]) -> list[list[Call[Connection]]]:
    """Neighbouring appends to different logs share a statement; everything else is one of its own."""
    groups: list[list[Call[Connection]]] = []
    logs: set[str] | None = None  # of the last group, if it is one of appends
    for call in calls:
        new = {append.log for append in call.operation.appends} if isinstance(call.operation, _Append) else None
        if logs is None or new is None or logs & new:
            groups.append([call])
            logs = new
        else:
            groups[-1].append(call)
            logs |= new
    return groups


def _answer(connection: Connection, calls: Sequence[Call[Connection]]) -> None:
    """Carry ``calls`` out and answer each; several are appends."""
    try:
        results: Sequence[Any] = (
            [calls[0].operation(connection)]
            if len(calls) == 1
            else _append(connection, [call.operation for call in calls if isinstance(call.operation, _Append)])
        )
    except psycopg.Error as error:
        if len(calls) > 1 and not connection.closed:  # each fails for its own reasons only: a deadlock, a bad name
            for call in calls:
                _answer(connection, [call])
            return
        for call in calls:
            call.done.set_exception(_unavailable(error))
    except Exception as error:
        for call in calls:
            call.done.set_exception(error)
    else:
        for call, result in zip(calls, results, strict=True):
            call.done.set_result(result)


def _append(connection: Connection, calls: Sequence[_Append]) -> list[list[AppendOutcome]]:
    """The outcomes of each call. Rows for one log go one after the other, in waves; different logs go together."""
    rows = [(append, body) for call in calls for append, body in zip(call.appends, call.bodies, strict=True)]
    outcomes: dict[int, AppendOutcome] = {}
    left = list(range(len(rows)))
    while left:
        wave = {rows[i][0].log: i for i in reversed(left)}  # the first of each log
        stored = _store(connection, [rows[i] for i in wave.values()])
        outcomes |= {i: "ok" if log in stored else "fenced" for log, i in wave.items()}
        left = [i for i in left if i not in outcomes]
    every = iter([outcomes[i] for i in range(len(rows))])
    return [[next(every) for _ in call.appends] for call in calls]


def _store(connection: Connection, rows: Sequence[tuple[LogAppend, bytes]]) -> set[str]:
    """The logs whose record is durable at its place; at most one row a log."""
    columns = (
        [append.log for append, _ in rows],
        [append.sequence for append, _ in rows],
        [append.record.epoch for append, _ in rows],
        [body for _, body in rows],
    )
    stored = {name for (name,) in connection.execute(_APPEND, columns)}
    if refused := [(append, body) for append, body in rows if append.log not in stored]:
        # A byte-identical record at this sequence number is this writer's own, stored when the answer was lost. It
        # stands even if a fence follows: the resumed session starts after it (AMB-150).
        places = ([append.log for append, _ in refused], [append.sequence for append, _ in refused])
        there = {(name, place): body for name, place, body in connection.execute(_THERE, places, binary=True)}
        stored |= {append.log for append, body in refused if there.get((append.log, append.sequence)) == body}
    return stored


def _connect(url: str) -> Connection:
    connection = psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_SECONDS,
        target_session_attrs="read-write",  # of several hosts in ``url`` the primary
        application_name="sdcp-mono",
        tcp_user_timeout=STATEMENT_MS,  # a host that vanished is noticed as soon as a slow one
    )
    connection.execute(f"SET statement_timeout = {STATEMENT_MS}")
    (durable,) = connection.execute("SHOW synchronous_commit").fetchone() or ("",)
    if durable not in ("on", "remote_apply"):  # the others answer before the record is on disk, here or on the standby
        connection.execute("SET synchronous_commit = on")
    return connection


def _adopt(connection: Connection) -> None:
    """Make the tables if need be, and check what was found."""
    (fsync,) = connection.execute("SHOW fsync").fetchone()
    if fsync != "on":
        raise CommitLogUnusable("the PostgreSQL server runs with fsync off: what it acknowledges may be lost")
    (encoding,) = connection.execute("SHOW server_encoding").fetchone()
    if encoding != "UTF8":
        raise CommitLogUnusable(f"the database's encoding is {encoding}: make one with ENCODING 'UTF8'")
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        connection.execute(_SCHEMA)
        (version,) = connection.execute("SELECT max(version) FROM sdcp_format").fetchone()
    if version != FORMAT:
        raise CommitLogUnusable(f"the commit log has format {version}; this release reads format {FORMAT}")


def _unusable(url: str, error: Exception) -> CommitLogUnusable:
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without user and password
    said = str(error).strip().splitlines() or [type(error).__name__]
    return CommitLogUnusable(f"the commit log {place} can't be used: {said[-1].strip()}")


def _unavailable(error: psycopg.Error) -> Unavailable:
    unavailable = Unavailable(f"the commit log can't be written: {type(error).__name__}", retry_after_ms=RETRY_MS)
    unavailable.__cause__ = error
    return unavailable
