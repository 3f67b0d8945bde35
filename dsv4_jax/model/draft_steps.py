"""Steps that draft with the MTP layer, verify with the backbone and draw: one, or K in one executable."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache import KVCache
from ..errors import ShapeError
from ..ops.registry import Choice
from ..plan import PackedPlan, StepPlan
from .ahead import moved
from .forward import head, layers
from .hyper_connections import Residual
from .mtp import check_mtp, flat, follow, guess, mtp_layer
from .names import MTP
from .params import Params
from .sampling import GREEDY, Sampling, distribution, draw_keys
from .speculative import accept

__all__ = ["draft_loop", "draft_step"]


class _Guess(NamedTuple):
    """A draft of each sequence: [B] tokens, the probabilities they were drawn with [B, vocab] (greedy ones have none),
    and the MTP layer's residuals that they were read from [B, n * hidden]."""

    token: jax.Array
    chance: jax.Array | None
    streams: jax.Array


@dataclasses.dataclass(frozen=True)
class _Drafts:
    """How a call drafts; as in the arguments of `draft_step`. `drafts`: [B]."""

    params: Params
    drafts: jax.Array
    width: int
    sampling: Sampling
    keys: jax.Array | None
    index_qat: bool | None
    implementation: Choice

    def first(self, cache: KVCache, plan: StepPlan, token: jax.Array) -> tuple[_Guess, KVCache]:
        """What follows the one token of each sequence that a step is given, by what the cache has of the one before."""
        handle = mtp_layer(cache.begin(_one_each(plan, 0, self.drafts), self.implementation))
        residual, handle = guess(self.params, handle, handle.last_residual(), token)
        return self.read(residual, plan.seq_start, cache), handle.step.finish(partial=True)

    def all(self, cache: KVCache, plan: StepPlan, first: _Guess) -> tuple[jax.Array, jax.Array | None, KVCache]:
        """The drafts of each sequence [B, width], the probabilities they were drawn with [B, width, vocab], the cache.

        The rows that the layer stores for them lie beyond the sequence's tokens, where those of the true residuals
        follow.
        """
        made = [first]
        for i in range(1, self.width):
            here = _one_each(plan, i, self.drafts)
            handle = mtp_layer(cache.begin(here, self.implementation))
            residual, handle = guess(self.params, handle, made[-1].streams, made[-1].token)
            made.append(self.read(residual, plan.seq_start + np.int32(i), cache))
            cache = handle.step.finish(partial=True)
        chances = [one.chance for one in made if one.chance is not None]
        return jnp.stack([one.token for one in made], 1), jnp.stack(chances, 1) if chances else None, cache

    def read(self, residual: Residual, position: jax.Array, cache: KVCache) -> _Guess:
        """The drafts that the MTP layer's residuals of tokens at these places say."""
        cfg = cache.layout.cfg
        logits = head(self.params, residual, cfg, self.implementation, of=self.params[MTP][0])
        if self.sampling.temperature == 0:
            return _Guess(logits.argmax(-1).astype(jnp.int32), None, flat(residual))
        chance = distribution(logits, self.sampling)
        own, _, _ = draw_keys(self.keys, position, self.sampling)
        token = jax.vmap(jax.random.categorical)(own, jnp.log(chance)).astype(jnp.int32)
        return _Guess(token, chance, flat(residual))

    def verified(
        self, residual: Residual, plan: StepPlan, guesses: jax.Array, chances: jax.Array | None, cache: KVCache
    ) -> tuple[jax.Array, jax.Array]:
        """What `accept` keeps and draws, by the backbone's residuals of a step's tokens."""
        known = _known(plan, self.drafts)
        rows = jnp.clip(known[:, None] + jnp.arange(self.width + 1, dtype=jnp.int32), 0, plan.num_tokens - 1)
        logits = head(
            self.params, jax.tree.map(lambda x: x[rows.reshape(-1)], residual), cache.layout.cfg, self.implementation
        )
        position = plan.seq_start + plan.seq_count - np.int32(1) - self.drafts
        return accept(
            logits.reshape(*rows.shape, -1), chances, guesses, self.drafts, self.sampling, self.keys, position
        )


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
    """One step that drafts, verifies and draws: decodes with drafts and prompt chunks, mixed as the plan says.

    For a sequence with d drafts the MTP layer runs d times, first on the residual that the cache has of its last token
    and then on its own, to guess what follows the one token it is given. The backbone takes that token and the drafts
    in one pass, and `speculative.accept` keeps as many as it would have drawn itself, and draws the next one. At last
    the MTP layer takes the true residuals of all tokens. Everything a draft needs is in the cache: nothing but what was
    drawn passes from step to step, and a sequence may come to this step from any other that ran the MTP layer
    (`mtp_forward`, or this one).

    Args:
        params: with the MTP layer.
        cache: of a layout with `include_mtp`, and with `draft_tokens` of at least `width`.
        plan: a sequence with d > 0 drafts has 1 + d tokens in it.
        tokens: [T] int32; anything where drafts go.
        drafts: [B] int32, d of each sequence, 0 to `width`; 0: its tokens are known, such as a chunk of a prompt.
        width: static.
        sampling: how to draw, static. The drafts are drawn in the same way, from the MTP layer's logits.
        keys: [B] random keys, one per sequence; not needed when greedy.

    Returns:
        (drawn [B, width + 1] int32, kept [B] int32, the cache). The first kept[b] of drawn[b] follow the one known
        token: drafts that were accepted, and one token more, which no step has fed yet. The cache holds all tokens of
        the plan, of which the manager must keep kept[b] if the sequence had drafts (`KVCacheManager.accept`).
        What was drawn for a chunk that does not end its prompt means nothing.

    Raises:
        ShapeError: as `mtp_forward`; or the cache has no room for so many drafts.
        SamplingError: not greedy, and `keys` is missing.
    """
    plan, cache = _begun(params, cache, plan, width, implementation)
    if tokens.shape != (plan.num_tokens,):
        raise ShapeError(f"tokens has shape {tokens.shape}, the plan schedules {(plan.num_tokens,)}")
    how = _Drafts(params, drafts, width, sampling, keys, index_qat, implementation)
    known = _known(plan, drafts)
    first, cache = how.first(cache, plan, tokens[known])
    guesses, chances, cache = how.all(cache, plan, first)
    place = jnp.arange(plan.num_tokens, dtype=jnp.int32) - known[plan.token_seq]
    guessed = guesses[plan.token_seq, jnp.clip(place - 1, 0, width - 1)]
    tokens = jnp.where((place > 0) & (plan.token_slot > 0), guessed, tokens)
    residual, step = layers(params, cache.begin(plan, implementation), tokens, index_qat)
    _, step = follow(params, step, residual, tokens)
    drawn, kept = how.verified(residual, plan, guesses, chances, cache)
    return drawn, kept, step.finish()


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
    """`num_steps` steps of `draft_step` in one executable: each goes on where the one before ended.

    They draw what single steps draw, with one pass of the MTP layer less each: it takes the tokens that a step kept and
    the one drawn after them together, and has guessed what follows. (What it stores for that one lies beyond the
    sequence's tokens until the backbone takes it.)

    The plan must have reserved the blocks (and table columns) of all steps ahead, `num_steps * (1 + d)` tokens.

    Args:
        plan: of the first step, in which every sequence has 1 + d tokens.
        tokens: [B] int32, the known token of each sequence.
        drafts: [B] int32, d of each sequence in every step, 0 to `width`.
        width, num_steps: static.
        others: as of `draft_step`.

    Returns:
        (drawn [K, B, width + 1] int32, kept [K, B] int32, of each step as of `draft_step`; the cache, which holds
        the sum of kept[:, b] tokens more than before, all but the last that was drawn).

    Raises as `draft_step`, and:
        ShapeError: `tokens` is not one of each sequence, or a step may have more tokens than 1 + `width` of each.
    """
    plan, cache = _begun(params, cache, plan, width, implementation)
    if tokens.shape != (plan.num_seqs,) or plan.num_tokens > plan.num_seqs * (1 + width):
        raise ShapeError(
            f"tokens has shape {tokens.shape}, the plan {plan.num_seqs} sequences and {plan.num_tokens} tokens: "
            f"steps of one known token and up to {width} drafts of each"
        )
    how = _Drafts(params, drafts, width, sampling, keys, index_qat, implementation)
    of, place = plan.token_seq, jnp.arange(plan.num_tokens, dtype=jnp.int32) - plan.seq_first[plan.token_seq]
    place = jnp.clip(place, 0, width)  # of padding, too
    live = jnp.asarray(plan.seq_slot) > 0

    def step(carry: tuple[KVCache, jax.Array, jax.Array, _Guess], _: None) -> tuple[tuple, tuple]:
        cache, token, start, first = carry
        here = moved(plan, cache.layout, start, 1 + width)
        guesses, chances, cache = how.all(cache, here, first)
        fed = jnp.concatenate([token[:, None], guesses], 1)[of, place]
        residual, begun = layers(params, cache.begin(here, implementation), fed, index_qat)
        handle = mtp_layer(begun)
        _, handle = handle.carry_residual(flat(residual))
        drawn, kept = how.verified(residual, here, guesses, chances, cache)
        kept = jnp.where(live, kept, 0)
        cache = handle.step.finish()

        there = _kept_and_next(here, kept, place)
        after, handle = guess(params, mtp_layer(cache.begin(there, implementation)), flat(residual), drawn[of, place])
        last = jnp.clip(here.seq_first + kept - np.int32(1), 0, here.num_tokens - 1)
        start = start + kept
        first = how.read(jax.tree.map(lambda x: x[last], after), start, cache)
        cache = handle.step.finish(partial=True)
        token = jnp.take_along_axis(drawn, jnp.maximum(kept - np.int32(1), 0)[:, None], 1)[:, 0]
        return (cache, token, start, first), (drawn, kept)

    first, cache = how.first(cache, plan, tokens)
    carry = cache, jnp.asarray(tokens), jnp.asarray(plan.seq_start), first
    (cache, *_), (drawn, kept) = lax.scan(step, carry, length=num_steps)
    return drawn, kept, cache


