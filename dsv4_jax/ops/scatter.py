"""Scatters whose contract it is that ids out of range are dropped."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["set_existing"]


def set_existing(array: jax.Array, ids: Any, values: jax.Array, *, axis: int = 0) -> jax.Array:
    """`array.at[ids].set(values)` for the ids that exist; those below 0 or too large are not written.

    One operation to `jax.experimental.checkify`: its index checks would take every dropped id for a mistake, and
    padding has ids that no row has.

    Args:
        ids: int32, an array, or a tuple of one for each of the first axes.
        axis: 1: `array.at[:, ids]`.
    """
    return (_set, _set_second)[axis](array, ids, values)


@jax.custom_batching.sequential_vmap
def _set(array: jax.Array, ids: Any, values: jax.Array) -> jax.Array:
    return array.at[ids].set(values, mode="drop", wrap_negative_indices=False)


@jax.custom_batching.sequential_vmap
def _set_second(array: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[:, ids].set(values, mode="drop", wrap_negative_indices=False)
