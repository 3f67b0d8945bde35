"""The head: the last norm, and logits by the output matrix, which devices along `tensor` share out by words.

A library chooses its kernel, and so the order of a sum, by the size of a product. So a large matrix is multiplied in
eight blocks of words, on one device as on several, of which each has some: a word's logit has the same bits everywhere.
A small one is whole on every device. In the released numerics products are alike whatever their size
(`numerics.linear`), and there are no blocks where the kernel takes a device's words.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..config import DSV4Config
from ..ops.registry import Choice
from .hyper_connections import Residual, read_head
from .numerics import activations, linear
from .released import is_released
from .weights.params import Params
from .weights.split import BLOCKS, RowShare, Split, in_blocks

__all__ = ["head", "logits"]

TILE_ROWS = 64  # of a matrix, in which the CUDA kernel of `dense_bf16` takes it


def head(
    params: Params, residual: Residual, cfg: DSV4Config, implementation: Choice = None, *, of: Params | None = None
) -> jax.Array:
    """Logits [T, vocab]; `of` the MTP layer, whose streams are summed and normalised by weights of its own."""
    x = read_head(params if of is None else of, residual, cfg, activations(params), implementation)
    weight = params["embed"] if cfg.tie_word_embeddings else params["head"]
    # Channels: beside an MTP layer's exchanges, and beside those of the other head.
    alike, channel = is_released(params), 1 if of is None else 2
    return logits(x, weight, residual.streams.shape[0], channel, alike=alike)


def logits(x: jax.Array, weight: jax.Array | RowShare, count: int, channel: int, *, alike: bool = False) -> jax.Array:
    """Returns the logits of the first `count` rows of x [T, hidden]: [count, words] float32, all words on every device.

    Args:
        weight: [words, hidden].
        channel: of the exchange.
        alike: as of `numerics.linear`.
    """
    rows, devices = (weight.rows, weight.tensor) if isinstance(weight, RowShare) else (weight, 1)
    if not in_blocks((devices * rows.shape[0], rows.shape[1]), rows.dtype):
        return linear(x, rows, alike=alike)[:count]
    blocks = 1 if alike and not rows.shape[0] % TILE_ROWS else BLOCKS // devices
    parts = [linear(x, block, alike=alike)[:count] for block in jnp.split(rows, blocks)]
    return Split(tensor=devices).all_columns(jnp.concatenate(parts, 1), channel)
