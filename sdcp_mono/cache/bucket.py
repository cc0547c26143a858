"""An object store through obstore: the few calls that objects and commit logs need, with limits on each.

Law of this module:
- Every call ends: few retries, a deadline over all of them, a limit on what is read.
- What obstore says of a failure may quote requests. Only its kind and the HTTP status are passed on, never a secret.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, unquote, urlsplit

from sdcp_mono.cache.disk import TierUnusable
from sdcp_mono.core.problems import Unavailable, Unprocessable

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
    from obstore.store import LocalStore, MemoryStore, from_url
except ImportError as error:
    raise TierUnusable("object storage needs obstore: pip install 'sdcp-mono[objectstore]'") from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from obstore.store import ObjectStore as Store

CALL_SECONDS: Final = 20.0  # a call with its retries: longer than a slow 64 MiB, shorter than a caller's patience
REQUEST_SECONDS: Final = 10  # one request; the largest object then needs 6.7 MB/s
CONNECT_SECONDS: Final = 3
RETRIES: Final = 2  # a throttled or failing store is asked again by whoever calls
PARALLEL: Final = 16  # requests of one call at once: as many connections
RETRY_MS: Final = 1000
MAX_SEGMENT: Final = 700  # characters of an escaped name: keys end at 1024 bytes
PAGE: Final = 1000  # objects in one answer to a listing: what the providers allow

A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What was read: ``size`` and ``etag`` are the whole object's, also where ``data`` is a part of it."""

    data: bytes
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    size: int
    modified: datetime  # on the store's clock, where S3 counts whole seconds


def open_store(url: str, *, call_seconds: float = CALL_SECONDS) -> Bucket:
    """The bucket, and the prefix in it, that ``url`` names, after a look whether it can be listed; blocks.

    ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///directory``, ``memory://``.
    Endpoint, region and credentials come from the environment as each provider's own tools read it
    (``AWS_ENDPOINT_URL`` for other servers that speak S3). Raises ``TierUnusable``.
    """
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise TierUnusable(f"the object store {shown}: credentials and options belong in the environment")
    try:
        store = _store(url, parts.scheme, parts.path, call_seconds)
        next(iter(obstore.list(store, chunk_size=1)), None)
    except Exception as error:
        raise TierUnusable(f"the object store {shown} can't be used: {_reason(error)}") from None
    return Bucket(store, call_seconds)


def _store(url: str, scheme: str, path: str, call_seconds: float) -> Store:
    if scheme == "memory":
        return MemoryStore()
    if scheme == "file":
        return LocalStore(unquote(path), mkdir=True)
    if scheme not in ("s3", "gs", "az"):
        raise TierUnusable("expected s3://, gs://, az://, file:// or memory://")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return from_url(
        url,
        client_options={
            "timeout": timedelta(seconds=min(REQUEST_SECONDS, call_seconds)),
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "allow_http": scheme == "s3" and endpoint.startswith("http://"),  # only where somebody wrote it
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=call_seconds)},
    )


