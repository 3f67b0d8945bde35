"""top-k: the entries a CSA query attends to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .dispatch import Implementation, implementation_for

__all__ = ["top_k"]


def top_k(
    scores: jax.Array, count: jax.Array, *, k: int, implementation: Implementation = None
) -> tuple[jax.Array, jax.Array]:
    """The k highest-scoring of the first `count` entries, exact; ties go to the lowest index.

    Args:
        scores: [T, S] float32. NaN ranks as -inf; -0 equals 0.
        count: [T] int32, entries that exist for each token; any number, cut to 0..S.
        k: how many to keep.

    Returns:
        (indices [T, min(k, S)] int32, highest score first, 0 where there are fewer;
        kept [T] int32, the lesser of k and count).
    """
    k = min(k, scores.shape[-1])
    return implementation_for("top_k", _top_k, implementation, empty=scores.shape[0] == 0 or k == 0)(scores, count, k)


def _top_k(scores: jax.Array, count: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    exists = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None] < count[:, None]
    ranked = jnp.where(exists & ~jnp.isnan(scores), scores, -np.float32(np.inf))
    ranked = jnp.where(ranked == 0, np.float32(0), ranked)  # lax.top_k ranks -0 below 0
    # lax.top_k ranks 0 above -0.
    _, indices = lax.top_k(jnp.where(ranked == 0, np.float32(0), ranked), k)
    kept = lax.clamp(np.int32(0), count, np.int32(k))
    return jnp.where(jnp.arange(k, dtype=jnp.int32)[None] < kept[:, None], indices, 0), kept
