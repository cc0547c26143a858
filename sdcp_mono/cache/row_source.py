"""Draft rows within one process: objects that never become bytes (6.2, 6.3 step 5; design, section 5)."""

from __future__ import annotations

import secrets
from typing import Any, Final

from sdcp_mono.core.names import SHORT_TTL_MS, MlcUri
from sdcp_mono.core.ports import ObjectStore, RowsProblem
from sdcp_mono.core.problems import Malformed, Unavailable

KIND: Final = "q_rows"
MAX_HELD: Final = 4096  # leases remembered: as many as the store has objects by default


class LocalRows:
    """``core.ports.RowSource`` over the object store of this process.

    Rows are published as ``mlc://<authority>/<scope>/q_rows/<random>`` under a lease; if nobody releases them, lease
    and object end by themselves after ``ttl_ms``. Rows that have a method ``check(tokens, vocab_size)`` are checked by
    it, whole, before use; it raises ``RowsProblem``. ``vocab_size`` is V of the target (AMB-133 to 137).
    """

    def __init__(self, objects: ObjectStore, authority: str, vocab_size: int, *, ttl_ms: int = SHORT_TTL_MS) -> None:
        self._objects = objects
        self._authority = authority
        self._vocab_size = vocab_size
        self._ttl_ms = ttl_ms
        self._held: dict[str, str] = {}  # URI -> lease id, oldest first

    async def publish(self, rows: Any, scope: bytes | None) -> str:
        """Store ``rows`` (a ``ByteSource``) uncopied and lease them; raises ``Unavailable`` if there is no room."""
        uri = str(MlcUri(self._authority, scope, KIND, secrets.token_hex(16)))
        await self._objects.put(uri, rows, ttl_ms=self._ttl_ms)
        lease = await self._objects.lease(uri, self._ttl_ms)
        if lease is None:
            raise Unavailable("the rows were gone before they could be leased")
        if len(self._held) >= MAX_HELD:  # never released, so long gone from a store that holds no more than this
            del self._held[next(iter(self._held))]
        self._held[uri] = lease.lease_id
        return uri

    async def fetch(self, uri: str, tokens: tuple[int, ...], scope: bytes | None) -> Any:
        """The rows for ``tokens``; of this process and of the session's scope only, anything else is unavailable."""
        try:
            name = MlcUri.parse(uri)
        except Malformed as error:
            raise RowsProblem(f"q_rows is not an MLC URI: {error}", unavailable=True) from error
        if name.authority != self._authority or name.kind != KIND:
            raise RowsProblem("q_rows does not name draft rows of this process", unavailable=True)
        rows = await self._objects.get(uri, scope)
        if rows is None:
            raise RowsProblem("q_rows names rows that are not there", unavailable=True)
        if isinstance(rows, bytes):
            raise RowsProblem("q_rows names an object that is not draft rows", unavailable=False)
        if check := getattr(rows, "check", None):
            check(tokens, self._vocab_size)
        return rows

    async def release(self, uri: str) -> None:
        """Give up the lease and the rows; a URI that is not held, or no longer, is no error."""
        if (lease_id := self._held.pop(uri, None)) is not None:
            await self._objects.unlease(uri, lease_id)
            await self._objects.delete(uri)
