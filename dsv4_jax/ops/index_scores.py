"""index_scores: the CSA indexer's score of every compressed entry, over paged index keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import RowFormat, codec
from .append import Rows, load
from .arguments import Check
from .batches import in_batches
from .columns import Values, dense
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "IndexScoresArguments", "index_scores", "reference", "scaled"]


@dataclasses.dataclass(frozen=True)
class IndexScoresArguments:
    """Holds what an implementation of `index_scores` is given, as in its arguments."""

    pool: Rows
    queries: jax.Array
    weights: Values
    table: jax.Array
    count: jax.Array
    base: int
    rows_per_block: int
    fmt: RowFormat
    scale: float = 1.0

    @property
    def empty(self) -> bool:
        return 0 in (*self.queries.shape, self.table.shape[1])


def index_scores(
    pool: Rows,
    queries: jax.Array,
    weights: Values,
    table: jax.Array,
    count: jax.Array,
    *,
    base: int,
    rows_per_block: int,
    fmt: RowFormat,
    scale: float = 1.0,
    implementation: Choice = None,
) -> jax.Array:
    """Scores I[t, s] = sum_h w[t, h] * relu(q[t, h] . K[s]) for the entries s < count[t] (docs/model.md, Index).

    Args:
        pool: index-key leaves, [rows, width].
        queries: [T, H, d] float.
        weights: [T, H] float, an array or `Columns`; may be negative.
        table: [T, X] int32 block ids of each token's request; one out of range reads the nearest block there is
            between `base` and the end of the leaves.
        count: [T] int32 visible entries.
        base: first row of the layer in the leaves.
        rows_per_block: index keys per block.
        scale: static factor of the weights, applied in float32.

    Returns:
        [T, X * rows_per_block] float32, -inf for s >= count[t].

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("index_scores")
    pool = check.parts("pool", pool, fmt)
    queries = check.array("queries", queries, "float", "T", "H", fmt.dim)
    weights = check.array("weights", weights, "float", "T", "H")
    table = check.array("table", table, "int32", "T", "X")
    count = check.array("count", count, "int32", "T")
    arguments = IndexScoresArguments(pool, queries, weights, table, count, base, rows_per_block, fmt, scale)
    return run("index_scores", arguments, implementation)


def reference(arguments: IndexScoresArguments) -> jax.Array:
    """Computes `index_scores` in `jnp`, float32 throughout."""
    pool, fmt, base = arguments.pool, arguments.fmt, arguments.base
    rows_per_block = arguments.rows_per_block
    # Here, not of the rows: an id times the rows of a block may leave int32.
    table = lax.clamp(np.int32(0), arguments.table, np.int32((pool[0].shape[0] - base) // rows_per_block - 1))

    def one(q: jax.Array, w: jax.Array, blocks: jax.Array, visible: jax.Array) -> jax.Array:
        ids = (
            np.int32(base)
            + blocks[:, None] * np.int32(rows_per_block)
            + jnp.arange(rows_per_block, dtype=jnp.int32)[None]
        )
        keys = codec(fmt).decode(fmt, load(pool, ids.reshape(-1)), jnp.float32)
        dots = jnp.einsum("hd,sd->hs", q, keys, precision=lax.Precision.HIGHEST)
        scores = jnp.einsum("h,hs->s", w, jax.nn.relu(dots), precision=lax.Precision.HIGHEST)
        return jnp.where(jnp.arange(scores.shape[0]) < visible, scores, -np.float32(np.inf))

    weights = scaled(arguments.weights, arguments.scale)
    return in_batches(one, arguments.queries.astype(jnp.float32), weights, table, arguments.count)


def scaled(weights: Values, scale: float) -> jax.Array:
    """Returns the weights as a float32 array, times `scale`."""
    weights = dense(weights).astype(jnp.float32)
    return weights if scale == 1 else weights * np.float32(scale)


IMPLEMENTATION = Implementation("index_scores", "xla", reference)
