"""Which drafts are kept, and what is sampled after them, by one of two rules.

By the first (`accept`) it is exactly what would be sampled without drafts. Draft and target draw with the same noise,
that of their place (`sampling.noise`), so a draft is right if and only if it is the token that the target draws there.
What comes out is what the target draws, whoever drafts, token for token. (Drafter-invariant: Daliri, Musco and Suresh
2024, arXiv 2408.07978. A draft from q where the target has p is right with a probability of at least (1 - d) / (1 + d),
where d is their total variation distance.)

By the second (`accept_standard`) it has the distribution of what would be sampled without drafts, and depends on them.
A draft is kept with a probability of 1 - d, the most there is (Leviathan et al. 2023, arXiv 2211.17192), and q of the
whole vocabulary is needed. For logits with a standard deviation of 8 and drafts whose logits are off by noise of 1, d
is 0.17: 82.7 % are kept, and 78.5 by the first rule (docs/model.md). Random numbers of this rule are independent of
those that drew the drafts (`sampling.SECOND`); drafts behind the first that is refused leave nothing, so the next step
may draw at their places with the numbers that drew them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import shown
from .sampling import SECOND, Sampled, distribution, draw, log_probabilities, sample, uniform

__all__ = ["ACCEPTANCE", "accept", "accept_standard", "check_acceptance", "with_guesses"]

ACCEPTANCE = ("coupled", "standard")


def check_acceptance(rule: str, error: Callable[[str], Exception]) -> None:
    """Raises `error` unless it is one of `ACCEPTANCE`."""
    if not isinstance(rule, str) or rule not in ACCEPTANCE:
        raise error(f"acceptance is {' or '.join(ACCEPTANCE)}, got {shown(rule)}")


def accept(
    logits: jax.Array,
    guesses: jax.Array,
    drafts: jax.Array,
    sampling: jax.Array | None,
    position: jax.Array,
    *,
    masks: jax.Array | None = None,
    biases: jax.Array | None = None,
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
        biases: [B, 2, n] int32, as of `sample`.
        counts: [B, vocab] int32, before the drafts.
        asked: `logprobs`, `top` and `implementation` of `sample`.

    Returns:
        (what is sampled after each, its fields [B, k + 1, ...]; kept [B] int32): the first kept[b] tokens are the
        drafts that were right and the one after them. The others mean nothing.
    """
    count, width = guesses.shape
    places = position[:, None] + jnp.arange(width + 1, dtype=jnp.int32)[None]
    rows = logits.reshape(count * (width + 1), -1)
    given = _by_place(guesses, sampling, masks, biases, counts)
    drawn = sample(rows, given.pop("sampling"), places.reshape(-1), **given, **asked)
    drawn = jax.tree.map(lambda x: x.reshape(count, width + 1, *x.shape[1:]), drawn)
    there = _there(drafts, width)
    return drawn, _first((drawn.tokens[:, :width] == guesses) & there) + np.int32(1)


def accept_standard(
    logits: jax.Array,
    guesses: jax.Array,
    shares: jax.Array,
    drafts: jax.Array,
    sampling: jax.Array,
    position: jax.Array,
    *,
    masks: jax.Array | None = None,
    biases: jax.Array | None = None,
    counts: jax.Array | None = None,
    logprobs: bool = False,
    top: int = 0,
) -> tuple[Sampled, jax.Array]:
    """As `accept`, by the standard rule: a draft x is kept with a probability of min(1, p(x) / q(x)), and in place of
    the first that is not comes a draw of what p has more than q.

    Args:
        shares: [B, k, vocab] float32, the distribution q that each draft was drawn from, given those before it.
        drafts: [B] int32; how many may depend, for each draft, on those before it alone.
    """
    count, width = guesses.shape
    places = position[:, None] + jnp.arange(width + 1, dtype=jnp.int32)[None]
    p = distribution(logits.reshape(count * (width + 1), -1), **_by_place(guesses, sampling, masks, biases, counts))
    p = p.reshape(count, width + 1, -1)
    own, drafted = (jnp.take_along_axis(x, guesses[..., None], 2)[..., 0] for x in (p[:, :width], shares))
    of_places = jnp.repeat(sampling, width, axis=0, total_repeat_length=count * width)
    level = uniform(of_places, places[:, :width].reshape(-1)).reshape(count, width)
    kept = _first((level * drafted < own) & _there(drafts, width))
    after = jnp.take_along_axis(p, kept[:, None, None], 1)[:, 0]
    refused = jnp.take_along_axis(shares, jnp.minimum(kept, width - 1)[:, None, None], 1)[:, 0]
    more = jnp.maximum(after - refused, np.float32(0))
    is_refused = (kept < drafts) & (more.sum(-1) > 0)  # rounding aside p has more somewhere, if it has less for a draft
    place = jnp.take_along_axis(places, kept[:, None], 1)[:, 0].astype(jnp.uint32)
    last = draw(
        jnp.where(is_refused[:, None], more, after), sampling, place + jnp.where(is_refused, SECOND, np.uint32(0))
    )
    tokens = jnp.where(np.arange(width + 1)[None] < kept[:, None], jnp.pad(guesses, ((0, 0), (0, 1))), last[:, None])
    if not logprobs and not top:
        return Sampled(tokens), kept + np.int32(1)
    drawn = log_probabilities(logits.reshape(count * (width + 1), -1), tokens.reshape(-1), top=top)
    return jax.tree.map(lambda x: x.reshape(count, width + 1, *x.shape[1:]), drawn), kept + np.int32(1)


def _by_place(
    guesses: jax.Array,
    sampling: jax.Array | None,
    masks: jax.Array | None,
    biases: jax.Array | None,
    counts: jax.Array | None,
) -> dict[str, Any]:
    """What `sample` is given of sequences, with a row for the known token and for each draft: [B * (k + 1), ...]."""
    count, places = guesses.shape[0], guesses.shape[1] + 1
    if counts is not None:
        seen = [with_guesses(counts, guesses[:, :place]) for place in range(places)]
        counts = jnp.stack(seen, 1).reshape(count * places, -1)
    if masks is not None:
        masks = masks.reshape(count * places, -1)

    def repeated(rows: jax.Array | None) -> jax.Array | None:
        if rows is None:
            return None
        return jnp.repeat(jnp.asarray(rows), places, axis=0, total_repeat_length=count * places)

    return dict(sampling=repeated(sampling), masks=masks, biases=repeated(biases), counts=counts)


def _there(drafts: jax.Array, width: int) -> jax.Array:
    """Which of `width` drafts there are: [B, width] bool."""
    return jnp.arange(width, dtype=jnp.int32)[None] < drafts[:, None]


def _first(right: jax.Array) -> jax.Array:
    """How many drafts of [B, k] are right before the first that is not: [B] int32."""
    return jnp.cumprod(right.astype(jnp.int32), 1).sum(1, dtype=jnp.int32)


def with_guesses(counts: jax.Array, guesses: jax.Array) -> jax.Array:
    """Returns counts [B, vocab] as they are after the tokens [B, n]."""
    ids = jnp.arange(counts.shape[1], dtype=jnp.int32)[None]
    for place in range(guesses.shape[1]):
        counts = counts + (ids == guesses[:, place, None]).astype(jnp.int32)
    return counts
