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

from typing import Any, TypeAlias

import numpy as np

from ..errors import ShapeError

__all__ = [
    "BLOCK",
    "LARGEST_SCALE",
    "NAN",
    "PACKED_AXES",
    "TILE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "pack",
    "pair_fields",
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
_TO_WORDS = (0, 4, 5, 1, 3, 8, 6, 7, 2)
PACKED_AXES = tuple(int(i) for i in np.argsort(_TO_WORDS))  # the other way


def pack(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes [N, K] uint8 -> [N / 64, K / 128, 8192] uint8. N in 64s, K in 128s.

    Raises:
        ShapeError: a size that is not, scales [ceil(N / 128), K / 128] of another shape, a NaN among the codes, or a
            scale of more than 2^7 (NaN is one), which the kernel could not represent.
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
    pairs = np.ascontiguousarray(codes).view("<u2")
    if _has_nan(pairs):
        raise ShapeError(f"dense_fp8 weights [{rows}, {columns}]: a code is NaN")
    tiles = pairs.reshape(rows // 64, 4, 2, 8, columns // 128, 4, 2, 2, 4).transpose(_TO_WORDS)
    first, second, third, fourth = _fields(tiles).reshape(*tiles.shape[:7], 4).transpose(7, *range(7))
    third, fourth = third >> _SHIFT, _turned(fourth, -_SHIFT)
    words = np.empty((*tiles.shape[:7], 2), "<u4")
    words[..., 0] = first | third & _THIRD | fourth & _FOURTH
    words[..., 1] = second | _turned(third & ~_THIRD | fourth & ~_FOURTH, -_TURN)
    return words.view(np.uint8).reshape(rows // 64, columns // 128, TILE_BYTES)


def unpack(packed: np.ndarray) -> np.ndarray:
    """The codes that `pack` was given."""
    tiles, steps, _ = packed.shape
    words = np.ascontiguousarray(packed).view("<u4").reshape(tiles, steps, 4, 4, 8, 4, 2, 2)
    fields = np.stack(pair_fields(words[..., 0], words[..., 1]), -1)
    pairs = _pairs(fields).reshape(tiles, steps, 4, 4, 8, 4, 2, 2, 2).transpose(PACKED_AXES)
    return np.ascontiguousarray(pairs).view(np.uint8).reshape(tiles * TILE_ROWS, steps * TILE_COLUMNS)


def pair_fields(first: Words, second: Words) -> tuple[Words, Words, Words, Words]:
    """The four pairs of two words, uint32 of NumPy or JAX; other bits than those of the fields are anything."""
    turned = _turned(second, _TURN)
    third, fourth = first & _THIRD | turned & ~_THIRD, first & _FOURTH | turned & ~_FOURTH
    return first, second, third << np.uint32(_SHIFT), _turned(fourth, _SHIFT)


def _has_nan(pairs: np.ndarray) -> bool:
    low, high = pairs & 0x7F, pairs & 0x7F00
    return bool(((low == NAN) | (high == NAN << 8)).any())


def _turned(x: Words, by: int) -> Words:
    """Rotated right by so many bits."""
    return x >> np.uint32(by % 32) | x << np.uint32(-by % 32)


def _fields(pair: np.ndarray) -> np.ndarray:
    """Two codes, the first in the low byte, in the fields of two bf16."""
    x = pair.astype(np.uint32)
    return (x & 0x80) << 8 | (x & 0x7F) << 4 | (x & 0x8000) << 16 | (x & 0x7F00) << 12


def _pairs(fields: np.ndarray) -> np.ndarray:
    x = fields >> 8 & 0x80 | fields >> 4 & 0x7F | fields >> 16 & 0x8000 | fields >> 12 & 0x7F00
    return x.astype("<u2")
