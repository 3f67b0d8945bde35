"""entry_rows: where logical entries lie in their pool, through each token's block table."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax import lax

from ..checks import INT32_MAX, check_integer
from ..errors import ShapeError
from .arguments import Check
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "EntryRowsArguments", "entry_rows", "reference"]


@dataclasses.dataclass(frozen=True)
class EntryRowsArguments:
    """Holds what an implementation of `entry_rows` is given, as in its arguments."""

    entries: jax.Array
    slots: jax.Array
    table: jax.Array
    base: int
    per_block: int
    blocks: int

    @property
    def empty(self) -> bool:
        return self.entries.size == 0


def entry_rows(
    entries: jax.Array,
    slots: jax.Array,
    table: jax.Array,
    *,
    base: int,
    per_block: int,
    blocks: int,
    implementation: Choice = None,
) -> jax.Array:
    """Returns rows [T, K] int32 of logical entries: base + block * per_block + entry % per_block.

    The block is table[slots[t], entry // per_block].

    Args:
        entries: [T, K] int32, from 0 on; those beyond the table are looked up in its last column.
        slots: [T] int32; what is no slot counts as the nearest one.
        table: [slots, columns] int32, the blocks of each; what is no block counts as the nearest one.
        base: the first row of block 0.
        per_block: entries of a block.
        blocks: of the pool, the null block included.

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or rows would exceed int32; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("entry_rows")
    entries = check.array("entries", entries, "int32", "T", "K")
    slots, table = check.array("slots", slots, "int32", "T"), check.array("table", table, "int32", "slots", "columns")
    base = check_integer("entry_rows: base", base, 0, INT32_MAX, error=ShapeError)
    per_block = check_integer("entry_rows: per_block", per_block, 1, INT32_MAX, error=ShapeError)
    blocks = check_integer("entry_rows: blocks", blocks, 1, (INT32_MAX - base) // per_block, error=ShapeError)
    if table.size == 0:
        raise ShapeError("entry_rows: table has no slots or no columns")
    return run("entry_rows", EntryRowsArguments(entries, slots, table, base, per_block, blocks), implementation)


def reference(arguments: EntryRowsArguments) -> jax.Array:
    """Computes `entry_rows` in `jnp`."""
    per_block, (slots, columns) = np.int32(arguments.per_block), arguments.table.shape
    entries, zero = lax.max(arguments.entries, np.int32(0)), np.int32(0)
    column = lax.min(entries // per_block, np.int32(columns - 1))
    block = arguments.table[lax.clamp(zero, arguments.slots, np.int32(slots - 1))[:, None], column]
    block = lax.clamp(zero, block, np.int32(arguments.blocks - 1))
    return np.int32(arguments.base) + block * per_block + entries % per_block


IMPLEMENTATION = Implementation("entry_rows", "xla", reference)
