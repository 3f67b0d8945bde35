"""KV row with one fp32 inverse scale: e4m3 NoPE dims, bf16 RoPE dims (580 bytes at V4 widths).

inverse scale = max(amax, 1e-4) / 448, code = e4m3(x / inverse scale): the row format of the torch
dsv4 cache. NaN, Inf and subnormals as in `fp8` (the amax runs over the NoPE dims of the row).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import RowFormat
from .scaling import (
    AMAX_FLOOR,
    E4M3_MAX,
    absmax,
    bf16_bits,
    bits_bf16,
    e4m3_codes,
    e4m3_values,
    flush_subnormals,
)

__all__ = ["decode", "encode"]


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """[..., dim] float -> (nope uint8 [..., nope_dim], rope uint16 [..., rope_dim], inv_scale f32 [..., 1])."""
    x = flush_subnormals(x)
    nope = x[..., : fmt.nope_dim]
    inv_scale = (absmax(nope, AMAX_FLOOR) / E4M3_MAX)[..., None]
    return e4m3_codes(nope / inv_scale), bf16_bits(x[..., fmt.nope_dim :]), inv_scale


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The stored parts of rows -> [..., dim] in `dtype`."""
    nope, rope, inv_scale = parts
    values = e4m3_values(nope) * inv_scale
    return jnp.concatenate([values.astype(dtype), bits_bf16(rope).astype(dtype)], -1)
