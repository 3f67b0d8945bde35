"""float32 rows byte by byte, and a tag that no value depends on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4_jax.formats import RowFormat

__all__ = ["decode", "encode"]


def encode(fmt: RowFormat, x: jax.Array) -> tuple[jax.Array, ...]:
    """[..., dim] float -> (byte0 .. byte3 uint8 [..., dim], tag uint16 [..., 3])."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    planes = ((bits >> np.uint32(8 * i) & np.uint32(0xFF)).astype(jnp.uint8) for i in range(4))
    return *planes, jnp.broadcast_to(np.array([1, 2, 3], np.uint16), (*x.shape[:-1], 3))


def decode(fmt: RowFormat, parts: tuple[jax.Array, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The stored planes of rows -> [..., dim] in `dtype`."""
    *planes, _ = parts
    bits = sum((plane.astype(jnp.uint32) << np.uint32(8 * i) for i, plane in enumerate(planes)), np.uint32(0))
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
