"""The `fp4` weights for products with rows of e4m3: widened to e4m3 without loss while they are multiplied.

An e2m1 number times 2^k is an e4m3 number for k from -8 to 6. So 128 columns of a row of weights, four groups of 32
with a scale each, are e4m3 codes with one scale, 2^-6 times the greatest, if those of their groups that are not all
zeros lie within 2^14 of each other (`spans`). Then a product adds up 128 columns before it is scaled, as of FP8
weights. Of a matrix in which one row's 128 columns span more none does so: all its products add up 32 columns before
they are scaled, which is exact for any scales, has other bits and takes longer. Where all columns of each row of a
matrix lie within 2^11, a row has one scale for all of them: its codes stay normal numbers, so that the bits are the
same, and products are scaled once, at the end. `pack` decides it, of each matrix by itself and of what is in it alone.

A tile is 64 rows x 128 columns, `TILE_BYTES`, as that of `fp4` is:

* Codes, 4,096 bytes: [32 columns, thread 0..127, word 0..1]. Word h of thread 32 w + 4 r + q has row 16 w + r + 8 h: of
  columns 4 q + {0..3} and 16 + 4 q + {0..3} each the magnitudes are 3 bits of a nibble, in order, the lowest first. The
  sign of the first four's code i is bit 8 i + 7, of the other four's bit 8 i + 3: where they are those of e4m3 codes
  once a table has made bytes of the magnitudes (and the word is shifted by 4).
* Scales, 256 bytes: [w, r, h], a word for a row. Widened without loss its bytes are, the lowest first: the scale,
  k + 8 of the first two groups (4 bits each) and of the other two, and 255, or 254 if all of the row have that scale.
  Else they are the four groups' scales.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import PerformanceWarning
from . import fp4
from .fp4 import LARGEST_SCALE, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, Array, decode, encode

__all__ = [
    "LARGEST_SCALE",
    "MAX_ROW_SPAN",
    "MAX_SPAN",
    "TILE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "decode",
    "draw",
    "encode",
    "pack",
    "spans",
    "unpack",
    "warn_of_spans",
    "widened",
]

MAX_SPAN = 14  # of the exponents of scales that 128 columns may have
MAX_ROW_SPAN = 11  # that a row may have to have one scale
GROUP, GROUPS = 32, 4  # columns of a released scale; of them in 128 columns
_LEAST, _MOST = -8, 6  # k of 2^k times an e2m1 number that is an e4m3 one
_CODE_BYTES = TILE_ROWS * TILE_COLUMNS // 2
_WIDENED, _ONE_SCALE = 0xFF, 0xFE  # no scales
# Axes of codes [matrix, tile, w, h, r, step, group, g, q, i] as of words [matrix, tile, step, group, w, r, q, h, g, i].
_WORD_AXES = (0, 1, 5, 6, 2, 4, 8, 3, 7, 9)
_CODE_AXES = tuple(int(i) for i in np.argsort(_WORD_AXES))
_MAGNITUDE = np.arange(0, 32, 4, dtype=np.uint32).reshape(2, 4)  # bits, of the first four codes and of the others
_OF_K, _OF_SCALES = (np.array(bits, np.uint32) for bits in ([8, 12, 16, 20], [0, 8, 16, 24]))
_SIGN = np.array([[7, 15, 23, 31], [3, 11, 19, 27]], np.uint32)


def spans(codes: Array, scales: Array) -> Array:
    """Returns by how much the scales' exponents differ in every 128 columns: [..., N, K / 128] int32.

    Groups of zeros do not count. Codes [..., N, K / 2] and scales [..., N, K / 32] uint8 as released, of NumPy or JAX.
    """
    most, least = _extremes(codes, scales)
    return (most - least).clip(0).astype(np.int32)


def _extremes(codes: Array, scales: Array) -> tuple[Array, Array]:
    """The greatest and the least exponent of every 128 columns, [..., N, K / 128] int32: 0 and 255 of zeros."""
    xp = codes.__array_namespace__()
    used = (codes.reshape(*scales.shape, GROUP // 2) & np.uint8(0x77)).any(-1).reshape(*scales.shape[:-1], -1, GROUPS)
    exponents = scales.astype(np.int32).reshape(used.shape)
    return xp.where(used, exponents, 0).max(-1), xp.where(used, exponents, 255).min(-1)


def warn_of_spans(name: str, apart: Array) -> None:
    """Warns (`PerformanceWarning`) if these `spans` of a parameter keep it from being widened; names the widest."""
    if (widest := int(apart.max())) > MAX_SPAN:
        *matrix, row, block = (int(i) for i in np.unravel_index(int(apart.argmax()), apart.shape))
        which = f"matrix {matrix}, " if matrix else ""
        warnings.warn(
            f"{name}: {which}row {row}, columns from {block * TILE_COLUMNS} on: "
            f"FP4 scales 2^{widest} apart, at most 2^{MAX_SPAN} is widened without loss; products take longer",
            PerformanceWarning,
            stacklevel=3,
        )


def widened(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the scale code of every 128 columns [..., N, K / 128], each group's k [..., N, K / 32] int32, and of each
    matrix whether it is widened without loss, and whether its rows have one scale each, [...] bool. A k of what is not
    widened, and of zeros, is in its range only.
    """
    most, least = _extremes(codes, scales)
    row_most, row_least = most.max(-1, keepdims=True), least.min(-1, keepdims=True)
    one_scale = (row_most - row_least <= MAX_ROW_SPAN).all((-2, -1))
    scale = jnp.maximum(jnp.where(one_scale[..., None, None], row_most, most) - _MOST, 1)
    exponents = scales.astype(jnp.int32).reshape(*scale.shape, GROUPS)
    k = jnp.clip(exponents - scale[..., None], _LEAST, _MOST)
    exact = (most - least <= MAX_SPAN).all((-2, -1))
    return scale.astype(jnp.uint8), k.reshape(scales.shape), exact, one_scale


