"""Commit logs in a bucket: one object per record, created at the next sequence number (6.8; design, section 3).

    logs/<name>                                   the log exists; holds its incarnation, so that an old one's writer
                                                  or record never passes for the new one's
    records/<name>/<incarnation>/<sequence>       one record, a commit or a fence, never changed

Law of this module:
- The store refuses a taken sequence number, and knows no epochs. A record is created at sequence number N only by who
  has seen all that precede it and no higher fence among them. They never change, so what 6.8 would read again after
  the append is known before, and an append is one request. Whatever is unexpected is looked up.
- A lost answer is settled by the record that is there: byte-identical is the writer's own (AMB-150). A fence has no
  such proof, another router's looks the same: it is reported as not done, and its router takes a higher epoch.
- A dropped log is sealed by the highest fence. Before its records go, every writer has looked for it (``DroppedLogs``).

A bucket lists at once what was stored in it (S3, GCS and Azure do). Only a log's router creates and drops it.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import google_crc32c

from sdcp_mono.cache.bucket import MAX_SEGMENT, RETRY_MS, Bucket, as_segment, from_segment, together
from sdcp_mono.cache.bucket_dropped import GRACE_SECONDS, TRUST_SECONDS, DroppedLogs
from sdcp_mono.cache.commit_log import CommitLogUnusable, whole_records
from sdcp_mono.core.cbor import encode_record
from sdcp_mono.core.messages import CommitRecord, FenceRecord
from sdcp_mono.core.ports import AppendOutcome, LogAppend
from sdcp_mono.core.problems import Conflict, Unavailable, UnknownSession

MAX_HEADS: Final = 4096  # logs whose end is remembered, about 1 MB; forgetting one costs its next append a listing
MAX_RECORDS: Final = 1 << 20  # of a log: a record commits at least one token, and no context is longer
MAX_RECORD_BYTES: Final = 1 << 20
FENCE_TRIES: Final = 32  # places that a busy writer may take first
SEAL: Final = 2**64 - 1  # the highest epoch
_FENCE_BYTES: Final = len(encode_record(FenceRecord(epoch=SEAL)))  # a commit record has more in its digest alone


@dataclass(frozen=True, slots=True)
class _Head:
    """The end of a log as far as it was seen: ``length`` records precede it, ``fence`` is the highest among them."""

    incarnation: str
    length: int
    fence: int
    seen: float  # seconds on the adapter's clock: then the log existed

    def takes(self, sequence: int, epoch: int) -> bool:
        """Whether a record may come next; a fence with its writer's own epoch does not stop it (AMB-156)."""
        return self.length == sequence and self.fence <= epoch


