"""append: quantise rows and store them in a pool, in place. And the sliding window built on it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import RowFormat, codec
from ..plan import StepPlan
from .dispatch import Implementation, implementation_for

__all__ = ["Rows", "append", "append_window", "window_view"]

Rows = tuple[jax.Array, ...]  # the parts of stored rows, each [rows, width]


def append(
    pool: Rows, values: jax.Array, row_ids: jax.Array, *, fmt: RowFormat, implementation: Implementation = None
) -> Rows:
    """Encodes rows and stores them at `row_ids`.

    Args:
        pool: parts of the pool, each [rows, width].
        values: [T, dim] float rows.
        row_ids: [T] int32, no two equal among the valid ones; ids >= rows are not written.
        fmt: the pool's row format.

    Returns:
        The updated pool (in place when the caller's buffer is donated).
    """
    return implementation_for("append", _append, implementation)(pool, values, row_ids, fmt)


def _append(pool: Rows, values: jax.Array, row_ids: jax.Array, fmt: RowFormat) -> Rows:
    return store(pool, codec(fmt).encode(fmt, values), row_ids)


def store(pool: Rows, rows: Rows, row_ids: jax.Array) -> Rows:
    """Scatters already encoded rows; ids >= rows are dropped."""
    return tuple(
        part.at[row_ids].set(new, mode="drop", wrap_negative_indices=False)
        for part, new in zip(pool, rows, strict=True)
    )


def load(pool: Rows, row_ids: jax.Array) -> Rows:
    """Gathers encoded rows, [...] ids -> parts [..., width]. Ids must be in range (padding: unit 0)."""
    return tuple(part.at[row_ids].get(mode="clip", wrap_negative_indices=False) for part in pool)


def append_window(
    pool: Rows,
    values: jax.Array,
    plan: StepPlan,
    *,
    ordinal: int,
    slots: int,
    ring: int,
    fmt: RowFormat,
    implementation: Implementation = None,
) -> Rows:
    """Appends one layer's KV rows of a step to the window rings: ring row = position mod ring.

    Of a row that feeds more than `ring` tokens only the last `ring` are stored. Padding tokens
    are not stored.

    Args:
        pool: window leaves, [layers * slots * ring, width].
        values: [T, dim] KV rows of the step's tokens (after norm and RoPE).
        ordinal: index of the layer among those the leaves hold.
        slots: slots of the leaves, the null slot included.
    """
    last = (plan.row_start + plan.row_count)[plan.token_row] - ring
    keep = (plan.token_slot > 0) & (plan.token_position >= last)
    row = ring_row(ordinal, slots, ring, plan.token_slot, plan.token_position)
    row = jnp.where(keep, row, np.int32(pool[0].shape[0]))
    return append(pool, values, row, fmt=fmt, implementation=implementation)


def ring_row(ordinal: int, slots: int, ring: int, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Row of a position in a slot's ring."""
    return (np.int32(ordinal * slots) + slot) * np.int32(ring) + position % np.int32(ring)


def window_view(
    pool: Rows,
    values: jax.Array | None,
    plan: StepPlan,
    *,
    ordinal: int,
    slots: int,
    ring: int,
    window: int,
    fmt: RowFormat,
) -> tuple[Rows, jax.Array, jax.Array]:
    """Where every token's window lies: (rows, ids [T, window] int32, visible [T, window] bool).

    Key k of token t is position t - window + 1 + k. With no `history_rows` in the plan the ids
    point into `pool`, which must already hold the step's rows. Otherwise the result has rows of
    its own: the window before the step (so `pool` must not hold the step's rows yet), then the
    step's rows, encoded. A chunk longer than the ring would overwrite keys its own early tokens need.
    """
    offset = jnp.arange(1 - window, 1, dtype=jnp.int32)[None]
    position = plan.token_position[:, None] + offset
    visible = (position >= 0) & (plan.token_slot > 0)[:, None]
    position = jnp.maximum(position, 0)
    if plan.history_rows.shape[0] == 0:
        ids = ring_row(ordinal, slots, ring, plan.token_slot[:, None], position)
        return pool, jnp.where(visible, ids, 0), visible
    assert values is not None
    depth = window - 1
    start = plan.row_start[plan.history_rows]
    before = jnp.maximum(start[:, None] - np.int32(depth) + jnp.arange(depth, dtype=jnp.int32)[None], 0)
    slot = plan.row_slot[plan.history_rows][:, None]
    history = load(pool, ring_row(ordinal, slots, ring, slot, before))
    chunk = codec(fmt).encode(fmt, values)
    rows = tuple(jnp.concatenate([h.reshape(-1, h.shape[-1]), c]) for h, c in zip(history, chunk, strict=True))
    row = jnp.asarray(plan.token_row)[:, None]
    row_start = plan.row_start[plan.token_row][:, None]
    in_chunk = position >= row_start
    chunk_id = np.int32(slot.shape[0] * depth) + plan.row_first[plan.token_row][:, None] + position - row_start
    history_id = row * np.int32(depth) + position - row_start + np.int32(depth)
    ids = jnp.where(in_chunk, chunk_id, history_id)
    return rows, jnp.where(visible, ids, 0), visible


def pin(gathered: Any, pool: Rows) -> tuple[Any, Rows]:
    """Orders a gather before a later in-place update of its pool.

    Without it XLA may fuse the gather into its consumers, past the update, and keep a copy of the
    whole pool alive for it.
    """
    return lax.optimization_barrier((gathered, pool))
