"""Index key in MXFP4: e2m1 codes, two to a byte, one ue8m0 scale per 32 dims (68 bytes at V4's width 128).

scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); values round to nearest even on
{0, .5, 1, 1.5, 2, 3, 4, 6}; element 2i sits in the low nibble (DeepSeek-V4 `fp4_act_quant`).

Defined corner cases: e2m1 has no NaN, so a group with a NaN gets the ue8m0 NaN scale 0xFF and
decodes to NaN as a whole; Inf counts as the largest float32 for the scale and decodes to Inf;
float32 subnormals count as zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import FP4_FLOOR, FP4_GROUP, RowFormat
from .scaling import UE8M0_NAN, absmax, flush_subnormals, grouped, power_of_two, ue8m0_scale_exponent, ungrouped

__all__ = ["AMAX_FLOOR", "decode", "e2m1_codes", "encode", "round_trip"]

AMAX_FLOOR = np.float32(FP4_FLOOR)
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Code c is chosen above the midpoint to c - 1; a midpoint itself goes to the even code.
_MIDPOINTS = (_VALUES[1:] + _VALUES[:-1]) / 2


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """Encodes [..., dim] float to (codes uint8 [..., dim / 2], scale uint8 [..., ceil(dim / 32)])."""
    (scales,) = fmt.scales
    codes, exponent, nan = _quantise(x, scales.group, np.float32(scales.floor))
    codes = ungrouped(codes)[..., : x.shape[-1]]
    packed = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    scale = jnp.where(nan, UE8M0_NAN, (exponent + np.int32(127)).astype(jnp.uint8))
    return packed, scale


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Decodes the stored parts of keys to [..., dim] of `dtype`."""
    (scales,), (packed, scale) = fmt.scales, parts
    codes = ungrouped(jnp.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1))
    groups = _values(grouped(codes, scales.group))
    factor = power_of_two(scale.astype(jnp.int32) - np.int32(127))
    factor = jnp.where(scale == UE8M0_NAN, np.float32(np.nan), factor)
    values = ungrouped(groups * factor[..., None])
    return values[..., : fmt.dim].astype(dtype)


def round_trip(x: jax.Array) -> jax.Array:
    """What FP4 storage would make of x, [..., n] float32: for the indexer's queries (QAT)."""
    codes, exponent, nan = _quantise(x, FP4_GROUP, AMAX_FLOOR)
    factor = jnp.where(nan, np.float32(np.nan), power_of_two(exponent))
    return ungrouped(_values(codes) * factor[..., None])[..., : x.shape[-1]]


def _quantise(x: jax.Array, group: int, floor: np.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[..., n] -> codes uint8 [..., g, group], exponent int32 [..., g], has-NaN bool [..., g]."""
    groups = grouped(flush_subnormals(x), group)
    exponent = ue8m0_scale_exponent(absmax(groups, floor), 6.0)
    codes = e2m1_codes(groups * power_of_two(-exponent)[..., None])
    return codes, exponent, jnp.isnan(groups).any(-1)


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Encodes float32 as e2m1 codes (uint8, sign in bit 3), round to nearest even, clipped to +-6; NaN -> 0."""
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for i, midpoint in enumerate(_MIDPOINTS):
        above = magnitude >= midpoint if i % 2 else magnitude > midpoint
        code = code + above.astype(jnp.uint8)
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(28)).astype(jnp.uint8) & np.uint8(8)
    return jnp.where(jnp.isnan(x), np.uint8(0), code | sign)


def _values(codes: jax.Array) -> jax.Array:
    magnitude = jnp.asarray(_VALUES)[(codes & np.uint8(7)).astype(jnp.int32)]
    return jnp.where((codes & np.uint8(8)) != 0, -magnitude, magnitude)