def _begun(
    params: Params, cache: KVCache, plan: StepPlan | PackedPlan, width: int, implementation: Choice
) -> tuple[StepPlan, KVCache]:
    """The plan, and the cache with its copies and table entries made."""
    check_mtp(params, cache)
    if not 1 <= width <= cache.layout.draft_tokens:
        raise ShapeError(f"drafts of {width} tokens in a cache whose draft_tokens is {cache.layout.draft_tokens}")
    begun = cache.begin(plan, implementation)
    return begun.plan.settled(), begun.finish(partial=True)


def _known(plan: StepPlan, drafts: jax.Array) -> jax.Array:
    """The last token of each sequence that is no draft, [B]."""
    return plan.seq_first + plan.seq_count - np.int32(1) - drafts


def _one_each(plan: StepPlan, ahead: int, drafts: jax.Array) -> StepPlan:
    """The plan of one token of each sequence, so many behind its first one of this step, where drafts are wanted."""
    at = plan.seq_start + np.int32(ahead)
    slot = jnp.where(drafts > ahead, plan.seq_slot, 0)
    sequences = jnp.arange(plan.num_seqs, dtype=jnp.int32)
    return _of_window(plan)._replace(
        seq_slot=slot, seq_start=at, seq_count=(slot > 0).astype(jnp.int32), seq_first=sequences,
        token_seq=sequences, token_slot=slot, token_position=jnp.where(slot > 0, at, 0),
    )  # fmt: skip


def _kept_and_next(plan: StepPlan, kept: jax.Array, place: jax.Array) -> StepPlan:
    """The plan of the drafts that each sequence kept of a step, and the token drawn after them: kept[b] in all."""
    slot = jnp.where(place < kept[plan.token_seq], plan.token_slot, 0)
    return _of_window(plan)._replace(
        seq_start=plan.seq_start + np.int32(1), seq_count=kept, token_slot=slot,
        token_position=jnp.where(slot > 0, plan.token_position + np.int32(1), 0),
    )  # fmt: skip


def _of_window(plan: StepPlan) -> StepPlan:
    """For the MTP layer alone, which has no compressors; of no more tokens than a ring takes."""
    nothing = jnp.zeros(0, jnp.int32)
    return plan._replace(flush_tokens=nothing, group_tokens=nothing.reshape(0, 1), history_seqs=nothing)
