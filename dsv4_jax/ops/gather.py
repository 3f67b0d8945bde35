"""gather: stored rows back to dense values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..formats import RowFormat, codec
from .append import Rows, load
from .dispatch import Implementation, implementation_for

__all__ = ["gather_rows"]


def gather_rows(
    pool: Rows,
    row_ids: jax.Array,
    *,
    fmt: RowFormat,
    dtype: jnp.dtype = jnp.bfloat16,
    implementation: Implementation = None,
) -> jax.Array:
    """Dense rows [..., dim] of `dtype` for int32 `row_ids` [...]; an id out of range reads the nearest row.

    The RoPE dims of FP8 rows come back bit-exact; the NoPE dims are code times scale, exact in bf16.
    """
    fn = implementation_for("gather", _gather_rows, implementation, empty=row_ids.size == 0)
    return fn(pool, row_ids, fmt, dtype)


def _gather_rows(pool: Rows, row_ids: jax.Array, fmt: RowFormat, dtype: jnp.dtype) -> jax.Array:
    return codec(fmt).decode(fmt, load(pool, row_ids), dtype)
