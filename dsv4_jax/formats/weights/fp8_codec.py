"""The codec of `fp8` weights in `jnp`: e4m3 codes with an e8m0 scale per 128 x 128, and their packed form.

As in the row formats, a scale is 2^ceil(log2(amax / 448)) of its block, with amax taken as 1e-4 at least. Blocks at the
ends of rows and columns may be smaller.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import FP8_FLOOR
from ..scaling import E4M3_MAX, absmax, e4m3_codes, e4m3_values, power_of_two, ue8m0_scale_exponent
from .dense_fp8 import BLOCK, PACKED_AXES, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, WORD_AXES, pair_fields, tiled, two_words

__all__ = ["decode", "draw", "encode", "pack", "unpack"]


def encode(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[N, K] float -> codes [N, K] uint8, scales [ceil(N / 128), ceil(K / 128)] uint8."""
    (rows, columns), x = matrix.shape, matrix.astype(jnp.float32)
    x = jnp.pad(x, ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = x.reshape(x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK)
    amax = absmax(blocks.swapaxes(1, 2).reshape(blocks.shape[0], blocks.shape[2], -1), np.float32(FP8_FLOOR))
    exponent = ue8m0_scale_exponent(amax, E4M3_MAX)
    codes = e4m3_codes(blocks * power_of_two(-exponent)[:, None, :, None]).reshape(x.shape)
    return codes[:rows, :columns], (exponent + np.int32(127)).astype(jnp.uint8)


def decode(codes: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Codes and scales as released -> [N, K]. Exact in bfloat16 down to 2^-117: a code times a power of two."""
    factors = power_of_two(scales.astype(jnp.int32) - np.int32(127))
    of_row = jnp.repeat(factors, BLOCK, axis=0)[: codes.shape[0]]
    return (e4m3_values(codes) * jnp.repeat(of_row, BLOCK, axis=1)[:, : codes.shape[1]]).astype(dtype)


def pack(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes and scales as released -> the parts: `dense_fp8.pack` without its checks, and the scales."""
    rows, columns = codes.shape
    pairs = lax.bitcast_convert_type(codes.reshape(rows, columns // 2, 2), jnp.uint16)
    pairs = pairs.reshape(tiled(rows, columns)).transpose(WORD_AXES)
    words = jnp.stack(two_words(pairs.reshape(*pairs.shape[:-2], 4)), -1)
    tiles = lax.bitcast_convert_type(words, jnp.uint8)
    return tiles.reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_BYTES), scales


def draw(key: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """The parts of a random matrix of unit gain: a normal one, encoded."""
    return pack(*encode(jax.random.normal(key, (rows, columns)) * np.float32(columns**-0.5)))


def unpack(packed: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The parts -> codes and scales as released."""
    tiles, steps, _ = packed.shape
    words = lax.bitcast_convert_type(packed.reshape(tiles, steps, 4, 4, 8, 4, 2, 2, 4), jnp.uint32)
    fields = pair_fields(words[..., 0], words[..., 1])
    pairs = jnp.stack([_code(x >> np.uint32(16 * half)) for x in fields for half in (0, 1)], -1)
    pairs = pairs.reshape(*pairs.shape[:-1], 2, 2, 2)  # c, h, half
    return pairs.transpose(*PACKED_AXES, pairs.ndim - 1).reshape(tiles * TILE_ROWS, steps * TILE_COLUMNS), scales


def _code(fields: jax.Array) -> jax.Array:
    """The code whose sign and magnitude lie in the fields of the lower bf16."""
    return (fields >> np.uint32(8) & np.uint32(0x80) | fields >> np.uint32(4) & np.uint32(0x7F)).astype(jnp.uint8)