class BucketLog:
    """``core.ports.CommitLog`` in a bucket, shared by any number of processes. For one event loop at a time.

    Raises ``CommitLogUnusable`` for a bucket that can't keep a log. Afterwards a failure of the store makes ``append``
    answer ``unknown``, and the other methods raise ``Unavailable``: their call may have been carried out.
    """

    def __init__(
        self, bucket: Bucket, *, clock: Callable[[], float] = time.monotonic, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        if reason := bucket.unfit_for_logs("logs.probe"):
            raise CommitLogUnusable(reason)
        self._bucket = bucket
        self._clock = clock
        self.dropped = DroppedLogs(bucket, grace_seconds)
        self._heads: OrderedDict[str, _Head] = OrderedDict()  # the one used last at the end

    async def create(self, log: str) -> None:
        """Make an empty log (AMB-071, AMB-153); raises ``Conflict`` if it exists and is not empty."""
        await self._bucket.create(_marker(log), _checked(secrets.token_hex(8)).encode())
        if (head := await self._look(log)) is None:
            raise Unavailable("commit_log names a log that is being dropped", retry_after_ms=RETRY_MS)
        if head.length:
            raise Conflict("commit_log names a log that has records already")

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[AppendOutcome]:
        """One request for each log's record, many at once; each append succeeds or fails on its own (6.3 step 8).

        ``ok``: the record is durable at its sequence number, now or since an earlier call whose answer was lost
        (AMB-150). ``fenced``: a higher fence or a foreign record came first, or the log is gone (AMB-151).
        ``unknown``: the store failed or gave no answer.
        """
        outcomes: list[AppendOutcome] = ["unknown"] * len(appends)
        logs: dict[str, list[int]] = {}
        for number, append in enumerate(appends):
            logs.setdefault(append.log, []).append(number)

        async def in_order(numbers: Sequence[int]) -> None:
            try:
                for number in numbers:  # after an unknown outcome the rest of the log is unknown too
                    outcomes[number] = await self._append(appends[number])
            except Unavailable:
                pass

        await together(in_order, logs.values())
        return outcomes

    async def fence(self, log: str, epoch: int) -> bool:
        """Append a fence; False if one with this or a higher epoch is there (AMB-154), perhaps since a lost answer.

        Raises ``UnknownSession`` if there is no such log: resuming from a log that was lost would repeat its output.
        """
        body = encode_record(FenceRecord(epoch=epoch))
        if (head := await self._look(log)) is None:
            raise UnknownSession("commit_log names a log that does not exist")
        for _ in range(FENCE_TRIES):
            if head.fence >= epoch:
                return False
            if await self._bucket.create(_record(log, head, head.length), body) is not None:
                self._learn(log, replace(head, length=head.length + 1, fence=epoch))
                return True
            taken_by = await self._epoch(log, head, head.length)
            head = self._learn(log, replace(head, length=head.length + 1, fence=max(head.fence, taken_by)))
        raise Unavailable("the commit log is written faster than it can be fenced", retry_after_ms=RETRY_MS)

    async def read(self, log: str, from_: int = 0) -> Sequence[CommitRecord | FenceRecord]:
        """The records from sequence number ``from_`` on; none where the log is empty or missing.

        Raises ``Unavailable`` if one of them is damaged or gone.
        """
        if (head := await self._look(log)) is None:
            return ()
        bodies = await together(partial(self._body, log, head), range(from_, head.length))
        return whole_records([body for body in bodies if body is not None], from_, head.length)

    async def drop(self, log: str) -> None:
        """Forget a log; later appends to it are ``fenced``. Its records are deleted by a later drop."""
        try:
            await self.fence(log, SEAL)
        except UnknownSession:
            return
        if (head := self._heads.pop(log, None) or await self._look(log)) is None:
            return
        await self.dropped.add(as_segment(log), head.incarnation)

    async def names(self) -> Sequence[str]:
        """Every log in the bucket, in the order of creation as far as the store's clock tells: to the second in S3."""
        entries = await self._bucket.list("logs", MAX_RECORDS)
        entries = sorted(entries, key=lambda entry: entry.modified)
        return [from_segment(entry.key.rpartition("/")[2]) for entry in entries]

    async def _append(self, append: LogAppend) -> AppendOutcome:
        log, sequence, epoch, body = append.log, append.sequence, append.record.epoch, encode_record(append.record)
        head = self._heads.get(log)
        if head is None or not head.takes(sequence, epoch):
            head = await self._look(log)
        if head is not None and head.takes(sequence, epoch):
            if await self._place(log, head, body) and await self._still_there(log, head):
                return "ok"
            before, head = head, await self._look(log)
            if head is not None and head.incarnation != before.incarnation:
                return await self._append(append)  # to the log that has this name now
            if head is not None and head.length <= sequence:
                raise Unavailable("the object store did not store a record and has none in its place")
        if head is None or head.length <= sequence:
            return "fenced"
        # A byte-identical record at this sequence number is this writer's own, stored when the answer was lost. It
        # stands even if a fence follows: the resumed session starts after it (AMB-150).
        there = await self._body(log, head, sequence)
        whole_records([] if there is None else [there], sequence, sequence + 1)  # what isn't whole proves nothing
        return "ok" if there == body else "fenced"

    async def _place(self, log: str, head: _Head, body: bytes) -> bool:
        with suppress(Unavailable):  # whether it was stored is seen in the bucket
            if await self._bucket.create(_record(log, head, head.length), body) is not None:
                self._learn(log, replace(head, length=head.length + 1))
                return True
        return False

    async def _still_there(self, log: str, head: _Head) -> bool:
        """Whether the log to which a record was just appended exists, as far as that may be in doubt."""
        if self._clock() - head.seen <= TRUST_SECONDS:
            return True
        now = await self._look(log)
        if now is not None and now.incarnation == head.incarnation:
            return True
        await self._bucket.delete([_record(log, head, head.length)])
        return False

    async def _look(self, log: str) -> _Head | None:
        """The log's end now, read from where it was known; None if there is no such log."""
        now = self._clock()
        marker = await self._bucket.get(_marker(log), MAX_SEGMENT)
        known = self._heads.get(log)
        if marker is None:
            self._heads.pop(log, None)
            return None
        head = _Head(marker.data.decode("ascii", "replace"), 0, 0, now)
        if head.incarnation != _checked(head.incarnation[:16]):
            raise Unavailable("the commit log is damaged: its marker is not whole")
        if known is not None and known.incarnation == head.incarnation:
            head = replace(known, seen=now)
        after = _record(log, head, head.length - 1) if head.length else None
        entries = await self._bucket.list(f"records/{as_segment(log)}/{head.incarnation}", MAX_RECORDS, after=after)
        for sequence, entry in enumerate(entries, head.length):
            if entry.key != _record(log, head, sequence):
                raise Unavailable(f"the commit log is damaged: record {sequence} is gone")
        small = [number for number, entry in enumerate(entries, head.length) if entry.size <= _FENCE_BYTES]
        fences = await together(partial(self._epoch, log, head), small)
        return self._learn(log, replace(head, length=head.length + len(entries), fence=max(head.fence, 0, *fences)))

    async def _epoch(self, log: str, head: _Head, sequence: int) -> int:
        """The epoch of a fence, 0 for a commit."""
        body = await self._body(log, head, sequence)
        (record,) = whole_records([] if body is None else [body], sequence, sequence + 1)
        return record.epoch if isinstance(record, FenceRecord) else 0

    async def _body(self, log: str, head: _Head, sequence: int) -> bytes | None:
        found = await self._bucket.get(_record(log, head, sequence), MAX_RECORD_BYTES)
        return None if found is None else found.data

    def _learn(self, log: str, head: _Head) -> _Head:
        """Remember ``head``, joined with what calls at the same time have learned; answers that."""
        known = self._heads.get(log)
        if known is not None and known.incarnation == head.incarnation:
            length, fence = max(known.length, head.length), max(known.fence, head.fence)
            head = replace(head, length=length, fence=fence, seen=max(known.seen, head.seen))
        elif known is not None and known.seen > head.seen:
            return head  # late news of an earlier log of this name
        self._heads[log] = head
        self._heads.move_to_end(log)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)
        return head


def _marker(log: str) -> str:
    return f"logs/{as_segment(log)}"


def _checked(incarnation: str) -> str:
    """With its CRC32C: a wrong byte must not make an empty log of one that has records."""
    return f"{incarnation}{google_crc32c.value(incarnation.encode()):08x}"


def _record(log: str, head: _Head, sequence: int) -> str:
    return f"records/{as_segment(log)}/{head.incarnation}/{sequence:020}"