class Bucket:
    """A store's few calls that are needed. Each raises ``Unavailable`` when it fails: it may have been carried out."""

    def __init__(self, store: Store, call_seconds: float = CALL_SECONDS) -> None:
        self._store = store
        self._seconds = call_seconds
        self.local = isinstance(store, LocalStore)

    async def create(self, key: str, data: bytes, *, replacing: str | None = None) -> str | None:
        """Store under a free key, or in place of the object with the etag ``replacing``; its etag, None if refused."""
        async with self._call():
            try:
                if replacing is not None and self.local:  # knows no conditions; a directory has one owner
                    await obstore.delete_async(self._store, key)
                    replacing = None
                mode: Any = "create" if replacing is None else {"e_tag": replacing}
                return (await obstore.put_async(self._store, key, data, mode=mode))["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError):
                return None

    async def overwrite(self, key: str, data: bytes) -> None:
        async with self._call():
            await obstore.put_async(self._store, key, data)

    async def get(self, key: str, limit: int, *, part: tuple[int, int] | None = None, etag: str = "") -> Found | None:
        """An object of at most ``limit`` bytes, or the bytes ``part`` of it; None if it isn't there (with ``etag``)."""
        options: Any = {} if part is None else {"range": part}
        if etag:
            options["if_match"] = etag
        async with self._call():
            try:
                result = await obstore.get_async(self._store, key, options=options)
                size = result.range[1] - result.range[0]
                if size > limit:
                    raise Unavailable(f"an object of {size} bytes is where at most {limit} were stored")
                return Found(bytes(await result.bytes_async()), result.meta["size"], result.meta["e_tag"] or "")
            except (FileNotFoundError, PreconditionError):
                return None

    async def list(self, prefix: str, limit: int, *, after: str | None = None) -> Sequence[Entry]:
        """The objects below ``prefix`` in the order of their keys, from the one after ``after`` on."""
        found: list[Entry] = []
        async with self._call():
            async for page in obstore.list(self._store, prefix, offset=after, chunk_size=PAGE):
                found += [Entry(meta["path"], meta["size"], meta["last_modified"]) for meta in page]
                if len(found) >= limit:
                    break
        return sorted(found, key=lambda entry: entry.key)[:limit]

    async def delete(self, keys: Sequence[str]) -> None:
        """Together, what a store forgets together; from a directory one key at a time. Missing ones are no error."""
        async with self._call():
            for some in [[key] for key in keys] if self.local or len(keys) == 1 else [keys]:
                with suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, some)

    def unfit_for_logs(self, probe: str) -> str | None:
        """Why no commit log can be kept here, or None: a taken key must be refused, ``probe`` is one; blocks."""
        if self.local:
            return "a directory can't keep commit logs as a bucket does: what is written there isn't made durable"
        try:
            for _ in range(2):
                obstore.put(self._store, probe, b"", mode="create")
        except AlreadyExistsError:
            return None
        except Exception as error:
            return f"the object store can't be written: {_reason(error)}"
        return "the object store ignores If-None-Match: of two writers of one log both would win"

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._seconds):
                yield
        except (BaseError, OSError, NotImplementedError, ValueError) as error:  # OSError: TimeoutError, too
            raise Unavailable(f"the object store failed: {_reason(error)}", retry_after_ms=RETRY_MS) from None


def _reason(error: Exception) -> str:
    status = re.search(r"status code: (\d{3})", str(error))
    match error:
        case TierUnusable():
            return str(error)
        case TimeoutError():
            return "no answer in time"
        case PermissionDeniedError() | UnauthenticatedError() | PermissionError():
            return "the credentials found in the environment are not allowed to do this"
        case OSError():
            return os.strerror(error.errno) if error.errno else "there is nothing"
        case _:
            return f"it answered {status[1]}" if status else "no answer, or a setting that is missing or wrong"


async def together(call: Callable[[A], Awaitable[T]], items: Iterable[A]) -> Sequence[T]:
    """What ``call`` answers for each item, 16 at once; all have ended when the first error is raised."""
    free = asyncio.Semaphore(PARALLEL)

    async def one(item: A) -> T:
        async with free:
            return await call(item)

    results = await asyncio.gather(*map(one, items), return_exceptions=True)
    return [_raised(result) for result in results]


def _raised(result: T | BaseException) -> T:
    if isinstance(result, BaseException):
        raise result
    return result


def as_segment(name: str) -> str:
    """``name`` as one segment of a key, in characters that every provider takes; raises ``Unprocessable``."""
    segment = quote(name, safe="").replace(".", "%2E").replace("%", "!")
    if not 0 < len(segment) <= MAX_SEGMENT:
        raise Unprocessable(f"a name takes 1 to {MAX_SEGMENT} characters of a key, and this one {len(segment)}")
    return segment


def from_segment(segment: str) -> str:
    return unquote(segment.replace("!", "%"))
