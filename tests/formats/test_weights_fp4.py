"""Packed experts' weights: they come back, and a thread's words decode to its codes as the kernel decodes them."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.formats.weights import fp4
from dsv4_jax.formats.weights.fp4 import LARGEST_SCALE, TILE_BYTES

from ..oracle.experts import dequantised


def random_matrix(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    *lead, rows, columns = shape
    codes = rng.integers(0, 256, (*lead, rows, columns // 2), np.uint8)
    return codes, rng.integers(0, LARGEST_SCALE + 1, (*lead, rows, columns // 32), np.uint8)


def rotated(word: int, by: int) -> int:
    return (word >> by | word << (32 - by)) & 0xFFFFFFFF


def bf16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def as_the_kernel(tile: np.ndarray) -> np.ndarray:
    """`decode_weights` of csrc/moe/weights.cuh, thread by thread: [64, 128] of a packed tile."""
    codes = tile[:4096].view("<u4").reshape(4, 128, 2)
    scales = tile[4096:].view("<u4").reshape(32, 2)
    out = np.full((64, 128), np.nan)
    for part in range(4):
        for thread in range(128):
            w0, w1 = (int(x) for x in codes[part, thread])
            rest = (w0 & 0x60306030) | (w1 & ~0x60306030 & 0xFFFFFFFF)
            factors = rotated(int(scales[thread >> 2, part // 2]), 8 * (part % 2)) & 0x7F807F80
            words = ((w0, 0), (w0, 4), (w0, 10), (rest, 8), (w1, 2), (w1, 6), (w1, 12), (rest, 14))
            warp, lane = thread >> 5, thread & 31
            for i, (word, rotation) in enumerate(words):
                raw = rotated(word, rotation) & 0x81C081C0
                row = 16 * warp + (lane >> 2) + 8 * (i & 1)
                column = 32 * part + 16 * (i >> 2) + 8 * (i >> 1 & 1) + 2 * (lane & 3)
                factor = bf16(factors >> 16 * (i & 1) & 0xFFFF)
                for k in range(2):
                    out[row, column + k] = bf16(raw >> 16 * k & 0xFFFF) * factor
    return out


def test_decodes_as_released() -> None:
    codes, scales = random_matrix(128, 256)
    packed = np.asarray(fp4.pack(codes, scales)[0])
    assert packed.shape == (2, 2, TILE_BYTES)
    want = dequantised(codes, scales)
    for i, j in np.ndindex(2, 2):
        np.testing.assert_array_equal(as_the_kernel(packed[i, j]), want[64 * i :, 128 * j :][:64, :128])


@pytest.mark.parametrize("shape", [(64, 128), (3, 128, 512), (2, 2, 192, 256)])
def test_comes_back(shape: tuple[int, ...]) -> None:
    codes, scales = random_matrix(*shape)
    (packed,) = fp4.pack(codes, scales)
    assert packed.nbytes == codes.nbytes + scales.nbytes
    for got, want in zip(fp4.unpack(packed), (codes, scales), strict=True):
        np.testing.assert_array_equal(got, want)


def test_gates_and_ups_take_turns() -> None:
    gate, up = np.zeros((2, 32, 3)), np.ones((2, 32, 3))
    rows = fp4.gate_up_rows(gate, up)
    assert rows.shape == (2, 64, 3)
    np.testing.assert_array_equal(rows[:, :, 0], np.broadcast_to(np.arange(64) // 8 % 2, (2, 64)))


def test_gates_and_ups_that_do_not_take_turns() -> None:
    with pytest.raises(ShapeError, match="not alike or rows not in 32s"):
        fp4.gate_up_rows(np.zeros((32, 3)), np.zeros((64, 3)))
