"""Which store keeps the commit logs and the shared objects: decided by a URL."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sdcp_mono.cache.commit_log import CommitLogUnusable
from sdcp_mono.cache.inspecting import LOG, check_logs
from sdcp_mono.cache.kept_logs import ListedLog
from sdcp_mono.cache.sqlite_log import SqliteCommitLog

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from sdcp_mono.core.ports import ObjectStore

BUCKETS = ("s3", "gs", "az", "memory")


def open_log(url: str, data_dir: Path, stack: ExitStack | AsyncExitStack) -> ListedLog:
    """The commit logs at ``url``, closed with ``stack``; an empty one names the SQLite file of the data folder.

    ``postgresql://…`` needs the extra ``postgres``, ``s3://…``, ``gs://…`` and ``az://…`` the extra ``objectstore``.
    Raises ``CommitLogUnusable``; blocks.
    """
    scheme = urlsplit(url).scheme
    if not url:
        data_dir.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(SqliteCommitLog(data_dir / LOG))
    if scheme in ("postgresql", "postgres"):
        from sdcp_mono.cache.postgres_log import PostgresLog

        return stack.enter_context(PostgresLog(url))
    if scheme in BUCKETS:
        from sdcp_mono.cache.bucket import open_store
        from sdcp_mono.cache.bucket_log import BucketLog

        return BucketLog(open_store(url))
    raise CommitLogUnusable(
        f"log: expected postgresql://, s3://, gs:// or az://, or nothing for SQLite, not {scheme}://"
    )


async def check(url: str, data_dir: Path) -> dict[str, Any]:
    """Every commit log of a store read to its end; an SQLite file must have no owner. Raises ``CommitLogUnusable``."""
    if not url and not (data_dir / LOG).exists():
        return {"logs": 0, "records": 0, "damaged": []}
    with ExitStack() as stack:
        return await check_logs(open_log(url, data_dir, stack))


def open_bucket(url: str) -> ObjectStore:
    """The shared objects in the bucket, or the directory, at ``url``. Raises ``TierUnusable``; blocks."""
    from sdcp_mono.cache.bucket import open_store
    from sdcp_mono.cache.bucket_objects import BucketObjects

    return BucketObjects(open_store(url))
