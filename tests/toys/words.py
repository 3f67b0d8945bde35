"""Rows of bf16 codes, two to a word."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.formats import RowFormat
from dsv4_jax.formats.scaling import bf16_bits, bits_bf16, flush_subnormals, grouped, ungrouped

__all__ = ["decode", "encode"]


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """[..., dim] float -> (words uint32 [..., ceil(dim / 2)],)."""
    pairs = grouped(bf16_bits(flush_subnormals(x)).astype(jnp.uint32), 2)
    return (pairs[..., 0] | pairs[..., 1] << np.uint32(16),)


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The stored words of rows -> [..., dim] in `dtype`."""
    (words,) = parts
    bits = jnp.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], -1).astype(jnp.uint16)
    return bits_bf16(ungrouped(bits)[..., : fmt.dim]).astype(dtype)
