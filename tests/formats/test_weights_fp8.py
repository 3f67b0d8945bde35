"""Packed FP8 matrices: a thread's words decode to its codes as the kernel decodes them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dsv4_jax.formats.weights import fp8, fp8_e4m3
from dsv4_jax.formats.weights.fp8 import LARGEST_SCALE, TILE_BYTES

from ..cuda.test_widths import CSRC, constants
from ..oracle.dense import dequantised, random_matrix

WORD = 0xFFFFFFFF


def pack(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.asarray(fp8.pack(codes, scales)[0])


def turned(word: int, by: int) -> int:
    return (word >> by | word << (32 - by)) & WORD


def bf16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def as_the_kernel(tile: np.ndarray, scale: int) -> np.ndarray:
    """`decode_codes` of csrc/dense/fp8_weights.cuh, thread by thread: [64, 128] of a packed tile."""
    words = tile.view("<u4").reshape(4, 128, 2, 2)
    factor = bf16(scale + 120 << 7)
    out = np.full((64, 128), np.nan)
    for part, thread, product in np.ndindex(4, 128, 2):
        first, second = (int(x) for x in words[part, thread, product])
        other = turned(second, 8)
        third, fourth = ((first & mask) | (other & ~mask & WORD) for mask in (0x080F080F, 0x70007000))
        warp, lane = thread >> 5, thread & 31
        for i, fields in enumerate((first, second, third << 4 & WORD, turned(fourth, 4))):
            row = 16 * warp + (lane >> 2) + 8 * (i & 1)
            column = 32 * part + 16 * product + 8 * (i >> 1) + 2 * (lane & 3)
            for k in range(2):
                out[row, column + k] = bf16((fields & 0x87F087F0) >> 16 * k & 0xFFFF) * factor
    return out


@pytest.mark.parametrize("scale", [0, 112, LARGEST_SCALE])
def test_decodes_as_released(scale: int) -> None:
    codes, scales = random_matrix(np.random.default_rng(0), 128, 256)
    scales[:] = scale
    packed = pack(codes, scales)
    assert packed.shape == (2, 2, TILE_BYTES)
    want = dequantised(codes, scales)
    for i, j in np.ndindex(2, 2):
        np.testing.assert_array_equal(as_the_kernel(packed[i, j], scale), want[64 * i :, 128 * j :][:64, :128])


def test_every_code_decodes() -> None:
    codes = np.resize(np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8), (64, 128))
    scales = np.full((1, 1), 127, np.uint8)
    got = as_the_kernel(pack(codes, scales)[0, 0], 127)
    np.testing.assert_array_equal(got, dequantised(codes, scales))
    np.testing.assert_array_equal(np.signbit(got), codes >> 7 == 1)


def test_matrices_stack() -> None:
    rng = np.random.default_rng(2)
    (a, scale_a), (b, scale_b) = random_matrix(rng, 256, 256), random_matrix(rng, 64, 256)
    together = pack(np.concatenate([a, b]), np.concatenate([scale_a, scale_b]))
    np.testing.assert_array_equal(together, np.concatenate([pack(a, scale_a), pack(b, scale_b)]))


def test_sizes_are_those_of_the_header() -> None:
    text = (CSRC / "dense" / "fp8_weights.cuh").read_text()
    k = constants("common/widths.h") | {name: int(value) for name, value in re.findall(r"(k\w+) = (\d+);", text)}
    assert (k["kDenseColumns"], k["kDenseScaleRows"]) == (fp8.TILE_COLUMNS, fp8.BLOCK)
    assert k["kFieldsExponent"] + LARGEST_SCALE == 254  # the greatest exponent of a bf16


def test_tiles_for_rows_of_e4m3_lie_as_the_matrix_units_read_them() -> None:
    codes, scales = random_matrix(np.random.default_rng(3), 192, 384)
    tiles = np.asarray(fp8_e4m3.pack(codes, scales)[0])
    assert tiles.shape == (3, 3, TILE_BYTES)
    for row, column in ((0, 0), (1, 0), (7, 127), (64, 130), (191, 383), (77, 200)):
        at = row % 64 * 128 + ((column % 128 // 16) ^ (row % 8)) * 16 + column % 16
        assert tiles[row // 64, column // 128, at] == codes[row, column]
