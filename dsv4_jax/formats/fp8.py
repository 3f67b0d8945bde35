"""The default KV row: e4m3 NoPE dims with one ue8m0 scale per 64, bf16 RoPE dims (584 bytes at V4 widths).

Scale of a group: 2^ceil(log2(max(amax, 1e-4) / 448)), stored as exponent + 127 (DeepSeek-V4
`kernel.py` `act_quant`; byte layout of FlashMLA "MODEL1").

Defined corner cases: NaN stays NaN in its own element and does not move the group's scale; Inf
counts as the largest float32 for the scale and decodes to Inf; float32 subnormals count as zero.
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
    grouped,
    power_of_two,
    ue8m0_scale_exponent,
    ungrouped,
)

__all__ = ["decode", "encode"]


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """Encodes [..., dim] float to (nope uint8 [..., nope_dim], rope uint16 [..., rope_dim], scale uint8 [..., s])."""
    (scales,) = fmt.scales
    x = flush_subnormals(x)
    groups = grouped(x[..., : fmt.nope_dim], scales.group)
    exponent = ue8m0_scale_exponent(absmax(groups, np.float32(scales.floor)), E4M3_MAX)
    codes = e4m3_codes(groups * power_of_two(-exponent)[..., None])
    nope = ungrouped(codes)[..., : fmt.nope_dim]
    scale = (exponent + np.int32(127)).astype(jnp.uint8)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, fmt.parts[2].width - scale.shape[-1])]
    return nope, bf16_bits(x[..., fmt.nope_dim :]), jnp.pad(scale, padding)


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Decodes the stored parts of rows to [..., dim] of `dtype`."""
    (scales,) = fmt.scales
    nope, rope, scale = parts
    factor = power_of_two(scale.astype(jnp.int32) - np.int32(127))
    values = grouped(e4m3_values(nope), scales.group)
    values = values * factor[..., : values.shape[-2], None]
    values = ungrouped(values)[..., : fmt.nope_dim]
    return jnp.concatenate([values.astype(dtype), bits_bf16(rope).astype(dtype)], -1)
