"""The model over the cache: one step for all sequences, and K decode steps in one executable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache import KVCache
from ..config import DSV4Config
from ..errors import ShapeError
from ..ops.registry import Choice
from ..plan import PackedPlan, StepPlan
from ..step import CacheStep
from .attention import attention
from .hyper_connections import collapse, hyper_head, widen
from .moe import moe
from .numerics import linear, rms_norm
from .params import Params
from .sampling import GREEDY, Sampling, sample

__all__ = ["GPU_DECODE_OPTIONS", "decode_loop", "decode_step", "embed", "feed_forward", "forward", "head", "prefill"]

# What to give `jax.jit(step, compiler_options=...)` for decode steps on a GPU: kernels that do not wait for each other
# run side by side, and cuBLAS multiplies. Measured in benchmarks/RESULTS.md; elsewhere they have no effect.
GPU_DECODE_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT", "xla_gpu_enable_triton_gemm": False}


def forward(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, KVCache]:
    """One step: logits of every scheduled token.

    Args:
        params: as `load_hf` or `init_params` give them.
        cache: donate it: `jax.jit(forward, donate_argnames="cache")` updates it in place.
        plan: the step; packed, it crosses the jit boundary as one array.
        tokens: [T] int32 token ids in the plan's order; padding holds any valid id.
        index_qat: see `attention`.
        implementation: of the cache ops, see `dsv4_jax.ops`.

    Returns:
        (logits [T, vocab] float32, the cache after the step). Logits of padding tokens mean nothing.

    Raises:
        ShapeError: `tokens` does not match the plan.
    """
    hidden, cache = _layers(params, cache.begin(plan, implementation), tokens, index_qat)
    return head(params, hidden, cache.layout.cfg), cache


def prefill(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, KVCache]:
    """As `forward`, but the logits of each sequence's last token only, [B, vocab]: its next is drawn from them."""
    step = cache.begin(plan, implementation)
    plan = step.plan
    hidden, cache = _layers(params, step, tokens, index_qat)
    last = jnp.maximum(jnp.asarray(plan.seq_first) + plan.seq_count - np.int32(1), 0)
    return head(params, hidden[last], cache.layout.cfg), cache


def decode_step(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, KVCache]:
    """As `forward` for a step of one token per sequence: logits [B, vocab].

    Raises:
        ShapeError: the plan schedules more tokens than it has sequences.
    """
    plan = _one_token_each(plan)
    return forward(params, cache, plan, tokens, index_qat=index_qat, implementation=implementation)


def decode_loop(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    num_steps: int,
    *,
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, KVCache]:
    """`num_steps` decode steps in one executable; each step's token is fed to the next.

    The plan must have reserved the blocks (and table columns) of all steps ahead.

    Args:
        plan: the first decode step; the later ones are its `advance()`.
        tokens: [B] int32, fed by the first step.
        num_steps: K, static.
        sampling: how to draw, static.
        keys: [B] random keys, one per sequence; not needed when greedy (see `sample`).

    Returns:
        (tokens [K, B] int32 drawn by each step, the cache, which holds all but the last of them).

    Raises:
        ShapeError: the plan schedules more tokens than it has sequences.
    """
    plan = _one_token_each(plan)
    cache, plan = cache.begin(plan).finish(partial=True), plan.settled()  # once for all steps
    carried = ("seq_start", "token_position")

    def step(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
        cache, tokens, moved = carry
        here = plan._replace(**moved)
        hidden, cache = _layers(params, cache.begin(here, implementation), tokens, index_qat)
        logits = head(params, hidden, cache.layout.cfg)
        tokens = sample(logits, sampling, keys, jnp.asarray(here.token_position))
        after = here.advance()
        return (cache, tokens, {name: getattr(after, name) for name in carried}), tokens

    moved = {name: jnp.asarray(getattr(plan, name)) for name in carried}
    (cache, _, _), drawn = lax.scan(step, (cache, jnp.asarray(tokens), moved), length=num_steps)
    return drawn, cache


def _layers(
    params: Params, step: CacheStep[KVCache], tokens: jax.Array, index_qat: bool | None
) -> tuple[jax.Array, KVCache]:
    """All layers of a step: (streams [T, n, hidden], cache)."""
    cfg, scheduled = step.layout.cfg, (step.plan.num_tokens,)
    if tokens.shape != scheduled:
        raise ShapeError(f"tokens has shape {tokens.shape}, the plan schedules {scheduled}")
    streams = embed(params, tokens, cfg)
    for i, p in enumerate(params["layers"]):
        x, post, comb = collapse(p["hc_attn"], streams, cfg)
        x = rms_norm(x, p["attn_norm"], cfg.rms_norm_eps)
        y, handle = attention(p["attn"], step.layer(i), x, index_qat=index_qat)
        step, streams = handle.step, widen(y, streams, post, comb)
        streams = feed_forward(p, streams, tokens, cfg)
    return streams, step.finish()


def _one_token_each(plan: StepPlan | PackedPlan) -> StepPlan:
    plan = plan.unpack()
    if plan.num_tokens != plan.num_seqs:
        raise ShapeError(
            f"a decode step has one token per sequence, the plan has {plan.num_tokens} for {plan.num_seqs}"
        )
    return plan


def embed(params: Params, tokens: jax.Array, cfg: DSV4Config) -> jax.Array:
    """[T] -> [T, n, hidden]: every stream starts as the token's embedding."""
    x = params["embed"][tokens].astype(jnp.float32)
    return jnp.broadcast_to(x[:, None], (x.shape[0], cfg.hc_mult, x.shape[1]))


def feed_forward(p: Params, streams: jax.Array, tokens: jax.Array, cfg: DSV4Config) -> jax.Array:
    """The second half of a layer, over its streams."""
    x, post, comb = collapse(p["hc_ffn"], streams, cfg)
    return widen(moe(p["ffn"], rms_norm(x, p["ffn_norm"], cfg.rms_norm_eps), tokens, cfg), streams, post, comb)


def head(params: Params, streams: jax.Array, cfg: DSV4Config) -> jax.Array:
    """Streams -> logits [T, vocab]."""
    x = rms_norm(hyper_head(params["hc_head"], streams, cfg), params["norm"], cfg.rms_norm_eps)
    return linear(x, params["embed"] if cfg.tie_word_embeddings else params["head"])
