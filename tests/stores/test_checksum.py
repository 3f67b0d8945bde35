"""The checksum: what it sees, that it never changes, and that both ways to compute it agree."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from dsv4_jax.stores import checksum as checksum_module
from dsv4_jax.stores.checksum import PIECE_KEYS, PIECE_WORDS, checksum, numpy_sums

from .. import native
from .samples import key, records

PIECE = 8 * PIECE_WORDS


@pytest.fixture(params=["native", "numpy"])
def sums(request, monkeypatch):
    """Level one of the checksum, and `checksum` made to use it."""
    native.load_cpu()
    found = checksum_module.native_sums.__wrapped__() if request.param == "native" else None
    assert (found is None) == (request.param == "numpy")
    monkeypatch.setattr(checksum_module, "native_sums", lambda: found)
    return found or numpy_sums


def expected_sums(record: np.ndarray) -> list[int]:
    """As the format says, in Python's integers."""
    sums = []
    for start in (0, 4):
        data = record[start:].tobytes()
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
        for i in range(0, len(words), PIECE_WORDS):
            piece = words[i : i + PIECE_WORDS]
            sums.append(sum(w * int(k) for w, k in zip(piece, PIECE_KEYS, strict=False)) % 2**64)
    return sums


@pytest.mark.parametrize("size", [*range(21), 5000, 70_001, PIECE - 4, PIECE + 3, PIECE + 4, PIECE + 12])
def test_sums(sums, size):
    records = np.random.default_rng(size).integers(0, 256, (2, size), np.uint8)
    assert sums(list(records)).tolist() == [expected_sums(record) for record in records]


def test_native_sums_are_numpys():
    """At any address, of any size."""
    native.load_cpu()
    native_sums = checksum_module.native_sums.__wrapped__()
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, 3 * PIECE, np.uint8)
    near = [n * PIECE + d for n in (1, 2) for d in range(-9, 14)]
    for size in [*range(40), *near, *rng.integers(40, 2 * PIECE, 50).tolist()]:
        start = int(rng.integers(0, 64))
        batch = [memory[start : start + size], memory[-size - 1 : -1]]
        np.testing.assert_array_equal(native_sums(batch), numpy_sums(batch), err_msg=f"{start} {size}")
    assert native_sums([]).size == 0
    for wrong in ([memory[::2]], [memory[:16].view(np.int64)], [memory[:16], memory[:17]]):
        with pytest.raises(ValueError, match="records must be"):
            native_sums(wrong)


def test_without_the_library(tmp_path):
    """No library, or one from before it had the sums: NumPy's, and no jax either way."""
    old = tmp_path / "old.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "-o", str(old), "/dev/null"], check=True)
    script = """
import sys
from dsv4_jax.stores import SlabStore
from dsv4_jax.stores.checksum import native_sums
assert native_sums() is None and "jax" not in sys.modules
"""
    for library in (tmp_path / "none.so", old):
        environment = {**os.environ, "DSV4_JAX_CPU_LIBRARY": str(library)}
        subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=native.ROOT)


def test_checksum_sees_every_bit_and_every_pair_of_top_bits(sums):
    record = records(0, record_bytes=70_003)[0].copy()
    base = checksum(record, key(0), b"f" * 32, 7)
    assert base == checksum(record, key(0), b"f" * 32, 7)
    assert base != checksum(record, key(1), b"f" * 32, 7)
    assert base != checksum(record, key(0), b"g" * 32, 7)
    assert base != checksum(record, key(0), b"f" * 32, 8)
    assert base != checksum(record[:-1], key(0), b"f" * 32, 7)
    rng = np.random.default_rng(0)
    for position in [0, 7, 8, 70_002, 70_000, *rng.integers(0, record.size, 200).tolist()]:
        record[position] ^= 1 << int(rng.integers(8))
        assert checksum(record, key(0), b"f" * 32, 7) != base
        record[:] = records(0, record_bytes=70_003)[0]
    for _ in range(200):  # a multilinear sum modulo 2^64 alone would not see these
        a, b = rng.choice(8000, 2, replace=False)
        record[8 * a + 7] ^= 0x80
        record[8 * b + 7] ^= 0x80
        assert checksum(record, key(0), b"f" * 32, 7) != base
        record[8 * a + 7] ^= 0x80
        record[8 * b + 7] ^= 0x80
    swapped = record.copy()
    swapped[:4096], swapped[32768 : 32768 + 4096] = record[32768 : 32768 + 4096], record[:4096]
    assert checksum(swapped, key(0), b"f" * 32, 7) != base


def test_checksum_is_part_of_the_format(sums):
    """Files outlive versions: these bytes may change only together with the file's version."""
    record = np.arange(40_001, dtype=np.uint32).view(np.uint8)[:40_001]
    assert checksum(record, b"k" * 32, b"f" * 32, 1).hex() == "a1c89b254da4d5a742661c1f4c2ef6eb"
