"""Dense FP8 matrices in the order in which the CUDA kernel reads them (csrc/dense_fp8_weights.cuh). No jax.

A matrix [N, K] as released is e4m3 codes, one byte each, and an e8m0 scale (2^(code - 127)) per 128 x 128. Packed, the
codes are tiles of 64 rows x 128 columns, [N / 64, K / 128, 8192]: the same bits elsewhere; `unpack` gives back what was
packed. Scales stay as they are. Matrices of equal K stack along N, if all but the last have N in 128s.

A tile is [32 columns, thread 0..127, word 0..3]. Thread 32 w + 4 r + q has, of rows 16 w + r and + 8, the columns
2 q + {0, 1} of every 8: per 16 columns two words, four pairs of neighbours. Each pair is wanted in the fields of two
bf16, sign at bit 15 and magnitude at bits 10 to 4 of either half. The first pair lies there in the first word, the
second in the second; the third (4 bits lower) and the fourth (4 bits higher, round the end of the word) take the bits
that these leave free in both words.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, TypeAlias

import numpy as np

from ...errors import ShapeError

__all__ = [
    "BLOCK",
    "LARGEST_SCALE",
    "NAN",
    "PACKED_AXES",
    "TILE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "WORD_AXES",
    "check",
    "pack",
    "pair_fields",
    "tiled",
    "two_words",
    "unpack",
]

Words: TypeAlias = Any  # an array of uint32

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 64, 128, 8192
BLOCK = 128  # rows, and columns, of a scale
LARGEST_SCALE = 134  # code of 2^7; 2^120 times more is no bf16
NAN = 0x7F  # magnitude of the codes that are no numbers
_THIRD, _FOURTH = np.uint32(0x080F080F), np.uint32(0x70007000)  # their bits that lie in the first word
_SHIFT, _TURN = 4, 8
# Axes of codes [tile, w, h, r, step, part, product, c, q] as those of words [tile, step, part, w, r, q, product, c, h].
WORD_AXES = (0, 4, 5, 1, 3, 8, 6, 7, 2)
PACKED_AXES = tuple(int(i) for i in np.argsort(WORD_AXES))  # the other way


def check(codes: np.ndarray, scales: np.ndarray) -> None:
    """Whether a matrix as released, [N, K] codes and [ceil(N / 128), K / 128] scales, can be packed.

    Raises:
        ShapeError: N not in 64s or K not in 128s, scales of another shape, a NaN among the codes, or a scale of more
            than 2^7 (NaN is one), which the kernel could not represent.
    """
    rows, columns = codes.shape
    if rows % TILE_ROWS or columns % TILE_COLUMNS:
        raise ShapeError(
            f"dense_fp8 weights [{rows}, {columns}]: rows come in {TILE_ROWS}s, columns in {TILE_COLUMNS}s"
        )
    if scales.shape != (-(-rows // BLOCK), columns // BLOCK):
        raise ShapeError(f"dense_fp8 weights [{rows}, {columns}]: scales {scales.shape}, not one per {BLOCK} x {BLOCK}")
    if scales.size and scales.max() > LARGEST_SCALE:
        raise ShapeError(f"dense_fp8 weights: scale code {scales.max()}, the largest that fits is {LARGEST_SCALE}")
    if (codes & NAN == NAN).any():
        raise ShapeError(f"dense_fp8 weights [{rows}, {columns}]: a code is NaN")


def pack(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes [N, K] uint8 -> [N / 64, K / 128, 8192] uint8. Raises as `check`."""
    check(codes, scales)
    rows, columns = codes.shape
    pairs = np.ascontiguousarray(codes).view("<u2").reshape(tiled(rows, columns)).transpose(WORD_AXES)
    words = np.stack(two_words(pairs.reshape(*pairs.shape[:-2], 4)), -1).astype("<u4")
    return words.view(np.uint8).reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_BYTES)


def unpack(packed: np.ndarray) -> np.ndarray:
    """The codes that `pack` was given."""
    tiles, steps, _ = packed.shape
    words = np.ascontiguousarray(packed).view("<u4").reshape(tiles, steps, 4, 4, 8, 4, 2, 2)
    fields = np.stack(pair_fields(words[..., 0], words[..., 1]), -1)
    pairs = _pairs(fields).reshape(tiles, steps, 4, 4, 8, 4, 2, 2, 2).transpose(PACKED_AXES)
    return np.ascontiguousarray(pairs).view(np.uint8).reshape(tiles * TILE_ROWS, steps * TILE_COLUMNS)


def tiled(rows: int, columns: int) -> tuple[int, ...]:
    """The shape of a matrix of pairs by tile, w, h, r, step, part, product, c and q."""
    return (rows // TILE_ROWS, 4, 2, 8, columns // TILE_COLUMNS, 4, 2, 2, 4)


def two_words(pairs: Words) -> tuple[Words, Words]:
    """[..., 4] uint16 of NumPy or JAX, each two codes with the first in the low byte -> two words [...] uint32."""
    first, second, third, fourth = (_fields(pairs[..., i].astype(np.uint32)) for i in range(4))
    third, fourth = third >> np.uint32(_SHIFT), _turned(fourth, -_SHIFT)
    return first | third & _THIRD | fourth & _FOURTH, second | _turned(third & ~_THIRD | fourth & ~_FOURTH, -_TURN)


def pair_fields(first: Words, second: Words) -> tuple[Words, Words, Words, Words]:
    """The four pairs of two words, uint32 of NumPy or JAX; other bits than those of the fields are anything."""
    turned = _turned(second, _TURN)
    third, fourth = first & _THIRD | turned & ~_THIRD, first & _FOURTH | turned & ~_FOURTH
    return first, second, third << np.uint32(_SHIFT), _turned(fourth, _SHIFT)


def _turned(x: Words, by: int) -> Words:
    """Rotated right by so many bits."""
    return x >> np.uint32(by % 32) | x << np.uint32(-by % 32)


def _fields(x: Words) -> Words:
    """Two codes in the low bytes in the fields of two bf16."""
    masks = zip((0x80, 0x7F, 0x8000, 0x7F00), (8, 4, 16, 12), strict=True)
    return functools.reduce(operator.or_, ((x & np.uint32(mask)) << np.uint32(by) for mask, by in masks))


def _pairs(fields: np.ndarray) -> np.ndarray:
    x = fields >> 8 & 0x80 | fields >> 4 & 0x7F | fields >> 16 & 0x8000 | fields >> 12 & 0x7F00
    return x.astype("<u2")
