"""Which drafts are kept, and what is sampled after them: greedy, or so that the samples have the target's distribution.

The rule for samples is that of Leviathan et al. 2023 (arXiv 2211.17192, section 2.3 and appendix A.1) and Chen et al.
2023 (arXiv 2302.01318, theorem 1). A draft x that was sampled with probability q(x), where the target has p(x), is kept
with probability min(1, p(x) / q(x)). In place of the first that is not kept a token is sampled from max(p - q, 0),
normalised; if all are kept, one more from the target's next p.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .sampling import Sampling, distribution, sampling_keys

__all__ = ["accept", "verify"]


def accept(
    logits: jax.Array,
    chances: jax.Array | None,
    guesses: jax.Array,
    drafts: jax.Array,
    sampling: Sampling,
    keys: jax.Array | None,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The tokens that follow the known one of each sequence.

    Args:
        logits: [B, k + 1, vocab] float32: the target's, of the known token and of each draft.
        chances: [B, k, vocab] float32, the probabilities that the drafts were sampled with; None when greedy.
        guesses: [B, k] int32, the drafts.
        drafts: [B] int32, how many of them there are, 0 to k.
        keys: [B] random keys, one per sequence; not needed when greedy.
        position: [B] int32, of the known token. A sequence's samples depend on its own rows, key and position alone.

    Returns:
        (sampled [B, k + 1] int32, kept [B] int32): the first kept[b] tokens of sampled[b] are the accepted drafts
        and the token sampled after them.

    Raises:
        RequestError: not greedy, and `keys` is missing.
    """
    width = guesses.shape[1]
    if sampling.temperature == 0:
        best = logits.argmax(-1).astype(jnp.int32)
        right = _leading(best[:, :width] == guesses, drafts)
        after = jnp.take_along_axis(best, right[:, None], 1)[:, 0]
    else:
        assert chances is not None
        places = position[:, None] + jnp.arange(width + 1, dtype=jnp.int32)[None]
        each = jax.vmap(lambda at: sampling_keys(keys, at, sampling)[1:], in_axes=1, out_axes=1)
        to_accept, to_sample = each(places)
        uniform = jax.vmap(jax.vmap(jax.random.uniform))(to_accept[:, :width])
        right, rest = verify(distribution(logits, sampling), chances, guesses, drafts, uniform)
        own = jax.vmap(lambda row, i: row[i])(to_sample, right)
        after = jax.vmap(jax.random.categorical)(own, jnp.log(rest)).astype(jnp.int32)
    at = jnp.arange(width + 1, dtype=jnp.int32)[None]
    sampled = jnp.where(at < right[:, None], jnp.pad(guesses, ((0, 0), (0, 1))), after[:, None])
    return sampled, right + np.int32(1)


def verify(
    target: jax.Array, chances: jax.Array, guesses: jax.Array, drafts: jax.Array, uniform: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many drafts are accepted, and the probabilities of the token sampled after them.

    Args:
        target: [B, k + 1, vocab] float32 probabilities p.
        chances: [B, k, vocab] float32 probabilities q.
        guesses, drafts: as in `accept`.
        uniform: [B, k] float32 in [0, 1), independent of the drafts.

    Returns:
        (accepted [B] int32, [B, vocab] float32).
    """
    picked = guesses[..., None]
    p, q = (jnp.take_along_axis(x, picked, 2)[..., 0] for x in (target[:, :-1], chances))
    right = _leading(uniform * q < p, drafts)
    here = jnp.take_along_axis(target, right[:, None, None], 1)[:, 0]
    # With no draft left nothing was rejected, and the target's own probabilities are the rest.
    beside = jnp.take_along_axis(chances, jnp.minimum(right, chances.shape[1] - 1)[:, None, None], 1)[:, 0]
    beside = jnp.where((right < drafts)[:, None], beside, np.float32(0))
    rest = jnp.maximum(here - beside, np.float32(0))
    total = rest.sum(-1, keepdims=True)
    return right, jnp.where(total > 0, rest / total, here)  # equal but for rounding: nothing is left of the difference


def _leading(right: jax.Array, drafts: jax.Array) -> jax.Array:
    """How many of the first drafts are all right, [B] int32."""
    there = jnp.arange(right.shape[1], dtype=jnp.int32)[None] < drafts[:, None]
    return jnp.cumprod((right & there).astype(jnp.int32), 1).sum(1, dtype=jnp.int32)
