"""The checksum of a record, its key, its layout and its age. Part of the format of stores: it must never change.

A two-level tree. Level one: the record as little-endian 64-bit words, in pieces of 65536, is multiplied with fixed odd
random 64-bit keys and summed modulo 2^64; once as it is, and once shifted by four bytes. Level two is BLAKE2b over
those sums, the last 16 bytes, the key, the fingerprint and the generation. An odd key makes
every change within one word visible. The top bits of a word meet only the low bits of its key, so changes of top bits
in two words could cancel; shifted, they are low bits. For unrelated changes a collision has a chance of about 2^-32 at
worst (a multilinear hash of 32-bit pieces). Against accidents, not attackers: it has no secret, so whoever can write
the file can make a header for any bytes.

Level one is what costs. csrc/swap/checksum.cc makes both sums in one pass, without the interpreter's lock: on one core
20 GB/s of what is in the cache, 8 of what is not. Without that library NumPy makes the same sums in two passes, 3 to 7
GB/s, in part with the lock held. Why not a library: zlib's CRC-32 measured 2 to 4 GB/s and SHA-256 1.4, less than a
good disk reads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence

import numpy as np

from .. import libraries
from ..errors import ImplementationError

__all__ = ["PIECE_KEYS", "PIECE_WORDS", "checksum", "checksums", "native_sums", "numpy_sums"]

PIECE_WORDS = 65536
_RANDOM = hashlib.shake_256(b"dsv4_jax record").digest(8 * PIECE_WORDS)
PIECE_KEYS = np.frombuffer(_RANDOM, "<u8").astype(np.uint64) | np.uint64(1)


def checksums(
    records: Sequence[np.ndarray], keys: Sequence[bytes], fingerprint: bytes, generations: Sequence[int]
) -> list[bytes]:
    """16 bytes for each of n records of one size (uint8, contiguous) and what its header says about it."""
    digests = []
    sums = (native_sums() or numpy_sums)(records)
    for record, key, generation, some in zip(records, keys, generations, sums, strict=True):
        level2 = hashlib.blake2b(struct.pack("<QQH", generation, record.size, len(key)), digest_size=16)
        level2.update(some.tobytes() + key + fingerprint + record[-16:].tobytes())
        digests.append(level2.digest())
    return digests


def checksum(record: np.ndarray, key: bytes, fingerprint: bytes, generation: int) -> bytes:
    """The checksum of one record (see `checksums`)."""
    return checksums([record], [key], fingerprint, [generation])[0]


def numpy_sums(records: Sequence[np.ndarray]) -> np.ndarray:
    """Level one, <u8 [n, sums]: one for every piece of the words, then one for every piece of the shifted words."""
    return np.array([_sums(record) for record in records], "<u8")


def _sums(record: np.ndarray) -> list[int]:
    sums = []
    # `dot` lets other threads run while it computes; `einsum` does not, but takes the shifted words without a copy.
    for start, multiply in ((0, np.dot), (4, functools.partial(np.einsum, "i,i"))):
        words = record[start : start + (record.size - start) // 8 * 8].view("<u8")
        for i in range(0, words.size, PIECE_WORDS):
            piece = words[i : i + PIECE_WORDS]
            sums.append(int(multiply(piece, PIECE_KEYS[: piece.size])))
    return sums


@functools.cache
def native_sums() -> Callable[[Sequence[np.ndarray]], np.ndarray] | None:
    """`numpy_sums` by the CPU library; None if there is none, or one without it."""
    try:
        sum_records = libraries.open_cpu().dsv4_sum_records
    except (ImplementationError, AttributeError):
        return None
    sum_records.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    sum_records.restype = None

    def sums(records: Sequence[np.ndarray]) -> np.ndarray:
        size = records[0].size if records else 0
        if not all(r.dtype == np.uint8 and r.flags.c_contiguous and r.size == size for r in records):
            raise ValueError("records must be contiguous, of uint8, and of one size")
        pieces = sum(-(-words // PIECE_WORDS) for words in (size // 8, max(0, size - 4) // 8))
        found = np.empty((len(records), pieces), "<u8")
        addresses = np.array([record.ctypes.data for record in records], np.uintp)
        # One call for the batch: every call gives up the interpreter's lock, and must get it back.
        sum_records(addresses.ctypes.data, len(records), size, PIECE_KEYS.ctypes.data, found.ctypes.data)
        return found

    return sums
