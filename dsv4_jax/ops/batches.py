"""A function of one token, over all tokens in batches: what bounds the memory of a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["in_batches"]

MOST = 16  # tokens at a time: `attend` decodes the rows of each, 1.3 MB at V4's widths


def in_batches(one: Callable[..., Any], *operands: jax.Array) -> Any:
    """`one` of the rows of the operands, as `jax.vmap`, at most `MOST` at a time.

    All batches have the same size, so that `one` is compiled once: `lax.map` with a batch size compiles it again for
    what is left over. Rows of zeros, fewer than there are batches, fill the last one; their results are dropped.

    Args:
        one: takes a row of each operand; gives arrays.
        operands: [T, ...] each, T at least 1.

    Returns:
        What `one` gives, stacked: [T, ...].
    """
    rows = operands[0].shape[0]
    batches = -(-rows // MOST)
    if batches <= 1:
        return jax.vmap(one)(*operands)
    size = -(-rows // batches)

    def cut(x: jax.Array) -> jax.Array:
        filled = jnp.pad(x, [(0, batches * size - rows), *[(0, 0)] * (x.ndim - 1)])
        return filled.reshape(batches, size, *x.shape[1:])

    out = lax.map(lambda batch: jax.vmap(one)(*batch), tuple(map(cut, operands)))
    return jax.tree.map(lambda x: x.reshape(batches * size, *x.shape[2:])[:rows], out)
