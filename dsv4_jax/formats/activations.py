"""Rows of activations as products with released FP8 and FP4 weights take them: e4m3 codes with power-of-two scales.

The numerics of the released model: a row is first rounded to bfloat16; every 128 columns of it share a scale,
2^ceil(log2(amax / 448)) with amax taken as 1e-4 at least, as a block of FP8 weights does (`weights.fp8`); a code is the
e4m3 number nearest to value / scale, ties to even. Since scales are powers of two, where and in which order they are
applied changes no bit. NaN has the code 0x7F and does not count for the scale, infinity counts as the largest float32
and is cut to 448.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShapeError
from . import FP8_FLOOR
from .scaling import E4M3_MAX, absmax, e4m3_codes, e4m3_values, grouped, power_of_two, ue8m0_scale_exponent

__all__ = ["ROW_BLOCK", "dequantise_rows", "quantise_rows", "to_bfloat16"]

ROW_BLOCK = 128  # columns of a scale


def to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds floats of any shape to bfloat16 numbers, which stay float32.

    In place of `x.astype(bfloat16).astype(float32)`, which XLA may leave out where it fuses both conversions
    (`xla_allow_excess_precision`, on by default): then other codes come out, of rows of one executable and not another.
    """
    kind = jnp.finfo(jnp.bfloat16)
    return lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds float rows [..., K] to codes [..., K] uint8 and scales [..., K / 128] uint8, e8m0.

    Raises:
        ShapeError: K is no multiple of 128.
    """
    if x.shape[-1] % ROW_BLOCK:
        raise ShapeError(f"quantise_rows: rows have {x.shape[-1]} columns, expected a multiple of {ROW_BLOCK}")
    blocks = grouped(to_bfloat16(x), ROW_BLOCK)
    exponent = ue8m0_scale_exponent(absmax(blocks, np.float32(FP8_FLOOR)), E4M3_MAX)
    codes = e4m3_codes(blocks * power_of_two(-exponent)[..., None])
    return codes.reshape(x.shape), (exponent + np.int32(127)).astype(jnp.uint8)


def dequantise_rows(codes: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Returns the rows [..., K] that codes and scales stand for: exact in float32 and in bfloat16."""
    factors = power_of_two(scales.astype(jnp.int32) - np.int32(127))
    blocks = grouped(e4m3_values(codes), ROW_BLOCK)
    return (blocks * factors[..., None]).reshape(codes.shape).astype(dtype)
