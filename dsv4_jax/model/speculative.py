"""Which drafts are kept, and what is sampled after them: exactly what would be sampled without drafts.

Draft and target draw with the same noise, that of their place (`sampling.noise`), so a draft is right if and only if it
is the token that the target draws there. What comes out is what the target draws, whoever drafts, token for token.
(Drafter-invariant: Daliri, Musco and Suresh 2024, arXiv 2408.07978. A draft from q where the target has p is right with
a probability of at least (1 - d) / (1 + d), where d is their total variation distance, and with 1 - d by the best rule
of any, that of Leviathan et al. 2023, arXiv 2211.17192, whose tokens depend on the drafts, and which needs q of the
whole vocabulary. For logits with a standard deviation of 8 and drafts whose logits are off by noise of 1, d is 0.17 and
78.5 % are right instead of 82.7: docs/model.md.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .sampling import Sampled, sample

__all__ = ["accept", "with_guesses"]


def accept(
    logits: jax.Array,
    guesses: jax.Array,
    drafts: jax.Array,
    sampling: jax.Array | None,
    position: jax.Array,
    *,
    masks: jax.Array | None = None,
    counts: jax.Array | None = None,
    **asked: Any,
) -> tuple[Sampled, jax.Array]:
    """The tokens that follow the known one of each sequence.

    Args:
        logits: [B, k + 1, vocab] float32: the target's, of the known token and of each draft.
        guesses: [B, k] int32, the drafts.
        drafts: [B] int32, how many of them there are, 0 to k.
        sampling: as of `sample`, of each sequence.
        position: [B] int32, of the known token.
        masks: [B, k + 1, words], of the token after each.
        counts: [B, vocab] int32, before the drafts.
        asked: `logprobs` and `top` of `sample`.

    Returns:
        (what is sampled after each, its fields [B, k + 1, ...]; kept [B] int32): the first kept[b] tokens are the
        drafts that were right and the one after them. The others mean nothing.
    """
    count, width = guesses.shape

    def each(x: jax.Array) -> jax.Array:
        """Rows of the sequences as rows of their places."""
        return jnp.repeat(x, width + 1, axis=0, total_repeat_length=count * (width + 1))

    places = position[:, None] + jnp.arange(width + 1, dtype=jnp.int32)[None]
    if counts is not None:
        seen = [with_guesses(counts, guesses[:, :place]) for place in range(width + 1)]
        counts = jnp.stack(seen, 1).reshape(count * (width + 1), -1)
    drawn = sample(
        logits.reshape(count * (width + 1), -1),
        None if sampling is None else each(jnp.asarray(sampling)),
        places.reshape(-1),
        masks=None if masks is None else masks.reshape(count * (width + 1), -1),
        counts=counts,
        **asked,
    )
    drawn = jax.tree.map(lambda x: x.reshape(count, width + 1, *x.shape[1:]), drawn)
    there = jnp.arange(width, dtype=jnp.int32)[None] < drafts[:, None]
    right = (drawn.tokens[:, :width] == guesses) & there
    return drawn, jnp.cumprod(right.astype(jnp.int32), 1).sum(1, dtype=jnp.int32) + np.int32(1)


def with_guesses(counts: jax.Array, guesses: jax.Array) -> jax.Array:
    """Returns counts [B, vocab] as they are after the tokens [B, n]."""
    ids = jnp.arange(counts.shape[1], dtype=jnp.int32)[None]
    for place in range(guesses.shape[1]):
        counts = counts + (ids == guesses[:, place, None]).astype(jnp.int32)
    return counts
