"""Objects of the multi-level cache in a bucket: what several machines share (design, section 5).

Law of this module:
- An object is written once and whole, behind a header that tells when it expires and finds wrong bytes.
- Nothing here removes an object before its time but ``delete``. A bucket knows no leases: see ``lease``.
- Expired objects are missing, yet stay in the bucket until their URI is taken again: a cache's ``objects/`` needs a
  lifecycle rule. To delete them on sight could hit what another process has put in their place.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import google_crc32c

from sdcp_mono.cache.bucket import Bucket, Found, together
from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.ports import ByteSource, Got, Lease, ObjectMeta
from sdcp_mono.core.problems import Conflict, Malformed, TooLarge, Unavailable, Unprocessable

MAX_BYTES: Final = 64 << 20  # rows of 16 tokens over 256k ids are 16 MiB; in the 10 s of a request, 6.7 MB/s
MAX_TTL_MS: Final = 24 * 3600 * 1000  # as in memory; what must last longer is put without a TTL
NEVER_MS: Final = 2**64 - 1
_MAGIC: Final = b"SDCPOBJ\x01"
_HEADER: Final = struct.Struct(">8s8sQQI")  # magic, writer's nonce, expires (ms), payload bytes, payload CRC32C
_CRC: Final = struct.Struct(">I")  # of the header
_HEADER_BYTES: Final = _HEADER.size + _CRC.size


@dataclass(frozen=True, slots=True)
class _Header:
    nonce: bytes
    expires_ms: int
    size: int
    crc: int
    etag: str


class BucketObjects:
    """``core.ports.ObjectStore`` in a bucket.

    Raises ``Unavailable`` where the store fails or holds wrong bytes. ``clock`` is the wall clock in seconds: TTLs are
    as good as the clocks of those who share the bucket agree.
    """

    def __init__(self, bucket: Bucket, *, clock: Callable[[], float] = time.time) -> None:
        self._bucket = bucket
        self._clock = clock

    async def put(self, uri: str, value: bytes | ByteSource, *, ttl_ms: int | None = None) -> ObjectMeta:
        """Store once. Without ``ttl_ms`` the object stays until it is deleted, or a rule of the bucket's removes it.

        Raises ``Conflict`` if the URI is taken, ``TooLarge`` above 64 MiB, ``Malformed`` and ``Unprocessable`` for a
        URI and a TTL that can't be.
        """
        key = _key(MlcUri.parse(uri))
        expires_ms = NEVER_MS if ttl_ms is None else self._deadline(ttl_ms)
        data = value if isinstance(value, bytes) else value.to_bytes()
        if len(data) > MAX_BYTES:
            raise TooLarge(f"objects in a bucket have at most {MAX_BYTES} bytes, not {len(data)}")
        nonce = secrets.token_bytes(8)
        file = _encode(nonce, expires_ms, data)
        etag = await self._create(key, file, nonce)
        if etag is None and (there := await self._header(key)) is not None and self._expired(there):
            etag = await self._create(key, file, nonce, replacing=there.etag)
        if etag is None:
            raise Conflict("the object's URI is taken: objects are immutable")
        return ObjectMeta(uri, len(data), etag)

    async def get(self, uri: str, scope: bytes | None) -> bytes | None:
        """The value, or None where it is missing, expired or another scope's: all three look alike."""
        key = _readable(uri, scope)
        found = None if key is None else await self._bucket.get(key, _HEADER_BYTES + MAX_BYTES)
        if found is None or self._expired(header := _decode(found)):
            return None
        data = found.data[_HEADER_BYTES:]
        if len(data) != header.size or google_crc32c.value(data) != header.crc:
            raise Unavailable("the object store holds other bytes than were put")
        return data

    async def get_range(self, uri: str, scope: bytes | None, start: int, stop: int) -> bytes | None:
        """Bytes start..stop of the value, fewer at its end; None as ``get``. Its checksum covers no part."""
        key = _readable(uri, scope)
        header = None if key is None else await self._header(key)
        if key is None or header is None or self._expired(header):
            return None
        start, stop = max(start, 0), min(stop, header.size)
        if start >= stop:
            return b""
        part = (_HEADER_BYTES + start, _HEADER_BYTES + stop)
        found = await self._bucket.get(key, MAX_BYTES, part=part, etag=header.etag)
        if found is not None and len(found.data) != stop - start:
            raise Unavailable("the object store answered another range than was asked for")
        return None if found is None else found.data

    async def get_many(self, uris: Sequence[str], scope: bytes | None) -> Sequence[Got]:
        """One answer for each, in order: a failure of one is no failure of the others."""

        async def one(uri: str) -> Got:
            try:
                value = await self.get(uri, scope)
            except Unavailable:
                return Got("failed")
            return Got("missing") if value is None else Got("ok", value)

        return await together(one, uris)

    async def head(self, uri: str, scope: bytes | None) -> ObjectMeta | None:
        """Size and entity tag; None as ``get``."""
        key = _readable(uri, scope)
        header = None if key is None else await self._header(key)
        return None if header is None or self._expired(header) else ObjectMeta(uri, header.size, header.etag)

    async def lease(self, uri: str, ttl_ms: int, holder: str = "") -> Lease | None:
        """What is left of the object's life, at most ``ttl_ms``; None if it is missing.

        The object isn't held: it stays so long because nothing removes it earlier, unless it is deleted. So an
        object needs a TTL, when it is put, that lasts for its readers. ``expires_ms`` is on the wall clock.
        """
        deadline = self._deadline(ttl_ms)
        header = await self._header(_key(MlcUri.parse(uri)))
        return None if header is None or self._expired(header) else Lease("life", min(deadline, header.expires_ms))

    async def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None:
        """As ``lease``: an object's life can't be prolonged."""
        return await self.lease(uri, ttl_ms)

    async def unlease(self, uri: str, lease_id: str) -> None:
        """Nothing was held."""

    async def delete(self, uri: str) -> None:
        """Remove the object now, whoever reads it; a missing one is no error."""
        await self._bucket.delete([_key(MlcUri.parse(uri))])

    async def _create(self, key: str, file: bytes, nonce: bytes, *, replacing: str | None = None) -> str | None:
        """The etag of ``file`` once it is stored, None if another is there; a lost answer says neither, so look."""
        lost: Unavailable | None = None
        try:
            if (etag := await self._bucket.create(key, file, replacing=replacing)) is not None:
                return etag
        except Unavailable as unavailable:
            lost = unavailable
        there = await self._header(key)
        if there is not None and there.nonce == nonce:
            return there.etag
        if lost is not None and (there is None or there.etag == replacing):
            raise lost
        return None

    async def _header(self, key: str) -> _Header | None:
        found = await self._bucket.get(key, _HEADER_BYTES, part=(0, _HEADER_BYTES))
        return None if found is None else _decode(found)

    def _expired(self, header: _Header) -> bool:
        return header.expires_ms <= self._clock() * 1000

    def _deadline(self, ttl_ms: int) -> int:
        if not 0 < ttl_ms <= MAX_TTL_MS:
            raise Unprocessable(f"ttl_ms must be from 1 to {MAX_TTL_MS}, not {ttl_ms}")
        return int(self._clock() * 1000) + ttl_ms


def _key(uri: MlcUri) -> str:
    return f"objects/{str(uri).removeprefix('mlc://')}"


def _readable(uri: str, scope: bytes | None) -> str | None:
    """The object's key, or None where nobody of ``scope`` can have put it: the store isn't even asked."""
    try:
        parsed = MlcUri.parse(uri)
    except Malformed:
        return None
    return _key(parsed) if parsed.scope == scope else None


def _encode(nonce: bytes, expires_ms: int, data: bytes) -> bytes:
    header = _HEADER.pack(_MAGIC, nonce, expires_ms, len(data), google_crc32c.value(data))
    return b"".join((header, _CRC.pack(google_crc32c.value(header)), data))


def _decode(found: Found) -> _Header:
    header, crc = found.data[: _HEADER.size], found.data[_HEADER.size : _HEADER_BYTES]
    if len(crc) == _CRC.size and _CRC.pack(google_crc32c.value(header)) == crc:
        magic, nonce, expires_ms, size, data_crc = _HEADER.unpack(header)
        if magic == _MAGIC and found.size == _HEADER_BYTES + size:
            return _Header(nonce, expires_ms, size, data_crc, found.etag)
    raise Unavailable("the object store holds other bytes than were put")
