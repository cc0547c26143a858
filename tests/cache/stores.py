"""The stores that can keep commit logs, as the contract test sees them: opened any number of times, and damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import obstore
import psycopg

from sdcp_mono.cache.bucket import Bucket, open_store
from sdcp_mono.cache.bucket_log import BucketLog
from sdcp_mono.cache.inspecting import LOG
from sdcp_mono.cache.kept_logs import ListedLog
from sdcp_mono.compose.logs import open_log


class Store:
    """``url`` as the setting ``log`` has it. A second adapter is a second process, where the store allows two."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self.url = url
        self.data_dir = data_dir
        self._stack = ExitStack()
        self._sqlite: ListedLog | None = None
        self._bucket: Bucket | None = open_store(url) if url == "memory://" else None  # it is as old as its adapters

    def open(self) -> ListedLog:
        if self._bucket is not None:
            return BucketLog(self._bucket)
        if self.url:
            return open_log(self.url, self.data_dir, self._stack)
        if self._sqlite is None:
            self._sqlite = open_log("", self.data_dir, self._stack)
        return self._sqlite

    def close(self) -> None:
        """Every adapter; the store stays."""
        self._stack.close()
        self._sqlite = None

    def rewrite(self, log: str, sequence: int, change: Callable[[bytes], bytes]) -> None:
        """Change the bytes of a record behind the adapters' backs."""
        self.close()
        if self.url.startswith("postgresql"):
            where = "WHERE sequence = %s AND log = (SELECT id FROM sdcp_log WHERE name = %s)"
            with psycopg.connect(self.url) as connection:
                (body,) = connection.execute(f"SELECT body FROM sdcp_record {where}", (sequence, log)).fetchone() or ()
                connection.execute(f"UPDATE sdcp_record SET body = %s {where}", (change(body), sequence, log))
        elif self.url:
            store: Any = (self._bucket or open_store(self.url))._store
            entries = [entry["path"] for page in obstore.list(store, f"records/{log}") for entry in page]
            key = next(entry for entry in entries if entry.endswith(f"/{sequence:020}"))
            obstore.put(store, key, change(bytes(obstore.get(store, key).bytes())))
        else:
            connection = sqlite3.connect(self.data_dir / LOG)
            (id,) = connection.execute("SELECT last FROM log WHERE name = ?", (log,)).fetchone()
            (length,) = connection.execute("SELECT length FROM log WHERE name = ?", (log,)).fetchone()
            for _ in range(length - 1 - sequence):
                (id,) = connection.execute("SELECT previous FROM record WHERE id = ?", (id,)).fetchone()
            (body,) = connection.execute("SELECT body FROM record WHERE id = ?", (id,)).fetchone()
            connection.execute("UPDATE record SET body = ? WHERE id = ?", (change(body), id))
            connection.commit()
            connection.close()
