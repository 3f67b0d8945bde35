"""KV row with one fp32 inverse scale: e4m3 NoPE dims, bf16 RoPE dims (580 bytes at V4 widths).

With amax = max |x| over the NoPE dims (at least 1e-4): code = e4m3(x * (448 / amax)) and the stored
inverse scale = amax * (1 / 448), every operation rounded to float32. NaN, Inf and subnormals as in
`fp8`, but that Inf decodes to the largest float32 (to Inf in bfloat16): its scale is no power of two.

Only these operations keep their bits: XLA turns a division by a constant or by a broadcast value
into a product with the reciprocal, depending on what it compiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import RowFormat
from .scaling import (
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
    """Encodes [..., dim] float to (nope uint8 [..., nope_dim], rope uint16 [..., rope_dim], inv_scale f32 [..., 1])."""
    (scales,) = fmt.scales
    x = flush_subnormals(x)
    nope = x[..., : fmt.nope_dim]
    amax = absmax(nope, np.float32(scales.floor))[..., None]
    codes = e4m3_codes(nope * (E4M3_MAX / amax))
    return codes, bf16_bits(x[..., fmt.nope_dim :]), amax * np.float32(1 / 448)


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Decodes the stored parts of rows to [..., dim] of `dtype`."""
    nope, rope, inv_scale = parts
    values = e4m3_values(nope) * inv_scale
    return jnp.concatenate([values.astype(dtype), bits_bf16(rope).astype(dtype)], -1)
