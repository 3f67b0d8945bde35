"""copy: whole units (blocks or slots) of a leaf onto others, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .append import exists
from .scatter import set_existing

__all__ = ["copy_units"]


def copy_units(leaf: jax.Array, src: jax.Array, dst: jax.Array, *, layers: int, units: int, rows: int) -> jax.Array:
    """Copies unit src[i] to dst[i] in every layer; all are read before any is written.

    Args:
        leaf: [layers * units * rows, width].
        src, dst: [C] int32 unit ids; pairs with dst 0 (the null unit) or an id out of range are skipped.
    """
    if src.shape[0] == 0:
        return leaf
    view = leaf.reshape(layers, units, rows * leaf.shape[-1])
    moved, view = lax.optimization_barrier((view.at[:, src].get(mode="clip", wrap_negative_indices=False), view))
    real = exists(dst, units) & (src >= 0) & (src < units)
    return set_existing(view, jnp.where(real, dst, np.int32(units)), moved, axis=1).reshape(leaf.shape)
