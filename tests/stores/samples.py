"""Keys and records for the store tests."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib

import numpy as np

from dsv4_jax.stores import SlabStore

RECORD_BYTES = 5000  # not a multiple of anything the file or the checksum cares about
FINGERPRINT = "layout A"


def key(i: int) -> bytes:
    return hashlib.sha256(b"key %d" % i).digest()


def keys(*ids: int) -> list[bytes]:
    return [key(i) for i in ids]


def records(*ids: int, record_bytes: int = RECORD_BYTES) -> np.ndarray:
    """What belongs under `keys(*ids)`: uint8 [n, record_bytes]."""
    digests = [hashlib.shake_128(b"record %d" % i).digest(record_bytes) for i in ids]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(ids), record_bytes)


def make_slab(path: str | os.PathLike[str], max_records: int = 8, **options) -> SlabStore:
    options = {"record_bytes": RECORD_BYTES, "fingerprint": FINGERPRINT, **options}
    return SlabStore(path, max_records=max_records, **options)


def read(store, *ids: int) -> list[int]:
    """The ids that the store serves, after checking every byte it serves."""
    buffers = np.full((len(ids), store.record_bytes), 0xEE, np.uint8)
    good = store.read_into(keys(*ids), buffers)
    assert good.dtype == bool and good.shape == (len(ids),)
    expected = records(*ids, record_bytes=store.record_bytes)
    np.testing.assert_array_equal(buffers[good], expected[good])
    return [i for i, flag in zip(ids, good, strict=True) if flag]


def of_version(header: bytes, version: int) -> bytes:
    """A packed header as another version of the format would have written it."""
    body = header[8:26] + struct.pack("<H", version) + header[28:]
    return header[:4] + struct.pack("<I", zlib.crc32(header[:4] + body)) + body
