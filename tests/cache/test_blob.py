"""Headers of blobs: what is written, and that nothing else is ever read as one (design, section 5, point 1)."""

from __future__ import annotations

import hashlib
import mmap
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcp_mono.cache.blob import (
    HEADER_BYTES,
    BadBlob,
    Blob,
    checksum,
    decode_header,
    encode_header,
    pack,
    unpack,
)

SCOPE = bytes(range(16))
URI = f"mlc://cache.local:9/{SCOPE.hex()}/target_kv/abcdef"
BLOB = Blob(URI, 5, "float32", (2, 30, 16))
PAYLOAD = b"hello"


def crc32c(data: bytes) -> int:
    """Bit by bit, from the reversed polynomial of RFC 3720, appendix B.4."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def signed(header: bytes) -> bytes:
    """The header with its last four bytes made right, as a forger would."""
    return header[:-4] + struct.pack("<I", checksum(header[:-4]))


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_checksum_is_crc32c_of_any_buffer(data: bytes, crc: int) -> None:
    """Vectors of RFC 3720, appendix B.4."""
    memory = memoryview(mmap.mmap(-1, 4096))
    memory[: len(data)] = data
    assert checksum(data) == checksum(bytearray(data)) == crc
    assert checksum(memory[: len(data)]) == checksum(memory[: len(data)].toreadonly()) == crc
    assert checksum(data[3:], checksum(data[:3])) == crc


def test_the_header_is_laid_out_as_documented() -> None:
    header = encode_header(BLOB, crc32c(PAYLOAD))
    expected = b"".join((
        b"sdcpblob", (1).to_bytes(4, "little"), hashlib.sha256(URI.encode()).digest(),
        b"\x01", b"\x03", len(URI).to_bytes(2, "little"), SCOPE,
        crc32c(b"hello").to_bytes(4, "little"), (5).to_bytes(8, "little"), b"float32" + bytes(9),
        *(n.to_bytes(8, "little") for n in (2, 30, 16, 0, 0, 0, 0, 0)), URI.encode(),
    ))  # fmt: skip
    expected += bytes(4092 - len(expected))
    assert header == expected + crc32c(expected).to_bytes(4, "little")
    assert decode_header(header + b"more") == (BLOB, crc32c(PAYLOAD))


def test_the_key_names_the_scope_too() -> None:
    other = Blob(f"mlc://cache.local:9/{bytes(16).hex()}/target_kv/abcdef", 5)
    nobodys = Blob("mlc://cache.local:9/-/target_kv/abcdef", 5)
    assert BLOB.key == hashlib.sha256(URI.encode()).digest()
    assert len({BLOB.key, other.key, nobodys.key}) == 3
    assert decode_header(encode_header(nobodys, 1)) == (nobodys, 1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("uri", {"uri": "mlc://a/-/kv/" + "x" * 1024}),
        ("uri", {"uri": "https://a/-/kv/x"}),
        ("uri", {"uri": "mlc://a/-/kv/é"}),
        ("size", {"size": -1}),
        ("size", {"size": 1 << 63}),
        ("dtype", {"dtype": "x" * 17}),
        ("dtype", {"dtype": "f\0"}),
        ("dtype", {"dtype": "ö"}),
        ("shape", {"shape": (1,) * 9}),
        ("shape", {"shape": (-1,)}),
    ],
)
def test_what_no_header_can_carry_is_named(name: str, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        Blob(**{"uri": URI, "size": 1, **wrong})  # type: ignore[arg-type]


def test_a_packed_blob_is_served_only_whole_and_as_what_it_is() -> None:
    data = pack(BLOB, memoryview(PAYLOAD))
    blob, payload = unpack(bytearray(data), URI)
    assert (blob, bytes(payload), payload.readonly) == (BLOB, PAYLOAD, True)
    with pytest.raises(BadBlob, match="uri"):
        unpack(data, URI + "0")
    for damaged in (data[:-1], data + b"\0", data[:-1] + b"0"):
        with pytest.raises(BadBlob, match="payload"):
            unpack(damaged, URI)
    with pytest.raises(ValueError, match="data: 4 bytes instead of 5"):
        pack(BLOB, b"four")
    nothing = Blob(URI, 0)
    assert unpack(pack(nothing, b""), URI)[0] == nothing


def test_an_unknown_version_is_said_to_be_one() -> None:
    header = bytearray(encode_header(BLOB, 0))
    header[8] = 2
    with pytest.raises(BadBlob, match="version 2"):
        decode_header(bytes(header))


@given(st.integers(0, HEADER_BYTES - 1))
def test_a_truncated_header_is_rejected(length: int) -> None:
    with pytest.raises(BadBlob, match=f"{length} bytes"):
        decode_header(encode_header(BLOB, 7)[:length])


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_noise_is_rejected(data: bytes) -> None:
    with pytest.raises(BadBlob):
        decode_header(data)


POSITIONS = st.integers(0, 260) | st.integers(0, HEADER_BYTES - 1)  # mostly where the fields are
MUTATIONS = st.lists(st.tuples(POSITIONS, st.integers(0, 255)), min_size=1, max_size=8)


@settings(max_examples=500)
@given(MUTATIONS, st.booleans())
def test_a_mutated_header_is_rejected_or_exactly_what_it_says(mutations: list[tuple[int, int]], forged: bool) -> None:
    original = encode_header(BLOB, 7)
    header = bytearray(original)
    for position, byte in mutations:
        header[position] = byte
    mutated = signed(bytes(header)) if forged else bytes(header)
    try:
        found = decode_header(mutated)
    except BadBlob:
        assert mutated != original
        return
    assert encode_header(*found) == mutated
    if not forged:  # nothing but the original has its checksum
        assert found == (BLOB, 7)


@pytest.mark.parametrize("byte", [*range(236), 300, 4000, 4091])
def test_every_byte_is_covered_even_under_a_right_checksum(byte: int) -> None:
    """A forged header is refused, or decodes to another blob: no byte is without meaning."""
    header = bytearray(encode_header(BLOB, 7))
    header[byte] ^= 1
    with pytest.raises(BadBlob):
        decode_header(bytes(header))
    try:
        found = decode_header(signed(bytes(header)))
    except BadBlob:
        return
    assert found != (BLOB, 7)


@given(
    st.text("abcdef0123456789", min_size=1, max_size=64),
    st.none() | st.binary(min_size=16, max_size=16),
    st.integers(0, 2**63 - 1),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=16),
    st.lists(st.integers(0, 2**63 - 1), max_size=8),
    st.integers(0, 2**32 - 1),
)
def test_every_blob_comes_back(
    name: str, scope: bytes | None, size: int, dtype: str, shape: list[int], crc: int
) -> None:
    blob = Blob(f"mlc://a/{scope.hex() if scope else '-'}/draft_kv/{name}", size, dtype, tuple(shape))
    assert decode_header(encode_header(blob, crc)) == (blob, crc)
