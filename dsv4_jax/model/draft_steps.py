"""Steps that draft with the MTP layer or DSpark, verify with the backbone and sample: one, or K in one executable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache import KVCache
from ..checks import check_share
from ..errors import ShapeError
from ..ops.registry import Choice
from ..plan import PackedPlan, StepPlan
from . import dspark
from .ahead import moved
from .forward import check_masks, check_tokens, heard_layers
from .head import head
from .mtp import check_mtp, flat, follow, guess, mtp_layer
from .sampling import Sampled, counted, distribution, draw, sample
from .speculative import accept, accept_standard, check_acceptance, with_guesses
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
    sampling: jax.Array | None = None,
    masks: jax.Array | None = None,
    biases: jax.Array | None = None,
    counts: jax.Array | None = None,
    logprobs: bool = False,
    top: int = 0,
    routed_experts: bool = False,
    acceptance: str = "coupled",
    least_confidence: float = 0.0,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[Sampled, jax.Array, KVCache]:
    """Runs a step that drafts, verifies and samples: decodes with drafts and prompt chunks, mixed as the plan says.

    For a sequence with d drafts the MTP layer runs d times, first on the residual that the cache has of its last token
    and then on its own, to guess what follows the one token it is given; or DSpark's stages run once on a block. The
    backbone takes that token and the drafts in one pass, and `speculative.accept` keeps as many as it samples there
    itself, and the one it samples next. So what is sampled is what is sampled without drafts, greedy or not, up to
    float32 rounding (`acceptance` has another way). Then the layers that draft take the true residuals of all tokens.
    Everything a draft needs is in the cache: nothing but what was sampled passes from step to step, and a sequence may
    come to this step from any other that ran these layers (`mtp_forward`, or this one).

    Args:
        params: with the layers that draft.
        cache: of a layout with `include_drafts`, and with `draft_tokens` of at least `width`.
        plan: a sequence with d > 0 drafts has 1 + d tokens in it.
        tokens: [T] int32; anything where drafts go.
        drafts: [B] int32, d of each sequence, 0 to `width`; 0: its tokens are known, such as a chunk of a prompt.
        width: static; with DSpark at most `block_size`, and a block has all of its rows whatever it is.
        masks: [B, width + 1, ceil(vocab / 32)] uint32: of what follows the known token and each draft. What stands
            behind a draft that the mask before it does not allow is never read.
        sampling, biases, counts, logprobs, top, routed_experts: as of `sample_step`.
        acceptance: static. "coupled": what is sampled is what is sampled without drafts, token for token. "standard":
            it has the distribution of that (`speculative`); more drafts are kept, the more the higher the temperature.
        least_confidence: static, 0 to 1; of DSpark. The first draft of which its head is less sure, and those behind
            it, are not kept, right or wrong. That changes what a step keeps and not what is sampled (by the standard
            rule not its distribution).

    Returns:
        (`Sampled`: tokens [B, width + 1] int32, further fields like it, but experts [T, layers, k]; kept [B] int32; the
        cache). The first kept[b] of tokens[b] follow the one known token: drafts that were right, and one token more,
        which no step has fed yet; what stands behind them means nothing. The cache holds all tokens of the plan, of
        which the manager must keep kept[b] if the sequence had drafts (`KVCacheManager.accept`). What was sampled for a
        chunk that does not end its prompt means nothing.

    Raises as `sample_step`, and:
        ShapeError: the parameters or the cache have no layers that draft; the cache has no room for so many drafts, or
            a block of DSpark not so many rows; `acceptance` is neither; `least_confidence` is not from 0 to 1, or above
            0 without DSpark.
    """
    plan, cache = _begun(params, cache, plan, width, acceptance, least_confidence, implementation)
    check_tokens(tokens, plan.num_tokens)
    standard = acceptance == "standard" and sampling is not None  # of likeliest tokens both keep the same
    asked, chosen = dict(logprobs=logprobs, top=top), (standard, least_confidence)
    how = _How(
        params, drafts, width, sampling, masks, biases, asked, routed_experts, index_qat, implementation, *chosen
    )
    return how.step(cache, plan, tokens, counts)


def draft_loop(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    width: int,
    num_steps: int,
    *,
    sampling: jax.Array | None = None,
    masks: jax.Array | None = None,
    biases: jax.Array | None = None,
    counts: jax.Array | None = None,
    logprobs: bool = False,
    top: int = 0,
    routed_experts: bool = False,
    acceptance: str = "coupled",
    least_confidence: float = 0.0,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[Sampled, jax.Array, KVCache]:
    """Runs `num_steps` steps of `draft_step` in one executable: each goes on where the one before ended.

    The plan has reserved the blocks (and table columns) of all steps ahead, `num_steps * (1 + d)` tokens
    (`plan_step(steps=num_steps)`). A sequence with fewer takes no part in steps for which they no longer suffice.

    Args:
        plan: of the first step, in which every sequence has 1 + d tokens.
        tokens: [B] int32, the known token of each sequence; -1: it takes no part.
        drafts: [B] int32, d of each sequence in every step, 0 to `width`.
        width, num_steps: static.
        others: as of `draft_step`; masks of a single step only.

    Returns:
        (`Sampled` with [K, ...] of each step as of `draft_step`, counts of after the last; kept [K, B]; the cache).
        Where a sequence takes no part in a step its tokens are -1 and kept is 0. The cache holds the sum of kept[:, b]
        tokens more than before, all but the last that was sampled.

    Raises as `draft_step`, and:
        ShapeError: `tokens` is not one of each sequence, or a step may have more tokens than 1 + `width` of each.
        RequestError: masks for more than one step.
    """
    check_masks(masks, num_steps)
    plan, cache = _begun(params, cache, plan, width, acceptance, least_confidence, implementation)
    check_tokens(tokens, plan.num_seqs)
    if plan.num_tokens > plan.num_seqs * (1 + width):
        raise ShapeError(
            f"the plan has {plan.num_seqs} sequences and {plan.num_tokens} tokens: steps of one known token and up to "
            f"{width} drafts of each"
        )
    standard = acceptance == "standard" and sampling is not None  # of likeliest tokens both keep the same
    asked, chosen = dict(logprobs=logprobs, top=top), (standard, least_confidence)
    how = _How(
        params, drafts, width, sampling, masks, biases, asked, routed_experts, index_qat, implementation, *chosen
    )
    plan, tokens = plan.only(tokens >= 0), jnp.maximum(tokens, 0)

    def step(carry: tuple, _: None) -> tuple[tuple, tuple[Sampled, jax.Array]]:
        cache, token, start, counts = carry
        here = moved(plan, cache.layout, start, 1 + width)
        drawn, kept, cache = how.step(cache, here, token[plan.token_seq], counts)
        live = here.seq_slot > 0
        token = jnp.take_along_axis(drawn.tokens, (kept - np.int32(1))[:, None], 1)[:, 0]
        shown, kept = jnp.where(live[:, None], drawn.tokens, np.int32(-1)), jnp.where(live, kept, 0)
        return (cache, token, start + kept, drawn.counts), (drawn._replace(tokens=shown, counts=None), kept)

    carry = cache, jnp.asarray(tokens), jnp.asarray(plan.seq_start), counts
    (cache, _, _, counts), (drawn, kept) = lax.scan(step, carry, length=num_steps)
    return drawn._replace(counts=counts), kept, cache


@dataclasses.dataclass(frozen=True)
class _How:
    """The settings of `draft_step`, as in its arguments, and the steps that run with them."""

    params: Params
    drafts: jax.Array
    width: int
    sampling: jax.Array | None
    masks: jax.Array | None
    biases: jax.Array | None
    asked: Mapping[str, Any]
    routed_experts: bool
    index_qat: bool | None
    implementation: Choice
    standard: bool
    least_confidence: float

    def step(
        self, cache: KVCache, plan: StepPlan, tokens: jax.Array, counts: jax.Array | None
    ) -> tuple[Sampled, jax.Array, KVCache]:
        """`draft_step` of a plan whose copies and table entries are made."""
        params, width, drafts, cfg = self.params, self.width, self.drafts, cache.layout.cfg
        known = plan.seq_first + plan.seq_count - np.int32(1) - drafts  # the last token of each that is no draft
        here = None if counts is None else counts[plan.seq_slot]
        shares = list[jax.Array]()  # of the standard rule: what each draft was drawn from
        if cfg.dspark is None:
            guesses, cache = self._guesses(cache, plan, tokens[known], here, shares)
            verified = drafts
        else:
            guesses, verified = self._block(cache, plan, tokens[known], here, shares)
        place = jnp.arange(plan.num_tokens, dtype=jnp.int32) - known[plan.token_seq]
        guessed = guesses[plan.token_seq, jnp.clip(place - 1, 0, width - 1)]
        tokens = jnp.where((place > 0) & (plan.token_slot > 0), guessed, tokens)

        begun = cache.begin(plan, self.implementation)
        heard = () if cfg.dspark is None else cfg.dspark.target_layer_ids
        residual, step, experts, behind = heard_layers(
            params, begun, tokens, self.index_qat, self.routed_experts, heard
        )
        if heard:
            step = dspark.follow(params, step, behind)
        else:
            _, step = follow(params, step, residual, tokens, whole=False)  # its keys are stored
        rows = jnp.clip(known[:, None] + jnp.arange(width + 1, dtype=jnp.int32)[None], 0, plan.num_tokens - 1)
        logits = head(params, jax.tree.map(lambda x: x[rows.reshape(-1)], residual), cfg, self.implementation)
        logits = logits.reshape(*rows.shape, -1)
        position = plan.seq_start + plan.seq_count - np.int32(1) - drafts
        given: dict[str, Any] = dict(masks=self.masks, biases=self.biases, counts=here, **self.asked)
        if self.standard:
            assert self.sampling is not None
            drawn, kept = accept_standard(
                logits, guesses, jnp.stack(shares, 1), verified, self.sampling, position, **given
            )
        else:
            given |= dict(implementation=self.implementation)
            drawn, kept = accept(logits, guesses, verified, self.sampling, position, **given)
        if counts is not None:
            counts = counted(counts, plan.seq_slot, self.sampling, drawn.tokens, kept)
        return drawn._replace(experts=experts, counts=counts), kept, step.finish()

    def _block(
        self,
        cache: KVCache,
        plan: StepPlan,
        token: jax.Array,
        counts: jax.Array | None,
        shares: list[jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the drafts of each sequence by DSpark [B, width], drawn as `_guesses` does, and how many count."""
        drafts = self.drafts

        def drawn(logits: jax.Array, i: int, before: list[jax.Array]) -> jax.Array:
            at = jnp.where((drafts > i) & (plan.seq_slot > 0), plan.seq_start + np.int32(i), 0)
            return self._drawn(logits, i, at, before, counts, shares)

        how = dict(least=self.least_confidence, implementation=self.implementation)
        return dspark.guesses(self.params, cache, plan, token, drafts, self.width, drawn, **how)

    def _guesses(
        self,
        cache: KVCache,
        plan: StepPlan,
        token: jax.Array,
        counts: jax.Array | None,
        shares: list[jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        """Returns the drafts of each sequence [B, width] and the cache.

        The rows that the layer stores for them lie beyond the sequence's tokens, where those of the true residuals
        follow.
        """
        params, guesses, x = self.params, list[jax.Array](), None
        for i in range(self.width):
            here = _one_each(plan, i, self.drafts)
            handle = mtp_layer(cache.begin(here, self.implementation))
            if x is None:
                x = handle.last_residual()
            residual, step = guess(params, handle, x, token)
            logits = head(params, residual, cache.layout.cfg, self.implementation, of=params[MTP][0])
            token = self._drawn(logits, i, here.token_position, guesses, counts, shares)
            guesses.append(token)
            x, cache = flat(residual), step.finish(partial=True)
        return jnp.stack(guesses, 1), cache

    def _drawn(
        self,
        logits: jax.Array,
        i: int,
        position: jax.Array,
        before: list[jax.Array],
        counts: jax.Array | None,
        shares: list[jax.Array],
    ) -> jax.Array:
        """Draws draft i with the noise of its place, as the target will; adds to `shares` what they are asked for."""
        masks = None if self.masks is None else self.masks[:, i]
        seen = with_guesses(counts, jnp.stack(before, 1)) if before and counts is not None else counts
        given = dict(masks=masks, biases=self.biases, counts=seen)
        if not self.standard:
            return sample(logits, self.sampling, position, **given, implementation=self.implementation).tokens
        assert self.sampling is not None
        shares.append(distribution(logits, self.sampling, **given))
        return draw(shares[-1], self.sampling, position)


def _begun(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    width: int,
    acceptance: str,
    least_confidence: float,
    implementation: Choice,
) -> tuple[StepPlan, KVCache]:
    """Returns the plan, and the cache with its copies and table entries made."""
    check_mtp(params, cache)
    spark = cache.layout.cfg.dspark
    if not 1 <= width <= cache.layout.draft_tokens:
        raise ShapeError(f"drafts of {width} tokens in a cache whose draft_tokens is {cache.layout.draft_tokens}")
    if spark is not None and width > spark.block_size:
        raise ShapeError(f"drafts of {width} tokens by a head whose blocks have {spark.block_size} rows")
    check_acceptance(acceptance, ShapeError)
    check_share("least_confidence", least_confidence, error=ShapeError)
    if least_confidence and spark is None:
        raise ShapeError("least_confidence is of drafts by DSpark: an MTP layer says nothing of its own")
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
