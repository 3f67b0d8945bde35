"""Exact power-of-two scaling and narrow casts shared by the codecs (pure jnp).

Everything here is integer arithmetic on float32 bits or an exact operation, so the result does
not depend on the backend's flush-to-zero mode, fast-math or rounding of `log2`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import FP8_FLOOR

__all__ = [
    "E4M3_MAX",
    "E4M3_NAN",
    "UE8M0_NAN",
    "absmax",
    "bf16_bits",
    "bits_bf16",
    "e4m3_codes",
    "e4m3_values",
    "flush_subnormals",
    "grouped",
    "power_of_two",
    "ue8m0_scale_exponent",
    "ungrouped",
]

E4M3_MAX = np.float32(448.0)
E4M3_NAN = np.uint8(0x7F)
UE8M0_NAN = np.uint8(0xFF)
AMAX_FLOOR = np.float32(FP8_FLOOR)
_F32_MAX = np.float32(np.finfo(np.float32).max)


def flush_subnormals(x: jax.Array) -> jax.Array:
    """Returns float32 with subnormals replaced by zeros of the same sign."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    zero = bits & np.uint32(0x80000000)
    bits = jnp.where((bits & np.uint32(0x7F800000)) == 0, zero, bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def absmax(x: jax.Array, floor: np.float32) -> jax.Array:
    """Returns max |x| over the last axis, NaN ignored, Inf counted as the largest float32. [..., n] -> [...]"""
    magnitude = jnp.where(jnp.isnan(x), np.float32(0), jnp.minimum(jnp.abs(x), _F32_MAX))
    return jnp.maximum(magnitude.max(-1), floor)


def ue8m0_scale_exponent(amax: jax.Array, limit: float | np.floating) -> jax.Array:
    """Returns k = ceil(log2(amax / limit)) exactly, for normal amax > 0. int32, same shape.

    With amax = m * 2^e and limit = m' * 2^e' (1 <= m, m' < 2) that is e - e' plus one if m > m'.
    """
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    limit_bits = np.float32(limit).view(np.uint32)
    exponent = (bits >> np.uint32(23)).astype(jnp.int32) - np.int32(limit_bits >> 23)
    mantissa, limit_mantissa = bits & np.uint32(0x7FFFFF), limit_bits & np.uint32(0x7FFFFF)
    return exponent + (mantissa > limit_mantissa).astype(jnp.int32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^k as float32 for -126 <= k <= 127; k = -127 gives 0 (the scale of a never-written row)."""
    return lax.bitcast_convert_type((exponent + np.int32(127)).astype(jnp.uint32) << np.uint32(23), jnp.float32)


def e4m3_codes(x: jax.Array) -> jax.Array:
    """Encodes float32 as e4m3fn bytes, round to nearest even, clipped to +-448; NaN -> 0x7F."""
    nan = jnp.isnan(x)
    clipped = jnp.clip(jnp.where(nan, np.float32(0), x), -E4M3_MAX, E4M3_MAX)
    codes = lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.where(nan, E4M3_NAN, codes)


def e4m3_values(codes: jax.Array) -> jax.Array:
    """Decodes e4m3fn bytes to float32 (exact)."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def bf16_bits(x: jax.Array) -> jax.Array:
    """Encodes floats as bf16 bit patterns (uint16), round to nearest even; every NaN -> 0x7FC0."""
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return jnp.where(jnp.isnan(x), np.uint16(0x7FC0), bits)


def bits_bf16(bits: jax.Array) -> jax.Array:
    """Decodes bf16 bit patterns (uint16) to float32 (exact)."""
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def grouped(x: jax.Array, size: int) -> jax.Array:
    """Reshapes [..., n] to [..., ceil(n / size), size], the tail padded with zeros."""
    groups = -(-x.shape[-1] // size)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, groups * size - x.shape[-1])]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], groups, size)


def ungrouped(groups: jax.Array) -> jax.Array:
    """Reshapes [..., g, size] to [..., g * size]; also of no rows at all."""
    return groups.reshape(*groups.shape[:-2], groups.shape[-2] * groups.shape[-1])
