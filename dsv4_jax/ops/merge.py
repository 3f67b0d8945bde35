"""What ranks that hold shares of a token's keys make of them together: one selection, one softmax.

The selection does not depend on how the keys were shared out. The softmax is a tree of pairs, so shares that are
branches of it (`in_halves`) give one result however many of them a rank has merged before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .numerics import exp, rounded

__all__ = ["NO_SINK", "Partial", "in_halves", "merge_candidates", "with_sink"]

# For `attend`: so far below every logit that its weight is exactly 0, and still a number where there is no key.
NO_SINK = np.float32(-1e30)
_NO_KEY = -np.float32(np.inf)


class Partial(NamedTuple):
    """A softmax over some keys, without the sink.

    Attributes:
        out: [..., dim] float32, the weighted sum of values, in units of e^top.
        top: [...] float32, at least about the largest logit; -inf: there is no key.
        total: [...] float32, the sum of the weights in units of e^top; 0 without a key.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, out: jax.Array, lse: jax.Array) -> Partial:
        """Makes one of what `attend` gives with `NO_SINK`."""
        return cls(out, lse, (lse != _NO_KEY).astype(jnp.float32))

    def __add__(self, other: Partial) -> Partial:  # type: ignore[override]
        """Merges two results: that over the keys of both."""
        top = jnp.maximum(self.top, other.top)
        mine, others = _weight(self.top, top), _weight(other.top, top)
        out = rounded(self.out * mine[..., None]) + rounded(other.out * others[..., None])
        return Partial(out, top, rounded(self.total * mine) + rounded(other.total * others))


def in_halves(parts: Sequence[Partial]) -> Partial:
    """Returns the sum of 2^k parts: of each in the first half with its like in the second, then of those, and so on.

    So parts 0, n, 2n, ... of them, summed this way, then those of 1, n + 1, ... and so on, have the sum of all.
    """
    parts = list(parts)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def with_sink(partial: Partial, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `attend` gives: (out [T, H, dim], lse [T, H] without the sink). `sink`: [H] float32."""
    sink = jnp.broadcast_to(sink, partial.top.shape)
    top = jnp.maximum(partial.top, sink)
    weight, sinks = _weight(partial.top, top), _weight(sink, top)
    out = rounded(partial.out * weight[..., None]) / (rounded(partial.total * weight) + sinks)[..., None]
    lse = partial.top + jnp.log(jnp.where(partial.total > 0, partial.total, np.float32(1)))
    return out, lse


def merge_candidates(scores: jax.Array, entries: jax.Array, *, k: int) -> jax.Array:
    """Returns the k best of entries that ranks propose: by score, highest first; ties go to the lowest entry.

    So if every rank proposes its own k best in that order (all it has, if these are fewer), these are the k best of all
    entries, in the order of `ops.top_k`.

    Args:
        scores: [T, C] float32. NaN ranks as -inf; -0 equals 0.
        entries: [T, C] int32, no two equal; 2^31 - 1 where there is none, which come last whatever their score.
        k: at most C.

    Returns:
        [T, k] int32.
    """
    none = entries == np.int32(2**31 - 1)
    ranked = jnp.where(jnp.isnan(scores) | none, _NO_KEY, jnp.where(scores == 0, np.float32(0), scores))
    _, ordered = lax.sort((-ranked, entries), num_keys=2)
    return ordered[:, :k]


def _weight(top: jax.Array, above: jax.Array) -> jax.Array:
    """e^(top - above); 0 where there is no key."""
    return jnp.where(top == _NO_KEY, np.float32(0), exp(top - jnp.where(above == _NO_KEY, np.float32(0), above)))
