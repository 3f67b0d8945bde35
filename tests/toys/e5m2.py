"""Rows of e5m2 codes with a ue8m0 scale per group, and bf16 RoPE dims if there are any."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4_jax.formats import RowFormat
from dsv4_jax.formats.scaling import (
    absmax,
    bf16_bits,
    bits_bf16,
    flush_subnormals,
    grouped,
    power_of_two,
    ue8m0_scale_exponent,
    ungrouped,
)

__all__ = ["decode", "encode"]

LARGEST = np.float32(57344)
NAN = np.uint8(0x7F)


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """[..., dim] float -> (nope uint8, rope uint16 unless there is none, scale uint8)."""
    (scales,) = fmt.scales
    x = flush_subnormals(x)
    groups = grouped(x[..., : fmt.nope_dim], scales.group)
    exponent = ue8m0_scale_exponent(absmax(groups, np.float32(scales.floor)), LARGEST)
    codes = ungrouped(_codes(groups * power_of_two(-exponent)[..., None]))[..., : fmt.nope_dim]
    rope = (bf16_bits(x[..., fmt.nope_dim :]),) if fmt.rope_dim else ()
    return codes, *rope, (exponent + np.int32(127)).astype(jnp.uint8)


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The stored parts of rows -> [..., dim] in `dtype`."""
    (scales,), (codes, *rope, scale) = fmt.scales, parts
    values = grouped(lax.bitcast_convert_type(codes, jnp.float8_e5m2).astype(jnp.float32), scales.group)
    values = ungrouped(values * power_of_two(scale.astype(jnp.int32) - np.int32(127))[..., None])[..., : fmt.nope_dim]
    return jnp.concatenate([values.astype(dtype), *(bits_bf16(r).astype(dtype) for r in rope)], -1)


def _codes(x: jax.Array) -> jax.Array:
    """float32 -> e5m2 bytes, rounded to nearest even, clipped; NaN -> 0x7F."""
    nan = jnp.isnan(x)
    x = jnp.where(nan, np.float32(0), jnp.clip(x, -LARGEST, LARGEST))
    return jnp.where(nan, NAN, lax.bitcast_convert_type(x.astype(jnp.float8_e5m2), jnp.uint8))
