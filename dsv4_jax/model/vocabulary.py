"""Logits: the product with the output matrix, which devices along `tensor` share out by words.

A library chooses its kernel, and so the order of a sum, by the size of a product. So a large matrix is multiplied in
eight blocks of words, on one device as on several, of which each has some: a word's logit has the same bits everywhere.
A small one is whole on every device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .numerics import linear
from .split import RowShare, Split

__all__ = ["BLOCKS", "WHOLE_BYTES", "in_blocks", "logits"]

BLOCKS = 8  # as many as there can be devices
# Of a block, at most, where the matrix stays whole: smaller products of the same rows XLA merges into one again.
WHOLE_BYTES = 2**25


def in_blocks(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> bool:
    """Whether a matrix [words, hidden] is multiplied in blocks, and may be shared out."""
    words, hidden = shape
    return words % BLOCKS == 0 and words // BLOCKS * hidden * np.dtype(dtype).itemsize > WHOLE_BYTES


def logits(x: jax.Array, weight: jax.Array | RowShare, count: int, channel: int) -> jax.Array:
    """Of the first `count` rows of x [T, hidden]: [count, words] float32, of all words on every device.

    Args:
        weight: [words, hidden].
        channel: of the exchange.
    """
    rows, devices = (weight.rows, weight.tensor) if isinstance(weight, RowShare) else (weight, 1)
    if not in_blocks((devices * rows.shape[0], rows.shape[1]), rows.dtype):
        return linear(x, rows)[:count]
    parts = [linear(x, block)[:count] for block in jnp.split(rows, BLOCKS // devices)]
    return Split(tensor=devices).all_columns(jnp.concatenate(parts, 1), channel)
