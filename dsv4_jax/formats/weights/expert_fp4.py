"""FP4 matrices in the order in which the CUDA kernel reads them (csrc/moe_weights.cuh). No jax.

A matrix [rows, K] as released is e2m1 codes, two to a byte (column 2i in the low nibble), and an e8m0 scale per 32
along K. Packed it is tiles of 64 rows x 128 columns, `TILE_BYTES` each: [..., rows / 64, K / 128, 4352]. The bits are
the same ones elsewhere, and scales are stored with an offset; `unpack` gives back what was packed.

* Codes, 4,096 bytes: [32 columns, thread 0..127, word 0..1]. Thread 32 w + 4 r + q has, of rows 16 w + r and + 8, the
  columns 2 q + {0, 1} of every 8: its two words are 16 codes, eight pairs of neighbours, each where one rotation brings
  both signs and magnitudes into the fields of two bf16 (`_PLACES`).
* Scales, 256 bytes: [w, r, half of the columns], a word for two rows and two groups of 32 columns. Plus 126 they are
  the exponent fields of 2^126 times the scales: those of the first group in the fields of two bf16, row + 0 low; those
  of the other group there after a rotation by 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from ...errors import ShapeError

__all__ = [
    "CODE_BYTES",
    "LARGEST_SCALE",
    "LEFT",
    "OFFSET",
    "PACKED_AXES",
    "TILE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "WORD_AXES",
    "Array",
    "code_bytes",
    "fields",
    "gate_up_rows",
    "gates_and_ups",
    "pack",
    "places",
    "turned",
    "unpack",
]

Array: TypeAlias = Any  # of NumPy or JAX

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 64, 128, 4352
LARGEST_SCALE = 128  # code of 2; 2^126 times more is no bf16
CODE_BYTES = TILE_ROWS * TILE_COLUMNS // 2
OFFSET = np.uint8(126)
# (product of 16 columns, columns + 0 or + 8, rows + 0 or + 8) -> (word, rotation to the right). Word 2 is what the
# pairs of the others leave free of them.
_PLACES = {(0, 0, 0): (0, 0), (0, 0, 1): (0, 4), (0, 1, 0): (0, 10), (0, 1, 1): (2, 8),
           (1, 0, 0): (1, 2), (1, 0, 1): (1, 6), (1, 1, 0): (1, 12), (1, 1, 1): (2, 14)}  # fmt: skip
LEFT = np.uint32(0x60306030)  # bits of word 2 that lie in word 0
# Axes of codes packed alike, [..., tile, w, r, step, half, g, q], as of words [..., tile, step, half, g, w, r, q].
PACKED_AXES = (0, 1, 4, 5, 6, 2, 3, 7)
WORD_AXES = (0, 1, 5, 6, 2, 3, 4, 7)  # the other way


def gate_up_rows(gate: Array, up: Array) -> Array:
    """[..., rows, n] twice -> [..., 2 rows, n], eight rows of each in turn: codes or scales of the first product.

    Arrays of NumPy or JAX. `gates_and_ups` takes them apart.
    """
    *lead, rows, n = gate.shape
    if up.shape != gate.shape or rows % (TILE_ROWS // 2):
        raise ShapeError(
            f"expert weights: gate {gate.shape} and up {up.shape}, not alike or rows not in {TILE_ROWS // 2}s"
        )
    turns = [x.reshape(*lead, rows // 8, 1, 8, n) for x in (gate, up)]
    return gate.__array_namespace__().concat(turns, axis=-3).reshape(*lead, 2 * rows, n)


def gates_and_ups(rows: Array) -> tuple[Array, Array]:
    """Takes apart what `gate_up_rows` joined: (gate, up)."""
    *lead, both, n = rows.shape
    pair = rows.reshape(*lead, both // 16, 2, 8, n)
    gate, up = (pair[..., i, :, :].reshape(*lead, both // 2, n) for i in (0, 1))
    return gate, up


def pack(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., rows, K / 2] and [..., rows, K / 32] uint8 -> [..., rows / 64, K / 128, 4352] uint8."""
    *lead, rows, columns = (*codes.shape[:-1], 2 * codes.shape[-1])
    if rows % TILE_ROWS or columns % TILE_COLUMNS:
        raise ShapeError(
            f"expert weights [{rows}, {columns}]: rows come in {TILE_ROWS}s and columns in {TILE_COLUMNS}s"
        )
    if scales.shape != (*lead, rows, columns // 32):
        raise ShapeError(f"expert weights [{rows}, {columns}]: scales {scales.shape}, not one per row and 32 columns")
    if scales.size and scales.max() > LARGEST_SCALE:
        raise ShapeError(f"expert weights: scale code {scales.max()}, the largest that fits is {LARGEST_SCALE}")
    x = codes.reshape(-1, rows // 64, 4, 2, 8, columns // 128, 2, 2, 2, 2, 4)
    words = np.zeros((3, len(x), rows // 64, columns // 128, 2, 2, 4, 8, 4), np.uint32)  # ..., half, g, w, r, q
    for place, word, by in places():
        words[word] |= turned(fields(x[place].transpose(PACKED_AXES)), -by)
    both = np.stack([words[0] | (words[2] & LEFT), words[1] | (words[2] & ~LEFT)], -1).astype("<u4")
    out = np.empty((len(x), rows // 64, columns // 128, TILE_BYTES), np.uint8)
    out[..., :CODE_BYTES] = both.view(np.uint8).reshape(*out.shape[:-1], CODE_BYTES)
    tiled = scales.reshape(-1, rows // 64, 4, 2, 8, columns // 128, 2, 2).transpose(0, 1, 5, 2, 4, 6, 7, 3)
    exponents = (tiled + OFFSET).astype(np.uint32)  # ..., w, r, half, g, h
    first, second = (exponents[..., g, 0] << 7 | exponents[..., g, 1] << 23 for g in (0, 1))
    word = np.ascontiguousarray(first | turned(second, -8), "<u4")
    out[..., CODE_BYTES:] = word.view(np.uint8).reshape(*out.shape[:-1], -1)
    return out.reshape(*lead, *out.shape[1:])


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes and scales that `pack` was given."""
    *lead, tiles, steps, _ = packed.shape
    x = packed.reshape(-1, tiles, steps, TILE_BYTES)
    both = np.ascontiguousarray(x[..., :CODE_BYTES]).view("<u4").reshape(-1, tiles, steps, 2, 2, 4, 8, 4, 2)
    low, high = both[..., 0], both[..., 1]
    words = (low, high, (low & LEFT) | (high & ~LEFT))
    codes = np.empty((len(x), tiles, 4, 2, 8, steps, 2, 2, 2, 2, 4), np.uint8)
    for place, word, by in places():
        codes[place] = code_bytes(turned(words[word], by)).transpose(WORD_AXES)
    word = np.ascontiguousarray(x[..., CODE_BYTES:]).view("<u4").reshape(-1, tiles, steps, 4, 8, 2)
    exponents = np.stack([word >> 7, word >> 23, word >> 15, word >> 31 | word << 1], -1).astype(np.uint8) - OFFSET
    scales = exponents.reshape(*word.shape, 2, 2).transpose(0, 1, 3, 7, 4, 2, 5, 6)
    return codes.reshape(*lead, tiles * 64, steps * 64), scales.reshape(*lead, tiles * 64, steps * 4)


def places() -> Iterator[tuple[tuple, int, int]]:
    """Yields what is packed alike: an index into [..., tile, w, h, r, step, half, g, product, c, q], word, rotation."""
    for (product, c, h), (word, rotation) in _PLACES.items():
        yield (slice(None),) * 3 + (h,) + (slice(None),) * 4 + (product, c), word, rotation


def turned(x: Array, by: int) -> Array:
    """Rotated right by so many bits, uint32."""
    return x >> np.uint32(by % 32) | x << np.uint32(-by % 32) if by % 32 else x


def fields(byte: Array) -> Array:
    """Two codes of a byte in the fields of two bf16 of a word."""
    x = byte.astype(np.uint32)
    return (x & 8) << 12 | (x & 7) << 6 | (x & 0x80) << 24 | (x & 0x70) << 18


def code_bytes(words: Array) -> Array:
    """The two codes of each word's fields, whose other bits are anything."""
    return (words >> 12 & 8 | words >> 6 & 7 | words >> 24 & 0x80 | words >> 18 & 0x70).astype(np.uint8)
