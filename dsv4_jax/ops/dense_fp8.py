"""dense_fp8: products with a matrix of FP8 weights that stay as released, in the packed form of `weights.dense_fp8`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShapeError
from ..formats.scaling import e4m3_values, power_of_two
from ..weights.dense_fp8 import (
    BLOCK,
    PACKED_AXES,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    WORD_AXES,
    pair_fields,
    tiled,
    two_words,
)
from .arguments import Check
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "DenseFp8Arguments", "dense_fp8", "dequantised", "packed", "reference", "released"]


@dataclasses.dataclass(frozen=True)
class DenseFp8Arguments:
    """What an implementation of `dense_fp8` is given; as in its arguments."""

    x: jax.Array
    codes: jax.Array
    scales: jax.Array
    groups: int
    dtype: jnp.dtype

    @property
    def empty(self) -> bool:
        return self.x.shape[0] == 0 or self.codes.size == 0

    @property
    def weight_rows(self) -> int:
        """N."""
        return self.codes.shape[0] * TILE_ROWS

    @property
    def columns(self) -> int:
        """K."""
        return self.codes.shape[1] * TILE_COLUMNS


def dense_fp8(x: jax.Array, codes: jax.Array, scales: jax.Array, *, groups: int = 1, dtype: jnp.dtype = jnp.float32,
              implementation: Choice = None) -> jax.Array:  # fmt: skip
    """x @ weights.T with float32 sums: [T, N] of `dtype`.

    With g groups the weights are g matrices [N / g, K] one after the other, and each multiplies its own K of x's g * K
    columns: what V4's `wo_a` does to its groups of heads.

    Args:
        x: [T, groups * K] float, taken in bf16.
        codes: [N / 64, K / 128, 8192] uint8, `weights.dense_fp8.pack` of e4m3 codes [N, K].
        scales: [ceil(N / 128), K / 128] uint8, e8m0, as released.
        groups: of the weights' rows, in 64s.
        dtype: of the result, float32 or bfloat16.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("dense_fp8")
    x = check.array("x", x, "float", "T", "columns")
    codes = check.array("codes", codes, "uint8", "tiles", "steps", TILE_BYTES)
    tiles, steps, _ = codes.shape
    scales = check.array("scales", scales, "uint8", -(-tiles * TILE_ROWS // BLOCK), steps)
    if groups < 1 or tiles % groups or x.shape[1] != groups * steps * TILE_COLUMNS:
        raise ShapeError(
            f"dense_fp8: x has {x.shape[1]} columns, {groups} groups of weights [{tiles * TILE_ROWS}, "
            f"{steps * TILE_COLUMNS}] take {groups * steps * TILE_COLUMNS}, and rows in {TILE_ROWS}s each"
        )
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ShapeError(f"dense_fp8: dtype is {jnp.dtype(dtype).name}, expected float32 or bfloat16")
    return run("dense_fp8", DenseFp8Arguments(x, codes, scales, groups, jnp.dtype(dtype)), implementation)


def dequantised(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Packed codes and their scales -> [N, K] bfloat16. Exact: a code times a power of two (down to 2^-117)."""
    tiles, steps, _ = codes.shape
    rows, columns = tiles * TILE_ROWS, steps * TILE_COLUMNS
    factors = power_of_two(scales.astype(jnp.int32) - np.int32(127))
    blocks = e4m3_values(released(codes)).reshape(tiles, TILE_ROWS, steps, TILE_COLUMNS)
    of_tile = jnp.repeat(factors, BLOCK // TILE_ROWS, axis=0)[:tiles]
    return (blocks * of_tile[:, None, :, None]).astype(jnp.bfloat16).reshape(rows, columns)


def packed(codes: jax.Array) -> jax.Array:
    """[N, K] uint8 e4m3 as released -> packed: `weights.dense_fp8.pack`, traceable and without its checks."""
    rows, columns = codes.shape
    pairs = lax.bitcast_convert_type(codes.reshape(rows, columns // 2, 2), jnp.uint16)
    pairs = pairs.reshape(tiled(rows, columns)).transpose(WORD_AXES)
    words = jnp.stack(two_words(pairs.reshape(*pairs.shape[:-2], 4)), -1)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_BYTES)


def released(codes: jax.Array) -> jax.Array:
    """Packed codes -> [N, K] uint8 e4m3 as released: `weights.dense_fp8.unpack`, traceable."""
    tiles, steps, _ = codes.shape
    words = lax.bitcast_convert_type(codes.reshape(tiles, steps, 4, 4, 8, 4, 2, 2, 4), jnp.uint32)
    fields = pair_fields(words[..., 0], words[..., 1])
    pairs = jnp.stack([_code(x >> np.uint32(16 * half)) for x in fields for half in (0, 1)], -1)
    pairs = pairs.reshape(*pairs.shape[:-1], 2, 2, 2)  # c, h, half
    return pairs.transpose(*PACKED_AXES, pairs.ndim - 1).reshape(tiles * TILE_ROWS, steps * TILE_COLUMNS)


def _code(fields: jax.Array) -> jax.Array:
    """The code whose sign and magnitude lie in the fields of the lower bf16."""
    return (fields >> np.uint32(8) & np.uint32(0x80) | fields >> np.uint32(4) & np.uint32(0x7F)).astype(jnp.uint8)


def reference(arguments: DenseFp8Arguments) -> jax.Array:
    """`dense_fp8` in `jnp`: the weights dequantised, then a product of bf16. On a GPU the way for many rows."""
    groups, columns, rows = arguments.groups, arguments.columns, arguments.x.shape[0]
    weights = dequantised(arguments.codes, arguments.scales)
    weights = weights.reshape(groups, arguments.weight_rows // groups, columns)
    x = arguments.x.astype(jnp.bfloat16).reshape(rows, groups, columns)
    out = jnp.einsum("tgk,gnk->tgn", x, weights, preferred_element_type=jnp.float32)
    return out.reshape(rows, arguments.weight_rows).astype(arguments.dtype)


IMPLEMENTATION = Implementation("dense_fp8", "xla", reference)
