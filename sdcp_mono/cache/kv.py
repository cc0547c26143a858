"""The KV blocks of one model as blobs of the tiers: ``core.kv.KvTiers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdcp_mono.cache.blob import Blob
from sdcp_mono.cache.tiers import Loaded, Tiers
from sdcp_mono.core.names import MlcUri


class KvCache:
    """A block is ``mlc://<authority>/<scope>/<kind>/<key in hex>``, of ``dtype`` and ``shape``, ``size`` bytes."""

    def __init__(self, tiers: Tiers, authority: str, kind: str, dtype: str, size: int) -> None:
        self._tiers = tiers
        self._authority = authority
        self._kind = kind
        self._dtype = dtype
        self._size = size

    def offer(self, key: bytes, scope: bytes | None, data: memoryview, done: Callable[[], None]) -> bool:
        return self._tiers.offer(self._blob(key, scope), data, done)

    def predict(self, keys: Sequence[bytes], scope: bytes | None) -> tuple[int, float]:
        return self._tiers.predict(self._blobs(keys, scope))

    async def load(self, keys: Sequence[bytes], scope: bytes | None, seconds: float) -> Loaded:
        return await self._tiers.load(self._blobs(keys, scope), seconds)

    def _blobs(self, keys: Sequence[bytes], scope: bytes | None) -> list[Blob]:
        return [self._blob(key, scope) for key in keys]

    def _blob(self, key: bytes, scope: bytes | None) -> Blob:
        uri = str(MlcUri(self._authority, scope, self._kind, key.hex()))
        return Blob(uri, self._size, self._dtype, (self._size,))
