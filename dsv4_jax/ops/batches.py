"""Functions of tokens, over all tokens in batches of one size: compiled once, and memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["in_batches", "in_tiles"]

MAX_BATCH = 16  # tokens at a time: `attend` decodes the rows of each, 1.3 MB at V4's widths


def in_batches(one: Callable[..., Any], *operands: jax.Array) -> Any:
    """Maps `one` over the rows of the operands, as `jax.vmap`, at most `MAX_BATCH` at a time.

    All batches have the same size, so that `one` is compiled once: `lax.map` with a batch size compiles it again for
    what is left over. They are of about one size, so that less than a row for each is computed in vain.

    Args:
        one: takes a row of each operand; gives arrays.
        operands: [T, ...] each, T at least 1.

    Returns:
        What `one` gives, stacked: [T, ...].
    """
    rows = operands[0].shape[0]
    batches = max(-(-rows // MAX_BATCH), 1)
    return in_tiles(jax.vmap(one), -(-rows // batches), *operands)


def in_tiles(run: Callable[..., Any], rows: int, *operands: jax.Array) -> Any:
    """`run` of operands [T, ...], if T is more than `rows` then of exactly so many rows at a time.

    The last row is repeated to fill the last tile; what `run` gives for those is dropped.
    """
    count = operands[0].shape[0]
    if count <= rows:
        return run(*operands)
    tiles = -(-count // rows)

    def cut(x: jax.Array) -> jax.Array:
        filled = jnp.pad(x, [(0, tiles * rows - count), *[(0, 0)] * (x.ndim - 1)], mode="edge")
        return filled.reshape(tiles, rows, *x.shape[1:])

    out = lax.map(lambda tile: run(*tile), tuple(map(cut, operands)))
    return jax.tree.map(lambda x: x.reshape(tiles * rows, *x.shape[2:])[:count], out)
