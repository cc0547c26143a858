"""The default commit log: one SQLite file, one connection, one thread (6.8; design, section 3).

Law of this module:
- A call is answered after the transaction that holds it is on disk (WAL, synchronous=FULL), never before.
- Calls that arrive while a transaction runs share the next one (group commit); nobody waits for company.
- The head row of a log is the guard: a record is stored if sequence and fence allow it, so the cost of an append does
  not depend on the log's length and a refused append writes nothing.
- Records of all logs lie one after the other, each with the number of the one before it in its log: a transaction of
  32 sessions writes a few pages, where a table sorted by log would write 32.
- One owner: the file is locked exclusively for as long as it is open. A second opener is refused at start, and the
  WAL-reset bug of older SQLite releases, which takes two connections on one file, can't be met.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from sdcp_mono.cache.commit_log import RETRY_MS, Call, OwnedLog, whole_records
from sdcp_mono.cache.commit_log import CommitLogUnusable as CommitLogUnusable
from sdcp_mono.core.cbor import encode_record
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import AppendOutcome, LogAppend
from sdcp_mono.core.problems import Conflict, Refusal, Unavailable, UnknownSession

WAL_BYTES: Final = 16 << 20  # the WAL file is cut back to this after a checkpoint; it normally needs 4 MiB
APPLICATION_ID: Final = 0x53444350  # "SDCP"
FORMAT: Final = 2

_SCHEMA: Final = (
    # An epoch is a uint64, which SQLite's integers are not: 8 octets, big-endian, compare like the number.
    "CREATE TABLE log (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, length INTEGER NOT NULL DEFAULT 0,"
    " fence BLOB NOT NULL DEFAULT x'0000000000000000', last INTEGER NOT NULL DEFAULT 0) STRICT",
    "CREATE TABLE record (id INTEGER PRIMARY KEY, previous INTEGER NOT NULL, body BLOB NOT NULL) STRICT",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT}",
)

# The records of a log from its end to the sequence number that is asked for; ``id`` 0 precedes the first.
_CHAIN: Final = (
    "WITH RECURSIVE chain (id, sequence, previous, body) AS ("
    " SELECT record.id, length - 1, previous, body FROM log JOIN record ON record.id = last WHERE name = ?"
    " UNION ALL SELECT record.id, sequence - 1, record.previous, record.body"
    " FROM chain JOIN record ON record.id = chain.previous WHERE sequence > ?)"
)

T = TypeVar("T")


class SqliteCommitLog(OwnedLog[sqlite3.Connection]):
    """``core.ports.CommitLog`` in the file ``path``; its directory must exist. Usable from any event loop.

    Raises ``CommitLogUnusable`` when opened. Afterwards a storage error (disk full, IO error) rolls back the
    transaction it hit: ``append`` answers ``unknown`` and the other methods raise ``Unavailable``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__()

    async def create(self, log: str) -> None:
        """Make an empty log (AMB-071, AMB-153); raises ``Conflict`` if it exists and is not empty."""
        await self._call(lambda connection: _create(connection, log))

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        """Many logs in one durable transaction; each append succeeds or fails on its own (6.3 step 8).

        ``ok``: the record is durable at its sequence number, now or since an earlier call whose answer was lost
        (AMB-150). ``fenced``: a higher fence or a foreign record came first, or the log is gone (AMB-151).
        ``unknown``: storage failed.
        """
        rows = [(append, encode_record(append.record)) for append in appends]
        try:
            return await self._call(lambda connection: [_append(connection, append, body) for append, body in rows])
        except Unavailable:
            return ["unknown"] * len(rows)

    async def fence(self, log: str, epoch: int) -> bool:
        """Append a fence; False if one with this or a higher epoch is there (AMB-154).

        Raises ``UnknownSession`` if there is no such log: resuming from a log that was lost would repeat its output.
        """
        body = encode_record(FenceRecord(epoch=epoch))
        return await self._call(lambda connection: _fence(connection, log, epoch, body))

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]:
        """The records from sequence number ``from_`` on; none where the log is empty or missing.

        Raises ``Unavailable`` if one of them is damaged or gone.
        """
        length, bodies = await self._call(lambda connection: _bodies(connection, log, from_))
        return whole_records(bodies, from_, length)

    async def drop(self, log: str) -> None:
        """Forget a log and its records; later appends to it are ``fenced``."""
        await self._call(lambda connection: _drop(connection, log))

    async def names(self) -> Sequence[str]:
        """Every log in the file, in the order of creation: what recovery and ``replay`` start from."""
        return await self._call(_names)

    def _open(self) -> None:
        self._connection = _open(self._path)

    def _serve(self) -> None:
        with contextlib.closing(self._connection) as connection:  # gives the file's lock back, too
            for calls in self._inbox.batches():
                _transact(connection, calls)


def _transact(connection: sqlite3.Connection, calls: Sequence[Call[sqlite3.Connection]]) -> None:
    """Run ``calls`` in one transaction and answer them once it is durable."""
    results: list[Any] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for call in calls:
            try:
                results.append(call.operation(connection))
            except Refusal as refusal:
                results.append(refusal)
        connection.execute("COMMIT")
    except Exception as error:
        with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
            connection.execute("ROLLBACK")
        if len(calls) > 1:  # each call fails for its own reasons only; every operation may be repeated
            for call in calls:
                _transact(connection, [call])
        else:
            calls[0].done.set_exception(_unavailable(error) if isinstance(error, sqlite3.Error) else error)
        return
    for call, result in zip(calls, results, strict=True):
        if isinstance(result, Refusal):
            call.done.set_exception(result)
        else:
            call.done.set_result(result)


