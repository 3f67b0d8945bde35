"""top-k: the entries a CSA query attends to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import check_integer
from ..errors import ShapeError
from .arguments import Check
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "TopKArguments", "reference", "top_k"]


@dataclasses.dataclass(frozen=True)
class TopKArguments:
    """Holds what an implementation of `top_k` is given, as in its arguments.

    Attributes:
        k: at most S.
    """

    scores: jax.Array
    count: jax.Array
    k: int

    @property
    def empty(self) -> bool:
        return self.scores.shape[0] == 0 or self.k == 0


def top_k(scores: jax.Array, count: jax.Array, *, k: int, implementation: Choice = None) -> tuple[jax.Array, jax.Array]:
    """The k highest-scoring of the first `count` entries, exact; ties go to the lowest index.

    Args:
        scores: [T, S] float32. NaN ranks as -inf; -0 equals 0.
        count: [T] int32, entries that exist for each token; any number, cut to 0..S.
        k: how many to keep.

    Returns:
        (indices [T, min(k, S)] int32, highest score first, 0 where there are fewer;
        kept [T] int32, the lesser of k and count).

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("top_k")
    scores = check.array("scores", scores, "float32", "T", "S")
    count = check.array("count", count, "int32", "T")
    k = check_integer("top_k: k", k, error=ShapeError)
    return run("top_k", TopKArguments(scores, count, min(k, scores.shape[1])), implementation)


def reference(arguments: TopKArguments) -> tuple[jax.Array, jax.Array]:
    """Computes `top_k` in `jnp`."""
    scores, count, k = arguments.scores, arguments.count, arguments.k
    exists = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None] < count[:, None]
    ranked = jnp.where(exists & ~jnp.isnan(scores), scores, -np.float32(np.inf))
    ranked = jnp.where(ranked == 0, np.float32(0), ranked)  # lax.top_k ranks 0 above -0
    _, indices = lax.top_k(ranked, k)
    kept = lax.clamp(np.int32(0), count, np.int32(k))
    return jnp.where(jnp.arange(k, dtype=jnp.int32)[None] < kept[:, None], indices, 0), kept


IMPLEMENTATION = Implementation("top_k", "xla", reference)
