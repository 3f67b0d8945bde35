"""DSpark over the cache: three stages that guess a block of tokens at once (`draft_steps.py`: steps that verify them).

The stages hear the backbone through their window rows alone, which are a function of the tokens that were fed
(`follow`). What they guess depends on these rows and on the last token (`block_logits`, `guesses`), and is stored
nowhere: docs/model.md, DSpark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..cache import KVCache
from ..config import DSV4Config
from ..ops.epilogue import Epilogue
from ..ops.no_gradient import without_gradient
from ..ops.numerics import rope_frequencies, rounded, tree_sum
from ..ops.registry import Choice
from ..plan import StepPlan
from ..step import CacheStep
from .attention import block_attention
from .forward import block, embed, joined
from .head import head
from .hyper_connections import Residual
from .numerics import activations, linear, matmul, rms_norm
from .projections import products
from .weights.names import MTP
from .weights.params import Params

__all__ = ["block_logits", "confidence", "follow", "guesses", "mean_stream"]


def mean_stream(residual: Residual) -> jax.Array:
    """The mean of the residual streams [T, hidden] float32, with the last block's output added to them."""
    return rounded(tree_sum(residual.whole, 1)[:, 0] * np.float32(1 / residual.streams.shape[1]))


def follow(params: Params, step: CacheStep[KVCache], heard: Sequence[Residual]) -> CacheStep[KVCache]:
    """Stores the stages' window rows of a step's tokens, from the residuals behind the layers that they hear."""
    cfg, dtype, stages = step.layout.cfg, activations(params), without_gradient(tuple(params[MTP]))
    of_backbone = jnp.concatenate([mean_stream(residual) for residual in heard], 1)

    def run() -> CacheStep[KVCache]:
        first, after = stages[0], step
        projected = linear(of_backbone, first["main_proj"])
        x = ops.normalise(projected, first["main_norm"], eps=cfg.rms_norm_eps, dtype=dtype)
        for i, p in enumerate(stages):
            handle = after.layer(cfg.num_layers + i)
            freq = jnp.asarray(rope_frequencies(cfg, handle.spec.attn))
            rows = products(p["attn"], "of_input", x)["wkv"]
            after = handle.keep(rows, Epilogue(p["attn"]["kv_norm"], freq, cfg.rms_norm_eps)).step
        return after

    return joined(run, step.plan.num_tokens)()


def block_logits(
    params: Params,
    cache: KVCache,
    plan: StepPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    width: int,
    implementation: Choice = None,
) -> tuple[jax.Array, Residual, jax.Array]:
    """Runs the block behind each sequence that has drafts.

    Args:
        plan: of a step in which such a sequence has one known token and its drafts; its copies are made.
        tokens: [B] int32, the known tokens.
        drafts: [B] int32, how many drafts each has.
        width: rows of a block whose logits are wanted, from the first.

    Returns:
        (logits [B, width, vocab] float32, without what pairs of tokens add; the residual behind the last stage of
        these rows, [B * width, ...]; the routed experts of all rows [B * block_size, stages, k] int16, -1 where a
        sequence has no drafts).
    """
    cfg, dtype = cache.layout.cfg, activations(params)
    spark = cfg.dspark
    assert spark is not None
    here = _blocks(plan, drafts, spark.block_size)
    ids = jnp.full((plan.num_seqs, spark.block_size), np.int32(spark.noise_token_id)).at[:, 0].set(tokens).reshape(-1)
    step, stages = cache.begin(here, implementation), without_gradient(tuple(params[MTP]))

    def run() -> tuple[Residual, list[jax.Array]]:
        residual, chosen = without_gradient(embed(params, ids, cfg)), []
        for i, p in enumerate(stages):
            layer = step.layer(cfg.num_layers + i)
            residual, _, experts = block(p, layer, residual, ids, dtype, attend=block_attention)
            chosen.append(experts)
        return residual, chosen

    residual, chosen = joined(run, here.num_tokens)()
    there = jnp.asarray(here.token_slot)[:, None, None] > 0
    experts = jnp.where(there, jnp.stack(chosen, 1), np.int32(-1)).astype(jnp.int16)
    rows = np.arange(plan.num_seqs)[:, None] * spark.block_size + np.arange(width)
    residual = jax.tree.map(lambda x: x[rows.reshape(-1)], residual)
    logits = head(params, residual, cfg, implementation, of=stages[-1])
    return logits.reshape(plan.num_seqs, width, -1), residual, experts


