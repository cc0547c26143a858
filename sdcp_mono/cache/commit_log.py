"""What the commit logs share: how one is refused, how records are read, and the inbox of the thread that owns one."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from sdcp_mono.core.cbor import decode_records
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.problems import Malformed, Unavailable

INBOX_LIMIT: Final = 1024  # calls that wait; one per session and round, so more means that the store has stopped
BATCH_LIMIT: Final = 256  # calls per transaction: what one slow fsync may hold back, and one failure may repeat
RETRY_MS: Final = 100  # a full inbox or a busy store is worth asking again after several transactions

C = TypeVar("C")
T = TypeVar("T")


class CommitLogUnusable(Exception):
    """This can't be a commit log here: locked, foreign, damaged, out of reach, unsafe. One sentence for a person."""


@dataclass(frozen=True, slots=True)
class Call(Generic[C]):
    """Work for the owning thread. ``operation`` may raise a ``Refusal`` as long as it has written nothing."""

    operation: Callable[[C], Any]
    done: Future[Any]


class Inbox(Generic[C]):
    """A bounded queue that hands out whatever waits, in order; nobody waits for company."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Call[C] | None] = queue.Queue(INBOX_LIMIT)
        self._gate = threading.Lock()  # orders "closed" against put, so that the last item is the closing None
        self._closed = False

    def put(self, operation: Callable[[C], T]) -> Future[T]:
        """Raises ``Unavailable`` when it is closed or full."""
        done: Future[T] = Future()
        with self._gate:
            if self._closed:
                raise Unavailable("the commit log is closed")
            try:
                self._calls.put_nowait(Call(operation, done))
            except queue.Full:
                raise Unavailable("the commit log's inbox is full", retry_after_ms=RETRY_MS) from None
        return done

    def close(self) -> None:
        """Take nothing more; what was taken is still handed out. May be called again."""
        with self._gate:
            first, self._closed = not self._closed, True
        if first:
            self._calls.put(None)

    def batches(self) -> Iterator[Sequence[Call[C]]]:
        """What waits, at most ``BATCH_LIMIT`` calls at a time, until closed; calls that were cancelled are left out."""
        running = True
        while running:
            batch = [self._calls.get()]
            while len(batch) < BATCH_LIMIT and not self._calls.empty():
                batch.append(self._calls.get_nowait())
            running = batch[-1] is not None
            if calls := [call for call in batch if call and call.done.set_running_or_notify_cancel()]:
                yield calls


class OwnedLog(ABC, Generic[C]):
    """A log whose connection one thread owns; usable from any event loop. Raises ``CommitLogUnusable`` when opened."""

    def __init__(self) -> None:
        self._inbox: Inbox[C] = Inbox()
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="commit-log", daemon=True)
        self._thread.start()
        opened.result()

    def close(self) -> None:
        """Answer what was accepted, then let go of the store. May be called again; blocks."""
        self._inbox.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _open(self) -> None:
        """Connect; on the thread. Raises ``CommitLogUnusable``."""

    @abstractmethod
    def _serve(self) -> None:
        """Carry out the inbox's batches until it is closed, then disconnect; on the thread."""

    async def _call(self, operation: Callable[[C], T]) -> T:
        return await asyncio.wrap_future(self._inbox.put(operation))

    def _run(self, opened: Future[None]) -> None:
        try:
            self._open()
        except Exception as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        self._serve()


def whole_records(bodies: Sequence[bytes], from_: int, length: int) -> Sequence[CommitRecord | FenceRecord]:
    """The records that a store holds from ``from_`` on, where its head says that there are ``length`` in all.

    Raises ``Unavailable`` if one is torn, foreign or gone: to resume from a part of a log would repeat its output.
    """
    if len(bodies) != max(0, length - from_):
        raise Unavailable(f"the commit log is damaged: of its {length} records some are gone")
    records: list[CommitRecord | FenceRecord] = []
    for number, body in enumerate(bodies, from_):
        try:
            (record,), _ = decode_records(body)
        except (Malformed, ValueError) as error:  # ValueError: not exactly one record
            raise Unavailable(f"the commit log is damaged: record {number} is torn or foreign") from error
        records.append(record)
    return tuple(records)
