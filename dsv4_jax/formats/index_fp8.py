"""Index key in FP8: e4m3 codes and one fp32 power-of-two scale per key (132 bytes at V4's width 128).

scale = 2^ceil(log2(max(amax, 1e-4) / 448)): the key layout of DeepGEMM's paged MQA logits. NaN,
Inf and subnormals as in the `fp8` KV row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import RowFormat
from .scaling import (
    E4M3_MAX,
    absmax,
    e4m3_codes,
    e4m3_values,
    flush_subnormals,
    power_of_two,
    ue8m0_scale_exponent,
)

__all__ = ["decode", "encode"]


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """Encodes [..., dim] float to (codes uint8 [..., dim], scale f32 [..., 1])."""
    (scales,) = fmt.scales
    x = flush_subnormals(x)
    exponent = ue8m0_scale_exponent(absmax(x, np.float32(scales.floor)), E4M3_MAX)[..., None]
    return e4m3_codes(x * power_of_two(-exponent)), power_of_two(exponent)


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Decodes the stored parts of keys to [..., dim] of `dtype`."""
    codes, scale = parts
    return (e4m3_values(codes) * scale).astype(dtype)
