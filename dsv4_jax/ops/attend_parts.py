"""attend over entries of which each rank of a pool axis holds some, or whose sums are to be as if eight ranks did.

Every rank attends with all heads to its own entries and its share of the window, which all ranks have: key i of it
belongs to part i mod the number of parts. Heads that are split over the axis are gathered first, and each rank's sums
go to the owners of the heads; where every rank has all heads, it has all the sums in the end.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..errors import ShapeError
from ..formats import RowFormat
from .append import Rows, WindowView
from .attend import AttendArguments, KernelSplit, finish_output
from .batches import in_tiles
from .exchange import all_gather
from .merge import NO_SINK, Partial, in_halves, with_sink
from .pool_axis import PoolAxis, entries_of_parts
from .registry import Choice, run

__all__ = ["PARTS", "attend_parts"]

PARTS = 8  # into which entries are cut for bits that do not depend on the number of ranks
_TOKENS = 128  # at a time: each of eight parts has an output of its own


def attend_parts(
    queries: jax.Array,
    sink: jax.Array,
    window: WindowView,
    entries: Rows,
    listed: jax.Array | None,
    count: jax.Array,
    *,
    rows_of: Callable[[jax.Array, jax.Array], jax.Array],
    axis: PoolAxis,
    parts: int,
    heads: int,
    per_block: int,
    columns: int,
    inverse_rope: tuple[jax.Array, jax.Array] | None,
    dtype: DTypeLike,
    scale: float,
    fmt: RowFormat,
    key_split: KernelSplit,
    implementation: Choice,
) -> tuple[jax.Array, jax.Array]:
    """Attends as `ops.attend` does, to entries that are given by their numbers in each token's request.

    Args:
        queries: [T, H, dim]: all `heads`, or this rank's share of them.
        sink: [H] float32.
        listed: [T, K] int32 entries; None: all of the first `columns` blocks.
        count: [T] int32: how many of them are keys, from the first.
        rows_of: (token numbers [t], entries [t, K] of theirs) -> rows of `entries`; anything for other ranks' entries.
        parts: into which keys are cut, entries by their block's number modulo this: a multiple of the ranks. Over any
            number of ranks that divides it, the bits are the same.
        per_block: entries of a block.
        others: as of `attend`.

    Raises:
        ShapeError: the heads are neither all nor this rank's share.
    """
    here = queries.shape[1]
    if here not in (heads, heads // axis.size):
        raise ShapeError(f"attend: {here} query heads on each of {axis.size} ranks, expected {heads} or their share")
    split, everyones = here != heads, queries
    if split:
        assert axis.name is not None
        (everyones,) = all_gather((queries,), axis.name, dimension=1)
    several = parts // axis.size
    residues = axis.rank + jnp.arange(0, parts, axis.size, dtype=jnp.int32)
    no_sink = jnp.full(everyones.shape[1], NO_SINK)

    def own(token: jax.Array, q: jax.Array, count: jax.Array, *listed: jax.Array) -> Partial:
        """Attends with some tokens to this rank's keys: each of its parts counts as a token more."""
        chosen, counts = entries_of_parts(
            listed[0] if listed else None, count, residues, parts, per_block=per_block, columns=columns
        )
        tokens = token.shape[0]
        ids = rows_of(jnp.tile(token, several), chosen.reshape(several * tokens, -1))
        here, seen = (_parts(x[token], axis.rank, several, axis.size) for x in (window.ids, window.visible))
        near, repeated = WindowView(window.rows, here, seen), jnp.tile(q, (several, 1, 1))
        arguments = AttendArguments(
            repeated, no_sink, near, entries, ids, counts.reshape(-1), scale, fmt, key_split=key_split
        )
        out, lse = run("attend", arguments, implementation)
        outs, lses = (x.reshape(several, tokens, *x.shape[1:]) for x in (out, lse))
        return in_halves([Partial.of(outs[i], lses[i]) for i in range(several)])

    tokens = jnp.arange(queries.shape[0], dtype=jnp.int32)
    rows = _TOKENS if several > 1 else max(queries.shape[0], 1)
    share = in_tiles(own, rows, tokens, everyones, count, *([] if listed is None else [listed]))
    ranks = [share] if axis.name is None else _exchanged(share, axis.name, axis.size, split)
    out, lse = with_sink(in_halves(ranks), sink)
    return finish_output(out, inverse_rope, dtype), lse


def _parts(window: jax.Array, rank: jax.Array, several: int, ranks: int) -> jax.Array:
    """Returns a rank's parts of [T, W] window keys: [several * T, ceil(W / parts)], filled with hidden ones."""
    tokens, keys = window.shape
    width = -(-keys // (several * ranks))
    filled = jnp.pad(window, ((0, 0), (0, width * several * ranks - keys)))
    own = lax.dynamic_index_in_dim(filled.reshape(tokens, width, several, ranks), rank, 3, keepdims=False)
    return jnp.moveaxis(own, 2, 0).reshape(several * tokens, width)


def _exchanged(share: Partial, axis: str, ranks: int, split: bool) -> list[Partial]:
    """Every rank's sums: of this rank's share of the heads, or of all."""
    packed = jnp.concatenate([share.out, share.top[..., None], share.total[..., None]], -1)
    if split:
        each = packed.reshape(packed.shape[0], ranks, -1, packed.shape[2])
        packed = lax.all_to_all(each, axis, 1, 0)
    else:
        packed = lax.all_gather(packed, axis)
    return [Partial(x[..., :-2], x[..., -2], x[..., -1]) for x in packed]