def pack(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array]:
    """Packs codes and scales as released into tiles [..., N / 64, K / 128, 4352] uint8."""
    *lead, rows, columns = (*codes.shape[:-1], 2 * codes.shape[-1])
    tiles, steps = rows // TILE_ROWS, columns // TILE_COLUMNS
    pairs = jnp.stack([codes & np.uint8(15), codes >> np.uint8(4)], -1).astype(jnp.uint32)
    x = pairs.reshape(-1, tiles, 4, 2, 8, steps, GROUPS, 2, 4, 4).transpose(_WORD_AXES)
    words = ((x & np.uint32(7)) << _along(_MAGNITUDE, x) | (x >> np.uint32(3)) << _along(_SIGN, x)).sum(
        (-2, -1), dtype=jnp.uint32
    )
    scale, k, exact, one_scale = widened(codes, scales)
    of_k = (k - _LEAST).astype(jnp.uint32).reshape(*scale.shape, GROUPS)
    short = scale.astype(jnp.uint32) | (of_k << _along(_OF_K, of_k)).sum(-1, dtype=jnp.uint32)
    each = lax.bitcast_convert_type(scales.reshape(*scale.shape, GROUPS), jnp.uint32)
    kind = jnp.where(one_scale, np.uint32(_ONE_SCALE << 24), np.uint32(_WIDENED << 24))
    of_rows = jnp.where(exact[..., None, None], short | kind[..., None, None], each)
    of_rows = of_rows.reshape(-1, tiles, 4, 2, 8, steps).transpose(0, 1, 5, 2, 4, 3)
    parts = [lax.bitcast_convert_type(part, jnp.uint8).reshape(-1, tiles, steps, n)
             for part, n in ((words, _CODE_BYTES), (of_rows, TILE_BYTES - _CODE_BYTES))]  # fmt: skip
    return (jnp.concatenate(parts, -1).reshape(*lead, tiles, steps, TILE_BYTES),)


def unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks the tiles to codes and scales as released; a group of zeros may have another scale."""
    *lead, tiles, steps, _ = packed.shape
    x = packed.reshape(-1, tiles, steps, TILE_BYTES)
    words = lax.bitcast_convert_type(x[..., :_CODE_BYTES].reshape(-1, tiles, steps, GROUPS, 4, 8, 4, 2, 4), jnp.uint32)
    word = words[..., None, None]
    codes = (
        word >> _along(_MAGNITUDE, word) & np.uint32(7) | (word >> _along(_SIGN, word) & np.uint32(1)) << np.uint32(3)
    ).astype(jnp.uint8)
    codes = codes.transpose(_CODE_AXES).reshape(*lead, tiles * TILE_ROWS, -1, 2)
    rows = lax.bitcast_convert_type(x[..., _CODE_BYTES:].reshape(-1, tiles, steps, 4, 8, 2, 4), jnp.uint32)
    rows = rows.transpose(0, 1, 3, 5, 4, 2).reshape(*lead, tiles * TILE_ROWS, steps, 1)
    k = (rows >> _along(_OF_K, rows) & np.uint32(15)).astype(jnp.int32) + _LEAST
    short = ((rows & np.uint32(255)).astype(jnp.int32) + k).astype(jnp.uint8)
    each = (rows >> _along(_OF_SCALES, rows)).astype(jnp.uint8)
    scales = jnp.where(rows >> np.uint32(24) >= _ONE_SCALE, short, each)
    return codes[..., 0] | codes[..., 1] << np.uint8(4), scales.reshape(*lead, tiles * TILE_ROWS, -1)


def draw(key: jax.Array, rows: int, columns: int) -> tuple[jax.Array]:
    """Returns the tiles of the random matrix that `fp4.draw` makes."""
    return pack(*fp4.unpack(*fp4.draw(key, rows, columns)))


def _along(bits: np.ndarray, x: jax.Array) -> np.ndarray:
    """Bits for the last axes of x."""
    return bits.reshape((1,) * (x.ndim - bits.ndim) + bits.shape)