def guesses(
    params: Params,
    cache: KVCache,
    plan: StepPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    width: int,
    draw: Callable[[jax.Array, int, list[jax.Array]], jax.Array],
    *,
    least: float = 0.0,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array]:
    """The drafts of each sequence, and how many of them are to be verified: [B, width] and [B] int32.

    Args:
        draw: (logits [B, vocab], number of the draft, drafts before it) -> tokens [B].
        least: confidence of a draft that is verified: the first one below ends them. What is looked at is known before
            the draft itself, so the choice does not depend on it, nor does what is sampled in the end.
        others: as of `block_logits`.
    """
    cfg, last = cache.layout.cfg, params[MTP][len(params[MTP]) - 1]
    logits, residual, _ = block_logits(params, cache, plan, tokens, drafts, width, implementation)
    token, drawn, pairs = tokens, list[jax.Array](), list[jax.Array]()
    for i in range(width):
        pairs.append(last["markov"]["w1"][token].astype(jnp.float32))
        token = draw(logits[:, i] + linear(pairs[-1], last["markov"]["w2"]), i, drawn)
        drawn.append(token)
    if least > 0:
        said = confidence(last, residual, jnp.stack(pairs, 1).reshape(-1, pairs[0].shape[1]), cfg)
        sure = said.reshape(-1, width) >= np.float32(least)
        drafts = jnp.minimum(drafts, jnp.cumprod(sure.astype(jnp.int32), 1).sum(1, dtype=jnp.int32))
    return jnp.stack(drawn, 1), drafts


def confidence(p: Params, residual: Residual, pair: jax.Array, cfg: DSV4Config) -> jax.Array:
    """How sure the head is that a draft will be kept, [B] float32 in 0 to 1, if those before it are.

    Args:
        p: the last stage's parameters.
        residual: behind it, of the draft's row.
        pair: [B, rank] float32, the entry of the token before the draft in the first table of pairs.
    """
    of, streams = p["hc_head"], residual.whole
    mix = matmul("ti,oi->to", rms_norm(streams.reshape(streams.shape[0], -1), None, cfg.rms_norm_eps), of["fn"])
    gates = jax.nn.sigmoid(mix * of["scale"][None] + of["base"][None]) + np.float32(cfg.hc_eps)
    x = jnp.concatenate([matmul("tn,tnd->td", gates, streams), pair], 1)
    return jax.nn.sigmoid(matmul("ti,oi->to", x, p["confidence"])[:, 0])


def _blocks(plan: StepPlan, drafts: jax.Array, rows: int) -> StepPlan:
    """The plan of a block of so many tokens behind each sequence that has drafts."""
    slot = jnp.where(drafts > 0, plan.seq_slot, 0)
    sequences = np.arange(plan.num_seqs, dtype=np.int32)
    token_seq, live = jnp.asarray(np.repeat(sequences, rows)), slot > 0
    at = jnp.where(live[:, None], plan.seq_start[:, None] + np.arange(rows, dtype=np.int32)[None], 0).reshape(-1)
    nothing = jnp.zeros(0, jnp.int32)
    return plan._replace(
        seq_slot=slot,
        seq_count=jnp.where(live, np.int32(rows), 0),
        seq_first=jnp.asarray(sequences * np.int32(rows)),
        token_seq=token_seq,
        token_slot=slot[token_seq],
        token_position=at,
        flush_tokens=nothing,
        group_tokens=nothing.reshape(0, 1),
        history_seqs=nothing,
    )
