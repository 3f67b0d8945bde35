"""The header of a record: what goes in comes out, and a header with any bit changed is none."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from dsv4_jax.stores.record_header import (
    HEADER_BYTES,
    VERSION,
    RecordHeader,
    header_version,
    pack_header,
    unpack_header,
)

from .samples import of_version


@hypothesis.given(
    key=st.binary(min_size=1, max_size=48),
    generation=st.integers(0, 2**64 - 1),
    record_bytes=st.integers(0, 2**64 - 1),
    fingerprint=st.binary(min_size=32, max_size=32),
    digest=st.binary(min_size=16, max_size=16),
    bit=st.integers(0, 8 * HEADER_BYTES - 1),
)
def test_header_round_trip(key, generation, record_bytes, fingerprint, digest, bit):
    header = RecordHeader(key, generation, record_bytes, fingerprint, digest)
    packed = pack_header(header)
    assert len(packed) == HEADER_BYTES and unpack_header(packed) == header
    harmed = bytearray(packed)
    harmed[bit // 8] ^= 1 << bit % 8
    assert unpack_header(bytes(harmed)) is None
    assert unpack_header(packed[:-1]) is None and unpack_header(bytes(HEADER_BYTES)) is None


def test_the_header_is_part_of_the_formats():
    """Files and objects outlive versions."""
    packed = pack_header(RecordHeader(b"k" * 32, 7, 5000, b"f" * 32, b"d" * 16))
    fields = ["64737634", "43d9971d", "0700000000000000", "8813000000000000", "2000020000000000"]
    assert packed.hex() == "".join(fields) + "66" * 32 + "64" * 16 + "6b" * 32 + "00" * 16


def test_headers_of_other_versions_are_known_and_not_read():
    packed = pack_header(RecordHeader(b"k" * 32, 7, 5000, b"f" * 32, b"d" * 16))
    assert header_version(packed) == VERSION and of_version(packed, VERSION) == packed
    for stored, version in ((0, 1), (VERSION + 1, VERSION + 1)):
        other = of_version(packed, stored)
        assert header_version(other) == version and unpack_header(other) is None
        assert header_version(other[:-1] + b"x") is None
