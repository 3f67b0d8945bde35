"""The `fp4` weights: e2m1 codes, two a byte, with an e8m0 scale per row and 32 columns, and their order for the kernel.

A row is stored as an index key is (`formats.index_fp4`), column 2i in the low nibble.

Packed (for csrc's moe kernel), a matrix is tiles of 64 rows x 128 columns, `TILE_BYTES` each: [..., rows / 64, K / 128,
4352]. The bits are the same ones elsewhere, and scales are stored with an offset; `unpack` gives back what was packed.

* Codes, 4,096 bytes: [32 columns, thread 0..127, word 0..1]. Thread 32 w + 4 r + q has, of rows 16 w + r and + 8, the
  columns 2 q + {0, 1} of every 8: its two words are 16 codes, eight pairs of neighbours, each where one rotation brings
  both signs and magnitudes into the fields of two bf16 (`_PLACES`).
* Scales, 256 bytes: [w, r, half of the columns], a word for two rows and two groups of 32 columns. Plus 126 they are
  the exponent fields of 2^126 times the scales: those of the first group in the fields of two bf16, row + 0 low; those
  of the other group there after a rotation by 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import ShapeError
from .. import index_format, index_fp4

__all__ = [
    "LARGEST_SCALE",
    "TILE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "Array",
    "decode",
    "draw",
    "encode",
    "gate_up_rows",
    "gates_and_ups",
    "pack",
    "unpack",
]

Array: TypeAlias = Any  # of NumPy or JAX
TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 64, 128, 4352
LARGEST_SCALE = 128  # code of 2; 2^126 times more is no bf16
_CODE_BYTES = TILE_ROWS * TILE_COLUMNS // 2
_OFFSET = np.uint8(126)
# (product of 16 columns, columns + 0 or + 8, rows + 0 or + 8) -> (word, rotation to the right). Word 2 is what the
# pairs of the others leave free of them.
_PLACES = {(0, 0, 0): (0, 0), (0, 0, 1): (0, 4), (0, 1, 0): (0, 10), (0, 1, 1): (2, 8),
           (1, 0, 0): (1, 2), (1, 0, 1): (1, 6), (1, 1, 0): (1, 12), (1, 1, 1): (2, 14)}  # fmt: skip
_LEFT = np.uint32(0x60306030)  # bits of word 2 that lie in word 0
# Axes of codes packed alike, [..., tile, w, r, step, half, g, q], as of words [..., tile, step, half, g, w, r, q].
_PACKED_AXES = (0, 1, 4, 5, 6, 2, 3, 7)
# Axes of codes [..., tile, step, half, g, w, r, q, product, c, h] as of those of a matrix.
_CODE_AXES = (0, 1, 5, 10, 6, 2, 3, 4, 8, 9, 7)

_MEAN_SQUARE = 8.5625  # of the values of all e2m1 codes


def encode(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes [..., N, K] float as codes [..., N, K / 2] uint8, scales [..., N, K / 32] uint8."""
    codes, scales = index_fp4.encode(index_format("fp4", matrix.shape[-1]), matrix.astype(jnp.float32))
    return codes, scales


