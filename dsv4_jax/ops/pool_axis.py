"""The pool axis of a mesh: the blocks of a request dealt out among the ranks along it, block i to rank i mod n.

Outside a step, in plans and in the block table, ids of blocks and entries are those of all ranks. Inside
`jax.shard_map` a rank has its own: what follows is integer arithmetic between the two, and is nothing where there is
one rank.

Block ids: 0 is null, 1, 2, ... lie on ranks 0, 1, ..., n - 1, 0, ...: id g is block (g - 1) // n + 1 of rank
(g - 1) mod n. Entries of a request: those of its block c lie on rank c mod n.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["ONE_RANK", "PoolAxis", "entries_of_parts", "visible_of"]


@dataclasses.dataclass(frozen=True)
class PoolAxis:
    """The axis and its size: what a cache knows of it. Static.

    Attributes:
        name: of the mesh's axis; None: there is one rank.
        size: n.
    """

    name: str | None = None
    size: int = 1

    @property
    def rank(self) -> jax.Array:
        """This device's number, int32."""
        return jnp.int32(0) if self.name is None else lax.axis_index(self.name)

    def own_blocks(self, blocks: jax.Array) -> jax.Array:
        """Turns ids of all ranks' blocks, int32 of any shape, into this rank's ids; 0 for other ranks' blocks."""
        if self.size == 1:
            return blocks
        before, ranks = jnp.asarray(blocks) - np.int32(1), np.int32(self.size)
        return jnp.where((before >= 0) & (before % ranks == self.rank), before // ranks + np.int32(1), 0)

    def own_columns(self, table: jax.Array) -> jax.Array:
        """Turns [T, X] ids of a block table's columns into [T, ceil(X / n)]: this rank's ids of the columns it owns."""
        if self.size == 1:
            return table
        columns = -(-table.shape[1] // self.size)
        filled = jnp.pad(table, ((0, 0), (0, columns * self.size - table.shape[1])))
        own = lax.dynamic_index_in_dim(filled.reshape(-1, columns, self.size), self.rank, 2, keepdims=False)
        return self.own_blocks(own)

    def own_visible(self, visible: jax.Array, per_block: int) -> jax.Array:
        """[T] how many entries of a request are visible -> how many of them lie on this rank."""
        return visible if self.size == 1 else visible_of(visible, per_block, self.rank, self.size)

    def entries_of_all(self, own: jax.Array, per_block: int) -> jax.Array:
        """Returns the numbers in the request of this rank's entries, which are counted through the blocks it owns."""
        return own if self.size == 1 else _entries_of(own, per_block, self.rank, self.size)


ONE_RANK = PoolAxis()


def visible_of(visible: jax.Array, per_block: int, residue: jax.Array | int, modulus: int) -> jax.Array:
    """[T] visible entries -> how many of them are in blocks c with c mod modulus == residue."""
    whole, rest = visible // np.int32(per_block), visible % np.int32(per_block)
    blocks = (whole + np.int32(modulus - 1) - residue) // np.int32(modulus)
    return blocks * np.int32(per_block) + jnp.where(whole % np.int32(modulus) == residue, rest, 0)


def _entries_of(own: jax.Array, per_block: int, residue: jax.Array | int, modulus: int) -> jax.Array:
    """Entries, counted through blocks c with c mod modulus == residue -> their numbers in the request."""
    rows = np.int32(per_block)
    return (own // rows * np.int32(modulus) + residue) * rows + own % rows


def entries_of_parts(
    entries: jax.Array | None, count: jax.Array, residues: jax.Array, modulus: int, *, per_block: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the entries of each token that lie in blocks c with c mod modulus == residue, for each of some residues.

    Args:
        entries: [T, K] int32, of which the first `count` count; None: all of the first `columns` blocks, in order.
        count: [T] int32.
        residues: [S] int32.

    Returns:
        (entries [S, T, K] int32, ascending, or [S, T, ceil(columns / modulus) * per_block] of all;
        how many of them count, [S, T] int32). Behind those that count are others.
    """
    each = residues[:, None]
    if entries is None:
        own = jnp.arange(-(-columns // modulus) * per_block, dtype=jnp.int32)
        numbers = _entries_of(own[None], per_block, each, modulus)[:, None]
        shape = (len(residues), count.shape[0], own.shape[0])
        return jnp.broadcast_to(numbers, shape), visible_of(count[None], per_block, each, modulus)
    if modulus == 1:
        return entries[None], count[None]
    width = entries.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)
    listed = place[None] < count[:, None]
    part = jnp.where(listed, entries // np.int32(per_block) % np.int32(modulus), np.int32(modulus))
    part, entries = lax.sort((part, entries), num_keys=2)
    part = part[None]
    first, last = ((compare(part, each[..., None])).sum(2, dtype=jnp.int32) for compare in (jnp.less, jnp.less_equal))
    place = jnp.minimum(first[..., None] + place[None, None], np.int32(width - 1))
    chosen = jnp.take_along_axis(jnp.broadcast_to(entries, place.shape), place, 2, mode="promise_in_bounds")
    return chosen, last - first
