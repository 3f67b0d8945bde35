"""Drawing the next token from logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShapeError

__all__ = ["Sampling", "sample"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to draw. Static: one executable each.

    Attributes:
        temperature: 0 takes the likeliest token, ties to the lowest id.
        top_k: keep only the k likeliest tokens; 0 keeps all.
        top_p: then keep the fewest tokens whose probability reaches p (at least one); 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ShapeError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ShapeError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ShapeError(f"top_p must be in (0, 1], got {self.top_p}")


def sample(logits: jax.Array, sampling: Sampling, key: jax.Array | None) -> jax.Array:
    """[B, vocab] float32 -> [B] int32.

    Raises:
        ShapeError: a sampled draw was asked for without a key.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    if key is None:
        raise ShapeError(f"sampling at temperature {sampling.temperature} needs a key")
    logits = logits / np.float32(sampling.temperature)
    keep = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    top, ids = lax.top_k(logits, keep)
    chance = jax.nn.softmax(top, -1)
    before = jnp.cumsum(chance, -1) - chance
    top = jnp.where(before < np.float32(sampling.top_p), top, -np.float32(np.inf))
    drawn = jax.random.categorical(key, top)
    return jnp.take_along_axis(ids, drawn[:, None], 1)[:, 0]