def _unavailable(error: sqlite3.Error) -> Unavailable:
    unavailable = Unavailable(f"the commit log can't be written: {error}", retry_after_ms=RETRY_MS)
    unavailable.__cause__ = error
    return unavailable


def _create(connection: sqlite3.Connection, log: str) -> None:
    row = connection.execute("SELECT length FROM log WHERE name = ?", (log,)).fetchone()
    if row is None:
        connection.execute("INSERT INTO log (name) VALUES (?)", (log,))
    elif row[0]:
        raise Conflict("commit_log names a log that has records already")


def _append(connection: sqlite3.Connection, append: LogAppend, body: bytes) -> AppendOutcome:
    epoch = _octets(append.record.epoch)  # a fence with the writer's own epoch does not stop it (AMB-156)
    if _advance(connection, append.log, body, "length = ? AND fence <= ?", append.sequence, epoch):
        return "ok"
    length, bodies = _bodies(connection, append.log, append.sequence)
    there = bodies[0] if len(bodies) == length - append.sequence > 0 else None
    # A byte-identical record at this sequence number is this writer's own, stored when the answer was lost. It stands
    # even if a fence follows: the resumed session starts after it (AMB-150).
    return "ok" if there == body else "fenced"


def _fence(connection: sqlite3.Connection, log: str, epoch: int, body: bytes) -> bool:
    if _advance(connection, log, body, "fence < ?", _octets(epoch)):
        connection.execute("UPDATE log SET fence = ? WHERE name = ?", (_octets(epoch), log))
        return True
    if connection.execute("SELECT 1 FROM log WHERE name = ?", (log,)).fetchone() is None:
        raise UnknownSession("commit_log names a log that does not exist")
    return False


def _advance(connection: sqlite3.Connection, log: str, body: bytes, guard: str, *values: int | bytes) -> bool:
    """Store ``body`` at the head if ``guard`` (trusted SQL on the head row) holds; the conditional append of 6.8."""
    insert = f"INSERT INTO record (previous, body) SELECT last, ? FROM log WHERE name = ? AND {guard}"
    if connection.execute(insert, (body, log, *values)).rowcount == 0:
        return False
    connection.execute("UPDATE log SET length = length + 1, last = last_insert_rowid() WHERE name = ?", (log,))
    return True


def _bodies(connection: sqlite3.Connection, log: str, from_: int) -> tuple[int, list[bytes]]:
    """How long the log is, and the records from ``from_`` on."""
    (length,) = connection.execute("SELECT length FROM log WHERE name = ?", (log,)).fetchone() or (0,)
    if from_ >= length:
        return length, []
    rows = connection.execute(f"{_CHAIN} SELECT body FROM chain ORDER BY sequence", (log, from_))
    return length, [body for (body,) in rows]


def _drop(connection: sqlite3.Connection, log: str) -> None:
    connection.execute(f"{_CHAIN} DELETE FROM record WHERE id IN (SELECT id FROM chain)", (log, 0))
    connection.execute("DELETE FROM log WHERE name = ?", (log,))


def _names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM log ORDER BY id")]


def _octets(epoch: int) -> bytes:
    return epoch.to_bytes(8, "big")


def _open(path: Path) -> sqlite3.Connection:
    for place in (path.parent, path) if path.exists() else (path.parent,):
        if not os.access(place, os.W_OK):  # SQLite's own word for some of these cases is "disk I/O error"
            raise CommitLogUnusable(f"the commit log {path} can't be written: {place} is missing or read-only")
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    except sqlite3.Error as error:
        raise CommitLogUnusable(_reason(path, error)) from error
    try:
        _adopt(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise CommitLogUnusable(_reason(path, error)) from error
        raise
    return connection


def _adopt(connection: sqlite3.Connection, path: Path) -> None:
    """Check what the file is before changing it, then take it over."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    fresh = tables == 0 and owner == 0
    if not fresh and owner != APPLICATION_ID:
        raise CommitLogUnusable(f"{path} is the database of another program, not a commit log")
    if not fresh and version != FORMAT:
        raise CommitLogUnusable(
            f"the commit log {path} has format {version}; this release reads format {FORMAT}: move the file away"
        )
    (damage,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if damage != "ok":
        raise CommitLogUnusable(f"the commit log {path} is damaged: {damage}")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise CommitLogUnusable(f"the commit log {path} is on a file system where SQLite's WAL doesn't work")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    connection.execute("BEGIN IMMEDIATE")  # takes the lock that is held until the file is closed
    for statement in _SCHEMA if fresh else ():
        connection.execute(statement)
    connection.execute("COMMIT")


def _reason(path: Path, error: sqlite3.Error) -> str:
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF:  # the primary code of an extended one
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"the commit log {path} is in use by another process"
        case sqlite3.SQLITE_NOTADB:
            return f"{path} is not a commit log: it is not an SQLite file"
        case sqlite3.SQLITE_CORRUPT:
            return f"the commit log {path} is damaged: {error}"
        case _:
            return f"the commit log {path} can't be opened: {error}"
