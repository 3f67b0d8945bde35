"""finish_queries: the last steps of a query before attention or the indexer: norm, RoPE, Hadamard, FP4 round trip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats.index_fp4 import round_trip
from .columns import Values, dense
from .dispatch import Implementation, implementation_for
from .numerics import hadamard, rope

__all__ = ["finish_queries"]


def finish_queries(
    queries: Values,
    position: jax.Array,
    inv_freq: jax.Array,
    *,
    eps: float | None = None,
    rotate: bool = False,
    round_fp4: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """RMSNorm per head (no weight) and RoPE; for the indexer also Hadamard and FP4 rounding (spec 2.1, 2.5).

    Args:
        queries: [T, H, dim] float32, an array or `Columns`.
        position: [T] int32.
        inv_freq: [rope_dim / 2] float32.
        eps: of the norm; None: no norm.
        rotate: multiply by the Hadamard matrix (dim a power of two).
        round_fp4: round to what FP4 storage would keep, groups of 32 dims.

    Returns:
        [T, H, dim]: float32 of the reference, bfloat16 of a kernel (the kernels they go to round to it anyway).
    """
    fn = implementation_for("queries", _finish_queries, implementation, empty=queries.size == 0)
    return fn(queries, position, inv_freq, eps, rotate, round_fp4)


def _finish_queries(
    queries: Values, position: jax.Array, inv_freq: jax.Array, eps: float | None, rotate: bool, round_fp4: bool
) -> jax.Array:
    queries = dense(queries)
    if eps is not None:
        queries = queries * lax.rsqrt(jnp.mean(queries * queries, -1, keepdims=True) + np.float32(eps))
    queries = rope(queries, jnp.asarray(position)[:, None], inv_freq)
    if rotate:
        queries = hadamard(queries)
    return round_trip(queries) if round_fp4 else queries
