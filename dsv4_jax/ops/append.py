"""append: quantise rows and store them in a pool, in place. And the sliding window built on it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import RowFormat, codec
from ..plan import StepPlan
from .arguments import Check
from .columns import Values, dense
from .epilogue import Epilogue, check_epilogue
from .registry import Choice, Implementation, run
from .scatter import set_existing

__all__ = [
    "IMPLEMENTATION",
    "AppendArguments",
    "Rows",
    "WindowView",
    "append",
    "encode",
    "exists",
    "load",
    "pin",
    "reference",
    "ring_row",
    "store",
    "window_rows",
    "window_view",
]

Rows = tuple[jax.Array, ...]  # the parts of stored rows, each [rows, width]


class WindowView(NamedTuple):
    """Where every token's window lies. Key k of token t is position t - window + 1 + k.

    Attributes:
        rows: parts that hold the windows' rows.
        ids: [T, window] int32 rows of them; 0 where not visible.
        visible: [T, window] bool: whether the position exists.
    """

    rows: Rows
    ids: jax.Array
    visible: jax.Array


@dataclasses.dataclass(frozen=True)
class AppendArguments:
    """Holds what an implementation of `append` and `encode` is given, as in their arguments.

    Attributes:
        pool, row_ids: None: the encoded rows are the result (`encode`).
    """

    values: Values
    fmt: RowFormat
    epilogue: Epilogue | None = None
    position: jax.Array | None = None
    pool: Rows | None = None
    row_ids: jax.Array | None = None

    @property
    def empty(self) -> bool:
        return self.values.shape[0] == 0

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the result: of the pool's parts, or of those of new rows."""
        if self.pool is not None:
            return tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in self.pool)
        tokens = self.values.shape[0]
        return tuple(jax.ShapeDtypeStruct((tokens, part.width), jnp.dtype(part.dtype)) for part in self.fmt.parts)


def append(
    pool: Rows,
    values: Values,
    row_ids: jax.Array,
    *,
    fmt: RowFormat,
    epilogue: Epilogue | None = None,
    position: jax.Array | None = None,
    implementation: Choice = None,
) -> Rows:
    """Encodes rows and stores them at `row_ids`.

    Args:
        pool: parts of the pool, each [rows, width].
        values: [T, dim] float rows, an array or `Columns`.
        row_ids: [T] int32, no two equal among the valid ones; those below 0 or >= rows are not written.
        fmt: the pool's row format.
        epilogue: norm and RoPE still to be done; None if `values` are ready to be stored.
        position: [T] int32 of the rows, needed by `epilogue`.

    Returns:
        The updated pool (in place when the caller's buffer is donated).

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or `position` is missing; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("append")
    arguments = _checked(check, values, fmt, epilogue, position)
    pool, row_ids = check.parts("pool", pool, fmt), check.array("row_ids", row_ids, "int32", "T")
    return run("append", dataclasses.replace(arguments, pool=pool, row_ids=row_ids), implementation)


def encode(
    values: Values,
    *,
    fmt: RowFormat,
    epilogue: Epilogue | None = None,
    position: jax.Array | None = None,
    implementation: Choice = None,
) -> Rows:
    """The parts [T, width] of the rows `append` would store. Raises as `append`."""
    return run("append", _checked(Check("encode"), values, fmt, epilogue, position), implementation)


def _checked(
    check: Check, values: Values, fmt: RowFormat, epilogue: Epilogue | None, position: jax.Array | None
) -> AppendArguments:
    values = check.array("values", values, "float", "T", fmt.dim)
    if epilogue is not None:
        check_epilogue(check, "epilogue", epilogue, fmt.dim)
        position = check.array("position", position, "int32", "T")
    return AppendArguments(values, fmt, epilogue, position)


def reference(arguments: AppendArguments) -> Rows:
    """Computes `append`, and without a pool `encode`, in `jnp`."""
    values, fmt = dense(arguments.values), arguments.fmt
    if arguments.epilogue is not None:
        assert arguments.position is not None
        values = arguments.epilogue(values.astype(jnp.float32), arguments.position)
    rows = codec(fmt).encode(fmt, values)
    if arguments.pool is None:
        return rows
    assert arguments.row_ids is not None
    return store(arguments.pool, rows, arguments.row_ids)


IMPLEMENTATION = Implementation("append", "xla", reference)


def store(pool: Rows, rows: Rows, row_ids: jax.Array) -> Rows:
    """Scatters already encoded rows; ids out of range are dropped."""
    return tuple(set_existing(part, row_ids, new) for part, new in zip(pool, rows, strict=True))


def load(pool: Rows, row_ids: jax.Array) -> Rows:
    """Gathers encoded rows, [...] ids -> parts [..., width]. An id out of range reads the nearest row."""
    return tuple(part.at[row_ids].get(mode="clip", wrap_negative_indices=False) for part in pool)


def window_rows(plan: StepPlan, *, rows: int, ordinal: int, slots: int, ring: int) -> jax.Array:
    """Where each token's row goes in the window rings, [T] int32: ring row = position mod ring.

    Of a row that feeds more than `ring` tokens only the last `ring` are stored. Padding tokens, and
    those of a slot that does not exist, are not stored: their id is `rows`.

    Args:
        rows: rows of the leaves, layers * slots * ring.
        ordinal: index of the layer among those the leaves hold.
        slots: slots of the leaves, the null slot included.
    """
    last = (plan.seq_start + plan.seq_count)[plan.token_seq] - ring
    keep = exists(plan.token_slot, slots) & (plan.token_position >= last)
    return jnp.where(keep, ring_row(ordinal, slots, ring, plan.token_slot, plan.token_position), np.int32(rows))


def exists(unit: jax.Array, units: int) -> jax.Array:
    """Whether ids name a unit: neither the null unit, which is padding, nor none at all."""
    return (unit > 0) & (unit < np.int32(units))


def ring_row(ordinal: int, slots: int, ring: int, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the row of a position in a slot's ring."""
    return (np.int32(ordinal * slots) + slot) * np.int32(ring) + position % np.int32(ring)


