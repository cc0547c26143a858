"""Blobs: immutable objects named by URI, and the header that makes one self-describing (design, section 5, point 1).

A blob leaves device memory as 4096 bytes of header and its payload. The header is little-endian:

    magic 8 | version u32 | SHA-256 of the URI 32 | scoped u8 | dimensions u8 | length of the URI u16 | scope 16
    | CRC32C of the payload u32 | size of the payload u64 | dtype 16 | shape 8 x u64
    | URI | zeros | CRC32C of all that u32

Law of this module: a blob and a CRC have exactly one header. What is read is believed only if writing it again gives
the same bytes; so no bit of a header can change unseen, and another URI's header is never mistaken for this one's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, TypeAlias

import google_crc32c
import numpy as np

from sdcp_mono.core.names import MlcUri
from sdcp_mono.core.problems import Malformed

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES: Final = 4096  # one page, so that the payload behind it can be read with O_DIRECT
VERSION: Final = 1
MAX_URI: Final = 1024  # bytes; the grammar in core/names.py allows less
MAX_DTYPE: Final = 16  # characters; "float8_e4m3fnuz" has 15
MAX_DIMENSIONS: Final = 8
MAX_NUMBER: Final = (1 << 63) - 1  # of bytes or of a dimension: what a signed 64-bit file offset can hold

_MAGIC: Final = b"sdcpblob"
_FIELDS: Final = struct.Struct("<8sI32sBBH16sIQ16s8Q")
_CRC: Final = struct.Struct("<I")


class BadBlob(Exception):
    """These bytes are not the blob they should be; one sentence says what is wrong."""


@dataclass(frozen=True, slots=True)
class Blob:
    """What an object is, without its bytes: full MLC URI, payload size in bytes, and what the payload means.

    ``key`` is SHA-256 of the URI, 32 bytes: what every index uses. The scope is part of the URI, hence of the key.
    Raises ``ValueError`` for what no header can carry.
    """

    uri: str
    size: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    key: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.uri) > MAX_URI:
            raise ValueError(f"uri: longer than {MAX_URI} bytes")
        try:
            MlcUri.parse(self.uri)
        except Malformed as e:
            raise ValueError(f"uri: {e.detail}") from None
        if not 0 <= self.size <= MAX_NUMBER:
            raise ValueError(f"size: {self.size} is not a number of bytes")
        if len(self.dtype) > MAX_DTYPE or not (self.dtype.isascii() and self.dtype.isprintable()):
            raise ValueError(f"dtype: not up to {MAX_DTYPE} printable ASCII characters")
        if len(self.shape) > MAX_DIMENSIONS or not all(0 <= n <= MAX_NUMBER for n in self.shape):
            raise ValueError(f"shape: not up to {MAX_DIMENSIONS} dimensions")
        object.__setattr__(self, "key", sha256(self.uri.encode("ascii")).digest())


def checksum(data: Buffer, value: int = 0) -> int:
    """CRC32C of ``data``, continued from ``value``; nothing is copied."""
    # The library takes only buffers that need no release, which rules memoryviews out and lets arrays over them in.
    return int(google_crc32c.extend(value, np.frombuffer(data, np.uint8)))


def encode_header(blob: Blob, crc: int) -> bytes:
    """The 4096 bytes before a payload whose CRC32C is ``crc``."""
    scope = MlcUri.parse(blob.uri).scope
    uri = blob.uri.encode("ascii")
    shape = blob.shape + (0,) * (MAX_DIMENSIONS - len(blob.shape))
    dtype = blob.dtype.encode("ascii")
    lengths = (scope is not None, len(blob.shape), len(uri))
    fields = _FIELDS.pack(_MAGIC, VERSION, blob.key, *lengths, scope or b"", crc, blob.size, dtype, *shape)
    body = (fields + uri).ljust(HEADER_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(checksum(body))


def decode_header(data: Buffer) -> tuple[Blob, int]:
    """The blob and its payload's CRC32C from the first 4096 bytes of ``data``; raises ``BadBlob``."""
    header = bytes(memoryview(data)[:HEADER_BYTES])
    if len(header) < HEADER_BYTES:
        raise BadBlob(f"header: {len(header)} bytes instead of {HEADER_BYTES}")
    magic, version, _, _, dimensions, length, _, crc, size, dtype, *shape = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        raise BadBlob("header: does not begin like a blob")
    if version != VERSION:
        raise BadBlob(f"header: version {version}, but only {VERSION} is known")
    if header[-_CRC.size :] != _CRC.pack(checksum(header[: -_CRC.size])):
        raise BadBlob("header: its CRC32C is wrong")
    if length > MAX_URI or dimensions > MAX_DIMENSIONS:
        raise BadBlob("header: lengths out of range")
    try:
        uri = header[_FIELDS.size : _FIELDS.size + length].decode("ascii")
        blob = Blob(uri, size, dtype.rstrip(b"\0").decode("ascii"), tuple(shape[:dimensions]))
    except ValueError as e:
        raise BadBlob(f"header: {e}") from None
    if encode_header(blob, crc) != header:
        raise BadBlob("header: its fields contradict one another, or its padding is not zero")
    return blob, crc


def pack(blob: Blob, data: Buffer) -> bytes:
    """Header and payload in one piece; raises ``ValueError`` if ``data`` is not ``blob.size`` bytes."""
    if memoryview(data).nbytes != blob.size:
        raise ValueError(f"data: {memoryview(data).nbytes} bytes instead of {blob.size}")
    return b"".join((encode_header(blob, checksum(data)), data))


def unpack(data: Buffer, uri: str) -> tuple[Blob, memoryview]:
    """What ``pack`` made, as a read-only view, if it is the whole and unharmed object ``uri``; raises ``BadBlob``."""
    blob, crc = decode_header(data)
    payload = memoryview(data)[HEADER_BYTES:].toreadonly()
    if blob.uri != uri:
        raise BadBlob(f"uri: asked for {uri}, found {blob.uri}")
    if len(payload) != blob.size:
        raise BadBlob(f"payload: {len(payload)} bytes instead of {blob.size}")
    if checksum(payload) != crc:
        raise BadBlob("payload: its CRC32C is wrong")
    return blob, payload
