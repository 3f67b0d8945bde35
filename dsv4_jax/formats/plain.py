"""Unquantised rows: bf16 bit patterns (uint16; every NaN -> 0x7FC0) or float32 (bit-exact)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import RowFormat
from .scaling import bf16_bits, bits_bf16, flush_subnormals

__all__ = ["decode", "encode"]


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """Encodes [..., dim] float to one part of the same shape. bf16 counts float32 subnormals as zero."""
    if fmt.dense_dtype == "float32":
        return (x.astype(jnp.float32),)
    return (bf16_bits(flush_subnormals(x)),)


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Decodes the stored part of rows to [..., dim] of `dtype`."""
    (row,) = parts
    if fmt.dense_dtype == "float32":
        return row.astype(dtype)
    return bits_bf16(row).astype(dtype)
