"""Steps that draft with the MTP layer, verify with the backbone and sample: one, or K in one executable."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache import KVCache
from ..errors import ShapeError
from ..ops.registry import Choice
from ..plan import PackedPlan, StepPlan
from .ahead import moved
from .forward import check_tokens, layers
from .head import head
from .mtp import check_mtp, flat, follow, guess, mtp_layer
from .sampling import GREEDY, Sampling, distribution, sampling_keys
from .speculative import accept
from .weights.names import MTP
from .weights.params import Params

__all__ = ["draft_loop", "draft_step"]


def draft_step(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    width: int,
    *,
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Runs a step that drafts, verifies and samples: decodes with drafts and prompt chunks, mixed as the plan says.

    For a sequence with d drafts the MTP layer runs d times, first on the residual that the cache has of its last token
    and then on its own, to guess what follows the one token it is given. The backbone takes that token and the drafts
    in one pass, and `speculative.accept` keeps as many as it would have sampled itself, and samples the next one. Then
    the MTP layer takes the true residuals of all tokens. Everything a draft needs is in the cache: nothing but what was
    sampled passes from step to step, and a sequence may come to this step from any other that ran the MTP layer
    (`mtp_forward`, or this one).

    Args:
        params: with the MTP layer.
        cache: of a layout with `include_mtp`, and with `draft_tokens` of at least `width`.
        plan: a sequence with d > 0 drafts has 1 + d tokens in it.
        tokens: [T] int32; anything where drafts go.
        drafts: [B] int32, d of each sequence, 0 to `width`; 0: its tokens are known, such as a chunk of a prompt.
        width: static.
        sampling: how to sample, static. The drafts are sampled in the same way, from the MTP layer's logits.
        keys: [B] random keys, one per sequence; not needed when greedy.

    Returns:
        (sampled [B, width + 1] int32, kept [B] int32, the cache). The first kept[b] of sampled[b] follow the one known
        token: drafts that were accepted, and one token more, which no step has fed yet. The cache holds all tokens of
        the plan, of which the manager must keep kept[b] if the sequence had drafts (`KVCacheManager.accept`).
        What was sampled for a chunk that does not end its prompt means nothing.

    Raises:
        ShapeError: as `mtp_forward`; or the cache has no room for so many drafts.
        RequestError: not greedy, and `keys` is missing.
    """
    plan, cache = _begun(params, cache, plan, width, implementation)
    check_tokens(tokens, plan.num_tokens)
    how = _How(params, drafts, width, sampling, keys, index_qat, implementation)
    return how.step(cache, plan, tokens)


