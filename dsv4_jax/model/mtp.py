"""The MTP layer over the cache: a guess at the token after next, and steps that make guesses and verify them.

The layer takes the residual of a token after the backbone's last layer, and the token that follows it (docs/model.md,
MTP). Here both are put at the place of the second: a step's tokens are fed to the layer under the plan that fed them to
the backbone, each with the residual of the token before, which is in the cache if that was fed by an earlier step.
Attention within the window depends on distances alone, so all places may be one higher than the paper's. What the cache
then keeps after n tokens is a function of these n, whatever comes next: a prefix can be shared, forked or chunked
anywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache
from ..errors import ShapeError
from ..ops.hyper_connection import widened
from ..ops.registry import Choice
from ..plan import PackedPlan, StepPlan
from ..step import CacheStep, LayerCacheHandle
from .forward import activations, block, head, layers
from .hyper_connections import Residual
from .names import MTP
from .numerics import linear, rms_norm
from .params import Params, has_mtp
from .sampling import GREEDY, Sampling, distribution, draw_keys
from .speculative import accept

__all__ = ["draft_step", "mtp_forward"]


def mtp_forward(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """As `forward`, and the MTP layer's logits of every scheduled token.

    (DeepSeek-V4, arXiv 2606.19348, section 2.1, which refers to DeepSeek-V3, arXiv 2412.19437, section 2.2.)

    Args:
        params: with the MTP layer (`load_hf(mtp=True)`).
        cache: of a layout with `include_mtp`.

    Returns:
        (logits, the MTP layer's logits, both [T, vocab] float32, the cache). Both rows of a token are about the token
        after it; the second knows nothing of the token itself but its embedding. That of a token at position 0, whose
        predecessor does not exist, means nothing.

    Raises:
        ShapeError: `tokens` does not match the plan; or there is no MTP layer, in the parameters or in the cache.
    """
    _check(params, cache)
    step = cache.begin(plan, implementation)
    residual, step = layers(params, step, tokens, index_qat)
    guess, step = _follow(params, step, residual, tokens)
    cfg = cache.layout.cfg
    logits = head(params, residual, cfg, implementation)
    return logits, head(params, guess, cfg, implementation, of=params[MTP][0]), step.finish()


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
    _check(params, cache)
    if not 1 <= width <= cache.layout.draft_tokens:
        raise ShapeError(f"drafts of {width} tokens in a cache whose draft_tokens is {cache.layout.draft_tokens}")
    begun = cache.begin(plan, implementation)
    plan, cache, cfg = begun.plan.settled(), begun.finish(partial=True), cache.layout.cfg
    if tokens.shape != (plan.num_tokens,):
        raise ShapeError(f"tokens has shape {tokens.shape}, the plan schedules {(plan.num_tokens,)}")

    known = plan.seq_first + plan.seq_count - np.int32(1) - drafts  # the last token of each that is no draft
    guesses, chances, cache = _drafts(params, cache, plan, tokens[known], drafts, width, sampling, keys, implementation)
    place = jnp.arange(plan.num_tokens, dtype=jnp.int32) - known[plan.token_seq]
    guessed = guesses[plan.token_seq, jnp.clip(place - 1, 0, width - 1)]
    tokens = jnp.where((place > 0) & (plan.token_slot > 0), guessed, tokens)

    residual, step = layers(params, cache.begin(plan, implementation), tokens, index_qat)
    _, step = _follow(params, step, residual, tokens)
    rows = jnp.clip(known[:, None] + jnp.arange(width + 1, dtype=jnp.int32), 0, plan.num_tokens - 1)
    logits = head(params, jax.tree.map(lambda x: x[rows.reshape(-1)], residual), cfg, implementation)
    logits = logits.reshape(*rows.shape, -1)
    position = plan.seq_start + plan.seq_count - np.int32(1) - drafts
    drawn, kept = accept(logits, chances, guesses, drafts, sampling, keys, position)
    return drawn, kept, step.finish()


def _check(params: Params, cache: KVCache) -> None:
    if not has_mtp(params):
        raise ShapeError("the parameters have no MTP layer: they were made without mtp=True")
    if not cache.layout.include_mtp:
        raise ShapeError("the cache has no MTP layer: its layout was made without include_mtp=True")


def _drafts(
    params: Params,
    cache: KVCache,
    plan: StepPlan,
    token: jax.Array,
    drafts: jax.Array,
    width: int,
    sampling: Sampling,
    keys: jax.Array | None,
    implementation: Choice,
) -> tuple[jax.Array, jax.Array | None, KVCache]:
    """The drafts of each sequence [B, width], the probabilities they were drawn with [B, width, vocab], the cache.

    Greedy drafts have no probabilities. The rows that the layer stores for them lie beyond the sequence's tokens, where
    those of the true residuals follow.
    """
    guesses, chances, x = [], [], None
    for i in range(width):
        here = _one_each(plan, i, drafts)
        handle = _layer(cache.begin(here, implementation))
        if x is None:
            x = handle.last_residual()
        residual, handle = _guess(params, handle, x, token)
        logits = head(params, residual, cache.layout.cfg, implementation, of=params[MTP][0])
        if sampling.temperature == 0:
            token = logits.argmax(-1).astype(jnp.int32)
        else:
            chance = distribution(logits, sampling)
            chances.append(chance)
            own, _, _ = draw_keys(keys, here.token_position, sampling)
            token = jax.vmap(jax.random.categorical)(own, jnp.log(chance)).astype(jnp.int32)
        guesses.append(token)
        x, cache = _streams(residual), handle.step.finish(partial=True)
    return jnp.stack(guesses, 1), jnp.stack(chances, 1) if chances else None, cache


def _one_each(plan: StepPlan, ahead: int, drafts: jax.Array) -> StepPlan:
    """The plan of one token of each sequence, so many behind its first one of this step, where drafts are wanted."""
    at = plan.seq_start + np.int32(ahead)
    slot = jnp.where(drafts > ahead, plan.seq_slot, 0)
    sequences = jnp.arange(plan.num_seqs, dtype=jnp.int32)
    nothing = jnp.zeros(0, jnp.int32)
    return plan._replace(
        seq_slot=slot, seq_start=at, seq_count=(slot > 0).astype(jnp.int32), seq_first=sequences,
        token_seq=sequences, token_slot=slot, token_position=jnp.where(slot > 0, at, 0),
        flush_tokens=nothing, group_tokens=nothing.reshape(0, 1), history_seqs=nothing,
    )  # fmt: skip


def _follow(
    params: Params, step: CacheStep[KVCache], residual: Residual, tokens: jax.Array
) -> tuple[Residual, CacheStep[KVCache]]:
    """The MTP layer on a step's tokens, after the backbone."""
    before, handle = _layer(step).carry_residual(_streams(residual))
    guess, handle = _guess(params, handle, before, tokens)
    return guess, handle.step


def _guess(
    params: Params, handle: LayerCacheHandle[KVCache], before: jax.Array, tokens: jax.Array
) -> tuple[Residual, LayerCacheHandle[KVCache]]:
    """The MTP layer: residuals of the tokens before [T, n * hidden], and tokens [T] -> the residual after it."""
    p, cfg, dtype = params[MTP][0], handle.layout.cfg, activations(params)
    streams = before.reshape(-1, cfg.hidden_size)
    embedded = rms_norm(params["embed"][tokens].astype(jnp.float32), p["enorm"], cfg.rms_norm_eps)
    told = linear(rms_norm(streams, p["hnorm"], cfg.rms_norm_eps), p["h_proj"])
    streams = told.reshape(-1, cfg.hc_mult, cfg.hidden_size) + linear(embedded, p["e_proj"])[:, None]
    return block(p, handle, Residual(streams), tokens, dtype)


def _layer(step: CacheStep[KVCache]) -> LayerCacheHandle[KVCache]:
    return step.layer(step.layout.cfg.num_layers)


def _streams(residual: Residual) -> jax.Array:
    """With the last block's output in them: [T, n * hidden]."""
    streams = residual.streams if residual.written is None else widened(residual.streams, residual.written)
    return streams.reshape(streams.shape[0], -1)
