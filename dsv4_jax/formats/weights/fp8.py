"""The `fp8` weights: e4m3 codes with an e8m0 scale per 128 x 128, and the order in which the CUDA kernel reads them.

As in the row formats, a scale is 2^ceil(log2(amax / 448)) of its block, with amax taken as 1e-4 at least. Blocks at the
ends of rows and columns may be smaller.

Packed (for csrc's dense_fp8 kernel), the codes [N, K] are tiles of 64 rows x 128 columns, [N / 64, K / 128,
8192]: the same bits elsewhere; `unpack` gives back what was packed. Scales stay as they are. Matrices of equal K stack
along N, if all but the last have N in 128s.

A tile is [32 columns, thread 0..127, word 0..3]. Thread 32 w + 4 r + q has, of rows 16 w + r and + 8, the columns
2 q + {0, 1} of every 8: per 16 columns two words, four pairs of neighbours. Each pair is wanted in the fields of two
bf16, sign at bit 15 and magnitude at bits 10 to 4 of either half. The first pair lies there in the first word, the
second in the second; the third (4 bits lower) and the fourth (4 bits higher, round the end of the word) take the bits
that these leave free in both words.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import FP8_FLOOR
from ..scaling import E4M3_MAX, absmax, e4m3_codes, e4m3_values, power_of_two, ue8m0_scale_exponent

__all__ = [
    "BLOCK",
    "LARGEST_SCALE",
    "TILE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "decode",
    "draw",
    "encode",
    "pack",
    "random_matrix",
    "unpack",
]

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 64, 128, 8192
BLOCK = 128  # rows, and columns, of a scale
LARGEST_SCALE = 134  # code of 2^7; 2^120 times more is no bf16
_THIRD, _FOURTH = np.uint32(0x080F080F), np.uint32(0x70007000)  # their bits that lie in the first word
_SHIFT, _TURN = 4, 8
# Axes of codes [tile, w, h, r, step, part, product, c, q] as those of words [tile, step, part, w, r, q, product, c, h].
_WORD_AXES = (0, 4, 5, 1, 3, 8, 6, 7, 2)
_PACKED_AXES = tuple(int(i) for i in np.argsort(_WORD_AXES))  # the other way


def encode(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes [N, K] float as codes [N, K] uint8, scales [ceil(N / 128), ceil(K / 128)] uint8."""
    (rows, columns), x = matrix.shape, matrix.astype(jnp.float32)
    x = jnp.pad(x, ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = x.reshape(x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK)
    amax = absmax(blocks.swapaxes(1, 2).reshape(blocks.shape[0], blocks.shape[2], -1), np.float32(FP8_FLOOR))
    exponent = ue8m0_scale_exponent(amax, E4M3_MAX)
    codes = e4m3_codes(blocks * power_of_two(-exponent)[:, None, :, None]).reshape(x.shape)
    return codes[:rows, :columns], (exponent + np.int32(127)).astype(jnp.uint8)


def decode(codes: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Decodes codes and scales as released to [N, K]. Exact in bfloat16 down to 2^-117: a code times a power of two."""
    factors = power_of_two(scales.astype(jnp.int32) - np.int32(127))
    of_row = jnp.repeat(factors, BLOCK, axis=0)[: codes.shape[0]]
    return (e4m3_values(codes) * jnp.repeat(of_row, BLOCK, axis=1)[:, : codes.shape[1]]).astype(dtype)


def pack(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packs codes and scales as released into the parts: codes [N / 64, K / 128, 8192] uint8, and the scales."""
    rows, columns = codes.shape
    pairs = lax.bitcast_convert_type(codes.reshape(rows, columns // 2, 2), jnp.uint16)
    pairs = pairs.reshape(_tiled(rows, columns)).transpose(_WORD_AXES)
    words = jnp.stack(_two_words(pairs.reshape(*pairs.shape[:-2], 4)), -1)
    tiles = lax.bitcast_convert_type(words, jnp.uint8)
    return tiles.reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_BYTES), scales


def draw(key: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Returns the parts of a random matrix of unit gain: a normal one, encoded."""
    return pack(*random_matrix(key, rows, columns))


def random_matrix(key: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Returns codes and scales of a normal matrix of unit gain."""
    return encode(jax.random.normal(key, (rows, columns)) * np.float32(columns**-0.5))


def unpack(packed: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks the parts to codes and scales as released."""
    tiles, steps, _ = packed.shape
    x = packed.reshape(tiles, steps, 4, 4, 8, 4, 2, 2, 2, 2)  # ..., word, half, byte
    # By bytes, and what is alike at once: by words and pairs it would be most of what XLA compiles of a step.
    low, high = x[..., 0], x[..., 1]
    whole = _bits(high, 0x80) | _bits(high, 7) << np.uint8(4) | low >> np.uint8(4)
    ends = jnp.stack([x[..., 0, :, :], x[..., 1, ::-1, :]], -3)  # the fourth's are in the other half
    spread = _bits(ends[..., 1], 8) << np.uint8(4) | _bits(high[..., ::-1, :], 0x70) | _bits(ends[..., 0], 15)
    pairs = jnp.concatenate([whole, spread], -2).reshape(*x.shape[:-3], 2, 2, 2)  # c, h, half
    return pairs.transpose(*_PACKED_AXES, pairs.ndim - 1).reshape(tiles * TILE_ROWS, steps * TILE_COLUMNS), scales


def _bits(x: jax.Array, mask: int) -> jax.Array:
    return x & np.uint8(mask)


def _tiled(rows: int, columns: int) -> tuple[int, ...]:
    """Returns the shape of a matrix of pairs by tile, w, h, r, step, part, product, c and q."""
    return (rows // TILE_ROWS, 4, 2, 8, columns // TILE_COLUMNS, 4, 2, 2, 4)


def _two_words(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., 4] uint16, each two codes with the first in the low byte -> two words [...] uint32."""
    first, second, third, fourth = (_fields(pairs[..., i].astype(np.uint32)) for i in range(4))
    third, fourth = third >> np.uint32(_SHIFT), _turned(fourth, -_SHIFT)
    return first | third & _THIRD | fourth & _FOURTH, second | _turned(third & ~_THIRD | fourth & ~_FOURTH, -_TURN)


def _turned(x: jax.Array, by: int) -> jax.Array:
    """Rotated right by so many bits."""
    return x >> np.uint32(by % 32) | x << np.uint32(-by % 32)


def _fields(x: jax.Array) -> jax.Array:
    """Two codes in the low bytes in the fields of two bf16."""
    masks = zip((0x80, 0x7F, 0x8000, 0x7F00), (8, 4, 16, 12), strict=True)
    return functools.reduce(operator.or_, ((x & np.uint32(mask)) << np.uint32(by) for mask, by in masks))