def window_view(
    pool: Rows,
    chunk: Rows | None,
    plan: StepPlan,
    *,
    ordinal: int,
    slots: int,
    ring: int,
    window: int,
    first: int = 0,
) -> WindowView:
    """Where every token's window lies.

    With no `history_seqs` in the plan the ids point into `pool`, which must already hold the
    step's rows. Otherwise the result has rows of its own: the window before the step (so `pool`
    must not hold the step's rows yet), then the step's rows (`chunk`). A chunk longer than the
    ring would overwrite keys its own early tokens need.

    Args:
        first: the first position that is shown.
        others: as of `window_rows`; `window` is the number of positions that each token sees.
    """
    offset = jnp.arange(1 - window, 1, dtype=jnp.int32)[None]
    position = plan.token_position[:, None] + offset
    visible = (position >= np.int32(first)) & exists(plan.token_slot, slots)[:, None]
    position = jnp.maximum(position, 0)
    if plan.history_seqs.shape[0] == 0:
        ids = ring_row(ordinal, slots, ring, plan.token_slot[:, None], position)
        return WindowView(pool, jnp.where(visible, ids, 0), visible)
    assert chunk is not None
    depth = window - 1
    start = plan.seq_start[plan.history_seqs]
    before = jnp.maximum(start[:, None] - np.int32(depth) + jnp.arange(depth, dtype=jnp.int32)[None], 0)
    slot = plan.seq_slot[plan.history_seqs][:, None]
    history = load(pool, ring_row(ordinal, slots, ring, slot, before))
    rows = tuple(jnp.concatenate([h.reshape(-1, h.shape[-1]), c]) for h, c in zip(history, chunk, strict=True))
    row = jnp.asarray(plan.token_seq)[:, None]
    seq_start = plan.seq_start[plan.token_seq][:, None]
    in_chunk = position >= seq_start
    chunk_id = np.int32(slot.shape[0] * depth) + plan.seq_first[plan.token_seq][:, None] + position - seq_start
    history_id = row * np.int32(depth) + position - seq_start + np.int32(depth)
    ids = jnp.where(in_chunk, chunk_id, history_id)
    return WindowView(rows, jnp.where(visible, ids, 0), visible)


def pin(gathered: Any, pool: Rows) -> tuple[Any, Rows]:
    """Orders a gather before a later in-place update of its pool.

    Without it XLA may fuse the gather into its consumers, past the update, and keep a copy of the
    whole pool alive for it.
    """
    return lax.optimization_barrier((gathered, pool))