def decode(codes: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Decodes codes and scales as released to [..., N, K]. Exact in bfloat16 down to 2^-126: a code times a power of
    two."""
    return index_fp4.decode(index_format("fp4", 2 * codes.shape[-1]), (codes, scales), jnp.dtype(dtype))


def pack(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array]:
    """Packs codes and scales as released into tiles [..., N / 64, K / 128, 4352] uint8."""
    *lead, rows, columns = (*codes.shape[:-1], 2 * codes.shape[-1])
    tiles, steps = rows // TILE_ROWS, columns // TILE_COLUMNS
    x = codes.reshape(-1, tiles, 4, 2, 8, steps, 2, 2, 2, 2, 4)
    words = [jnp.zeros((x.shape[0], tiles, steps, 2, 2, 4, 8, 4), jnp.uint32)] * 3  # ..., half, g, w, r, q
    for place, word, by in _places():
        words[word] |= _turned(_fields(x[place].transpose(_PACKED_AXES)), -by)
    both = jnp.stack([words[0] | (words[2] & _LEFT), words[1] | (words[2] & ~_LEFT)], -1)
    order = scales.reshape(-1, tiles, 4, 2, 8, steps, 2, 2).transpose(0, 1, 5, 2, 4, 6, 7, 3)
    parts = both, _scale_words(order)
    out = [lax.bitcast_convert_type(part, jnp.uint8).reshape(x.shape[0], tiles, steps, -1) for part in parts]
    return (jnp.concatenate(out, -1).reshape(*lead, tiles, steps, TILE_BYTES),)


def draw(key: jax.Array, rows: int, columns: int) -> tuple[jax.Array]:
    """Returns the tiles of a random matrix of unit gain: any codes, and some scales twice the others.

    Drawn as they are packed, at the speed of random bits: any are codes.
    """
    of_codes, of_scales = jax.random.split(key)
    tiles, steps = rows // TILE_ROWS, columns // TILE_COLUMNS
    codes = jax.random.bits(of_codes, (tiles, steps, _CODE_BYTES // 4), jnp.uint32)
    mean_square = 1 / (_MEAN_SQUARE * columns)  # of the scales; a share of greater ones makes the lower's square that
    lower = math.floor(0.5 * math.log2(mean_square))
    greater = np.uint8(256 * (mean_square / 4.0**lower - 1) / 3)
    drawn = jax.random.bits(of_scales, (tiles, steps, 4, 8, 2, 2, 2), jnp.uint8)
    scales = np.uint8(127 + lower) + (drawn < greater).astype(jnp.uint8)
    both = jnp.concatenate([codes, _scale_words(scales).reshape(tiles, steps, -1)], -1)
    return (lax.bitcast_convert_type(both, jnp.uint8).reshape(tiles, steps, TILE_BYTES),)


def _scale_words(scales: jax.Array) -> jax.Array:
    """[..., w, r, half, g, h] uint8 -> the words [..., w, r, half] that hold them."""
    exponents = (scales + _OFFSET).astype(jnp.uint32)
    first, second = (exponents[..., g, 0] << 7 | exponents[..., g, 1] << 23 for g in (0, 1))
    return first | _turned(second, -8)


def unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks the tiles to codes and scales as released."""
    *lead, tiles, steps, _ = packed.shape
    x = packed.reshape(-1, tiles, steps, TILE_BYTES)
    both = lax.bitcast_convert_type(x[..., :_CODE_BYTES].reshape(-1, tiles, steps, 2, 2, 4, 8, 4, 2, 4), jnp.uint32)
    low, high = both[..., :1], both[..., 1:]
    # Every place by the same operations: each on its own, they would be most of what XLA compiles of an expert.
    words, turns = (np.array(x).reshape(*[1] * (low.ndim - 1), -1) for x in zip(*_PLACES.values(), strict=True))
    of_low = np.array([0xFFFFFFFF, 0, _LEFT], np.uint32)[words]
    codes = _code_bytes(_turned(low & of_low | high & ~of_low, turns))
    codes = codes.reshape(*codes.shape[:-1], 2, 2, 2).transpose(_CODE_AXES)
    word = lax.bitcast_convert_type(x[..., _CODE_BYTES:].reshape(-1, tiles, steps, 4, 8, 2, 4), jnp.uint32)
    shifts = np.array([7, 23, 15, 31]).reshape(*[1] * word.ndim, 4)
    exponents = _turned(word[..., None], shifts).astype(jnp.uint8) - _OFFSET
    scales = exponents.reshape(*word.shape, 2, 2).transpose(0, 1, 3, 7, 4, 2, 5, 6)
    return codes.reshape(*lead, tiles * TILE_ROWS, -1), scales.reshape(*lead, tiles * TILE_ROWS, -1)


def gate_up_rows(gate: Array, up: Array) -> Array:
    """Interleaves [..., rows, n] twice to [..., 2 rows, n], eight rows of each in turn: codes or scales of the first
    product.

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


def _places() -> Iterator[tuple[tuple, int, int]]:
    """Yields what is packed alike: an index into [..., tile, w, h, r, step, half, g, product, c, q], word, rotation."""
    for (product, c, h), (word, rotation) in _PLACES.items():
        yield (slice(None),) * 3 + (h,) + (slice(None),) * 4 + (product, c), word, rotation


def _turned(x: jax.Array, by: int | np.ndarray) -> jax.Array:
    """Rotated right by so many bits, uint32."""
    right = np.asarray(by % 32, np.uint32)
    return x >> right | x << (-right % np.uint32(32))


def _fields(byte: jax.Array) -> jax.Array:
    """Two codes of a byte in the fields of two bf16 of a word."""
    x = byte.astype(np.uint32)
    return (x & 8) << 12 | (x & 7) << 6 | (x & 0x80) << 24 | (x & 0x70) << 18


def _code_bytes(words: jax.Array) -> jax.Array:
    """The two codes of each word's fields, whose other bits are anything."""
    return (words >> 12 & 8 | words >> 6 & 7 | words >> 24 & 0x80 | words >> 18 & 0x70).astype(np.uint8)
