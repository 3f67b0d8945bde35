"""Random stored rows: valid in every format (no NaN codes, scales near 1), made on the device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import Codes, RowFormat, Scales
from ..ops.append import Rows

__all__ = ["random_part", "random_rows"]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_part(key: jax.Array, shape: tuple[int, ...], dtype: str, holds: Codes | Scales | None = None) -> jax.Array:
    """Draws one part of a pool. Float32 parts (scales, state, rows) are positive."""
    if dtype == "float32":
        return jnp.abs(jax.random.normal(key, shape, jnp.float32))
    bits = jax.random.bits(key, shape, dtype)
    if isinstance(holds, Scales):  # ue8m0: 2^-9 to 2^-4
        return bits % np.uint8(6) + np.uint8(118)
    if dtype == "uint16":  # bf16 in +-[0.5, 1)
        return (bits & np.uint16(0x807F)) | np.uint16(0x3F00)
    # e4m3 without its NaNs; e2m1 has none.
    return bits & np.uint8(0xF7) if dtype == "uint8" else bits


def random_rows(key: jax.Array, fmt: RowFormat, rows: int) -> Rows:
    """Draws the parts of a pool, [rows, width] each."""
    keys = jax.random.split(key, len(fmt.parts))
    return tuple(
        random_part(k, (rows, part.width), part.dtype, part.holds) for k, part in zip(keys, fmt.parts, strict=True)
    )