def draft_loop(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    width: int,
    num_steps: int,
    *,
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Runs `num_steps` steps of `draft_step` in one executable: each goes on where the one before ended.

    The plan has reserved the blocks (and table columns) of all steps ahead, `num_steps * (1 + d)` tokens
    (`plan_step(steps=num_steps)`). A sequence with fewer takes no part in steps for which they no longer suffice.

    Args:
        plan: of the first step, in which every sequence has 1 + d tokens.
        tokens: [B] int32, the known token of each sequence; -1: it takes no part.
        drafts: [B] int32, d of each sequence in every step, 0 to `width`.
        width, num_steps: static.
        others: as of `draft_step`.

    Returns:
        (sampled [K, B, width + 1] int32, kept [K, B] int32, of each step as of `draft_step`, but -1 and 0 where a
        sequence takes no part in it; the cache, which holds the sum of kept[:, b] tokens more than before, all but the
        last that was sampled).

    Raises as `draft_step`, and:
        ShapeError: `tokens` is not one of each sequence, or a step may have more tokens than 1 + `width` of each.
    """
    plan, cache = _begun(params, cache, plan, width, implementation)
    check_tokens(tokens, plan.num_seqs)
    if plan.num_tokens > plan.num_seqs * (1 + width):
        raise ShapeError(
            f"the plan has {plan.num_seqs} sequences and {plan.num_tokens} tokens: steps of one known token and up to "
            f"{width} drafts of each"
        )
    how = _How(params, drafts, width, sampling, keys, index_qat, implementation)
    plan, tokens = plan.only(tokens >= 0), jnp.maximum(tokens, 0)

    def step(carry: tuple[KVCache, jax.Array, jax.Array], _: None) -> tuple[tuple, tuple]:
        cache, token, start = carry
        here = moved(plan, cache.layout, start, 1 + width)
        sampled, kept, cache = how.step(cache, here, token[plan.token_seq])
        live = here.seq_slot > 0
        token = jnp.take_along_axis(sampled, (kept - np.int32(1))[:, None], 1)[:, 0]
        sampled, kept = jnp.where(live[:, None], sampled, np.int32(-1)), jnp.where(live, kept, 0)
        return (cache, token, start + kept), (sampled, kept)

    carry = cache, jnp.asarray(tokens), jnp.asarray(plan.seq_start)
    (cache, *_), (sampled, kept) = lax.scan(step, carry, length=num_steps)
    return sampled, kept, cache


@dataclasses.dataclass(frozen=True)
class _How:
    """The settings of `draft_step`, as in its arguments, and the steps that run with them."""

    params: Params
    drafts: jax.Array
    width: int
    sampling: Sampling
    keys: jax.Array | None
    index_qat: bool | None
    implementation: Choice

    def step(self, cache: KVCache, plan: StepPlan, tokens: jax.Array) -> tuple[jax.Array, jax.Array, KVCache]:
        """`draft_step` of a plan whose copies and table entries are made."""
        params, width, drafts, cfg = self.params, self.width, self.drafts, cache.layout.cfg
        known = plan.seq_first + plan.seq_count - np.int32(1) - drafts  # the last token of each that is no draft
        guesses, chances, cache = self._guesses(cache, plan, tokens[known])
        place = jnp.arange(plan.num_tokens, dtype=jnp.int32) - known[plan.token_seq]
        guessed = guesses[plan.token_seq, jnp.clip(place - 1, 0, width - 1)]
        tokens = jnp.where((place > 0) & (plan.token_slot > 0), guessed, tokens)

        residual, step = layers(params, cache.begin(plan, self.implementation), tokens, self.index_qat)
        _, step = follow(params, step, residual, tokens, whole=False)  # its keys are stored
        rows = jnp.clip(known[:, None] + jnp.arange(width + 1, dtype=jnp.int32)[None], 0, plan.num_tokens - 1)
        logits = head(params, jax.tree.map(lambda x: x[rows.reshape(-1)], residual), cfg, self.implementation)
        logits = logits.reshape(*rows.shape, -1)
        position = plan.seq_start + plan.seq_count - np.int32(1) - drafts
        sampled, kept = accept(logits, chances, guesses, drafts, self.sampling, self.keys, position)
        return sampled, kept, step.finish()

    def _guesses(self, cache: KVCache, plan: StepPlan, token: jax.Array) -> tuple[jax.Array, jax.Array | None, KVCache]:
        """Returns the drafts of each sequence [B, width], the probabilities they had when sampled [B, width, vocab],
        the cache.

        Greedy drafts have no probabilities. The rows that the layer stores for them lie beyond the sequence's tokens,
        where those of the true residuals follow.
        """
        params, guesses, chances, x = self.params, [], [], None
        for i in range(self.width):
            here = _one_each(plan, i, self.drafts)
            handle = mtp_layer(cache.begin(here, self.implementation))
            if x is None:
                x = handle.last_residual()
            residual, step = guess(params, handle, x, token)
            logits = head(params, residual, cache.layout.cfg, self.implementation, of=params[MTP][0])
            if self.sampling.temperature == 0:
                token = logits.argmax(-1).astype(jnp.int32)
            else:
                chance = distribution(logits, self.sampling)
                chances.append(chance)
                own, _, _ = sampling_keys(self.keys, here.token_position, self.sampling)
                token = jax.vmap(jax.random.categorical)(own, jnp.log(chance)).astype(jnp.int32)
            guesses.append(token)
            x, cache = flat(residual), step.finish(partial=True)
        return jnp.stack(guesses, 1), jnp.stack(chances, 1) if chances else None, cache


def _begun(
    params: Params, cache: KVCache, plan: StepPlan | PackedPlan, width: int, implementation: Choice
) -> tuple[StepPlan, KVCache]:
    """Returns the plan, and the cache with its copies and table entries made."""
    check_mtp(params, cache)
    if not 1 <= width <= cache.layout.draft_tokens:
        raise ShapeError(f"drafts of {width} tokens in a cache whose draft_tokens is {cache.layout.draft_tokens}")
    begun = cache.begin(plan, implementation)
    return begun.plan.settled(), begun.finish(partial=True)


def _one_each(plan: StepPlan, ahead: int, drafts: jax.Array) -> StepPlan:
    """The plan of one token of each sequence, so many behind its first one of this step, where drafts are wanted."""
    at = plan.seq_start + np.int32(ahead)
    slot = jnp.where(drafts > ahead, plan.seq_slot, 0)
    sequences = jnp.arange(plan.num_seqs, dtype=jnp.int32)
    nothing = jnp.zeros(0, jnp.int32)
    return plan._replace(
        seq_slot=slot,
        seq_start=at,
        seq_count=(slot > 0).astype(jnp.int32),
        seq_first=sequences,
        token_seq=sequences,
        token_slot=slot,
        token_position=jnp.where(slot > 0, at, 0),
        flush_tokens=nothing,
        group_tokens=nothing.reshape(0, 1),
        history_seqs=nothing,
    )
