"""The codec of `fp4` weights in `jnp`: e2m1 codes, two a byte, with an e8m0 scale per row and 32 columns.

A row is stored as an index key is (`formats.index_fp4`), of which this is the packed form as well.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import index_format, index_fp4
from .expert_fp4 import (
    CODE_BYTES,
    LEFT,
    OFFSET,
    PACKED_AXES,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    WORD_AXES,
    code_bytes,
    fields,
    places,
    turned,
)

__all__ = ["decode", "draw", "encode", "pack", "unpack"]

_MEAN_SQUARE = 8.5625  # of the values of all e2m1 codes


def encode(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., N, K] float -> codes [..., N, K / 2] uint8, scales [..., N, K / 32] uint8."""
    codes, scales = index_fp4.encode(index_format("fp4", matrix.shape[-1]), matrix.astype(jnp.float32))
    return codes, scales


def decode(codes: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Codes and scales as released -> [..., N, K]. Exact in bfloat16 down to 2^-126: a code times a power of two."""
    return index_fp4.decode(index_format("fp4", 2 * codes.shape[-1]), (codes, scales), jnp.dtype(dtype))


def pack(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array]:
    """Codes and scales as released -> tiles [..., N / 64, K / 128, 4352]: `expert_fp4.pack` without its checks."""
    *lead, rows, columns = (*codes.shape[:-1], 2 * codes.shape[-1])
    tiles, steps = rows // TILE_ROWS, columns // TILE_COLUMNS
    x = codes.reshape(-1, tiles, 4, 2, 8, steps, 2, 2, 2, 2, 4)
    words = [jnp.zeros((x.shape[0], tiles, steps, 2, 2, 4, 8, 4), jnp.uint32)] * 3  # ..., half, g, w, r, q
    for place, word, by in places():
        words[word] |= turned(fields(x[place].transpose(PACKED_AXES)), -by)
    both = jnp.stack([words[0] | (words[2] & LEFT), words[1] | (words[2] & ~LEFT)], -1)
    order = scales.reshape(-1, tiles, 4, 2, 8, steps, 2, 2).transpose(0, 1, 5, 2, 4, 6, 7, 3)
    parts = both, _scale_words(order)
    out = [lax.bitcast_convert_type(part, jnp.uint8).reshape(x.shape[0], tiles, steps, -1) for part in parts]
    return (jnp.concatenate(out, -1).reshape(*lead, tiles, steps, TILE_BYTES),)


def draw(key: jax.Array, rows: int, columns: int) -> tuple[jax.Array]:
    """The tiles of a random matrix of unit gain: any codes, and some scales twice the others.

    Drawn as they are packed, at the speed of random bits: any are codes.
    """
    of_codes, of_scales = jax.random.split(key)
    tiles, steps = rows // TILE_ROWS, columns // TILE_COLUMNS
    codes = jax.random.bits(of_codes, (tiles, steps, CODE_BYTES // 4), jnp.uint32)
    mean_square = 1 / (_MEAN_SQUARE * columns)  # of the scales; a share of greater ones makes the lower's square that
    lower = math.floor(0.5 * math.log2(mean_square))
    greater = np.uint8(256 * (mean_square / 4.0**lower - 1) / 3)
    drawn = jax.random.bits(of_scales, (tiles, steps, 4, 8, 2, 2, 2), jnp.uint8)
    scales = np.uint8(127 + lower) + (drawn < greater).astype(jnp.uint8)
    both = jnp.concatenate([codes, _scale_words(scales).reshape(tiles, steps, -1)], -1)
    return (lax.bitcast_convert_type(both, jnp.uint8).reshape(tiles, steps, TILE_BYTES),)


def _scale_words(scales: jax.Array) -> jax.Array:
    """[..., w, r, half, g, h] uint8 -> the words [..., w, r, half] that hold them."""
    exponents = (scales + OFFSET).astype(jnp.uint32)
    first, second = (exponents[..., g, 0] << 7 | exponents[..., g, 1] << 23 for g in (0, 1))
    return first | turned(second, -8)


def unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tiles -> codes and scales as released."""
    *lead, tiles, steps, _ = packed.shape
    x = packed.reshape(-1, tiles, steps, TILE_BYTES)
    both = lax.bitcast_convert_type(x[..., :CODE_BYTES].reshape(-1, tiles, steps, 2, 2, 4, 8, 4, 2, 4), jnp.uint32)
    low, high = both[..., 0], both[..., 1]
    words = (low, high, (low & LEFT) | (high & ~LEFT))
    alike = {}
    for (*_, h, _, _, _, _, product, c), word, by in places():
        alike[product, c, h] = code_bytes(turned(words[word], by)).transpose(WORD_AXES)
    by_half = {(p, c): jnp.stack([alike[p, c, h] for h in (0, 1)], 3) for p in (0, 1) for c in (0, 1)}
    codes = jnp.stack([jnp.stack([by_half[p, c] for c in (0, 1)], -2) for p in (0, 1)], -3)
    word = lax.bitcast_convert_type(x[..., CODE_BYTES:].reshape(-1, tiles, steps, 4, 8, 2, 4), jnp.uint32)
    exponents = jnp.stack([word >> 7, word >> 23, word >> 15, turned(word, -1)], -1).astype(jnp.uint8) - OFFSET
    scales = exponents.reshape(*word.shape, 2, 2).transpose(0, 1, 3, 7, 4, 2, 5, 6)
    return codes.reshape(*lead, tiles * TILE_ROWS, -1), scales.reshape(*lead, tiles * TILE_ROWS, -1)
