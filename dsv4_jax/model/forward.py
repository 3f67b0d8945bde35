"""The model over the cache: one step for all sequences, and K decode steps in one executable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops
from ..cache import KVCache
from ..checks import check_integer, shown
from ..config import DSV4Config
from ..errors import RequestError, ShapeError
from ..ops.no_gradient import without_gradient
from ..ops.registry import Choice
from ..plan import PackedPlan, StepPlan
from ..step import CacheStep, LayerCacheHandle
from .attention import attention
from .head import head
from .hyper_connections import Residual, behind, read
from .moe import moe
from .numerics import activations
from .released import is_released, stream_dtype
from .sampling import Sampled, log_probabilities, sample_rows
from .weights.params import Params
from .weights.split import TENSOR, Split, split_of

__all__ = [
    "GPU_DECODE_OPTIONS",
    "block",
    "check_masks",
    "check_tokens",
    "decode_loop",
    "decode_step",
    "embed",
    "forward",
    "heard_layers",
    "joined",
    "layers",
    "prefill",
    "sample_step",
    "score_step",
]

T = TypeVar("T")
# Rows up to which a step's kernels are joined: results of a call take memory until its end. And up to which they may
# start before those before them have ended: with more they leave no gap worth closing.
MAX_JOINED, MAX_EARLY = 256, 16
# What to give `jax.jit(step, compiler_options=...)` for decode steps on a GPU: kernels that do not wait for each other
# run side by side, and cuBLAS multiplies. Measured in docs/kernels.md; elsewhere they have no effect.
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
    """Runs a step and returns the logits of every scheduled token.

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
    residual, step, _ = layers(params, cache.begin(plan, implementation), tokens, index_qat)
    return head(params, residual, cache.layout.cfg, implementation), step.finish()


def prefill(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, KVCache]:
    """Runs a step as `forward` does; gives the logits of each sequence's last token only, [B, vocab]."""
    step = cache.begin(plan, implementation)
    residual, step, _ = layers(params, step, tokens, index_qat, rows=_last(step.plan))
    return head(params, residual, cache.layout.cfg, implementation), step.finish()


def sample_step(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    sampling: jax.Array | None = None,
    masks: jax.Array | None = None,
    biases: jax.Array | None = None,
    counts: jax.Array | None = None,
    logprobs: bool = False,
    top: int = 0,
    routed_experts: bool = False,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[Sampled, KVCache]:
    """Runs a step as `prefill` does, and samples what follows each sequence's last token.

    Args:
        sampling: [B, 10] uint32 of `SamplingRows.of`, a row of each sequence; None: all take the likeliest token, in an
            executable that can do nothing else.
        masks: [B, ceil(vocab / 32)] uint32, see `sample`.
        biases: [B, 2, n] int32 of `bias_rows`, see `sample`.
        counts: [slots, vocab] int32, of penalties: donate them. Rows (`token_counts`) stand where the sequences' slots
            are; what is sampled is added to `Sampled.counts`, unless nobody reads it (`SamplingRows.of`).
        logprobs, top, routed_experts: static; which fields of `Sampled` are wanted.

    Returns:
        (`Sampled` with tokens [B] and experts [T, layers, k], the cache). What is sampled for a sequence whose prompt
        goes on means nothing.

    Raises as `prefill` and `sample`.
    """
    step = cache.begin(plan, implementation)
    plan = step.plan
    residual, step, experts = layers(params, step, tokens, index_qat, routed_experts, rows=_last(plan))
    logits = head(params, residual, cache.layout.cfg, implementation)
    position = jnp.maximum(plan.seq_start + plan.seq_count - np.int32(1), 0)
    asked: dict[str, Any] = dict(masks=masks, biases=biases, logprobs=logprobs, top=top, implementation=implementation)
    drawn = sample_rows(logits, plan.seq_slot, position, sampling, counts, **asked)
    return drawn._replace(experts=experts), step.finish()


def score_step(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    targets: jax.Array,
    *,
    rows: int = 256,
    top: int = 0,
    routed_experts: bool = False,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[Sampled, KVCache]:
    """Runs a step as `forward` does, and says how likely it thinks the tokens that follow: a chunk of a known text.

    The log-probabilities are those of `sample`: of the same logits the same bits. Logits are computed for `rows` tokens
    at a time and not kept.

    Args:
        targets: [T] int32, the token after each; -1: none is known, or wanted.
        rows: static. With as many as a decode step has sequences, the head's products are those of its shape.
        top, routed_experts: as of `sample_step`.

    Returns:
        (`Sampled` with the targets as tokens [T], logprobs [T], 0 where there is no target, top_ids and top_logprobs
        [T, N] and experts [T, layers, k] if asked for; the cache). Those of padding mean nothing.

    Raises as `forward`, and:
        ShapeError: `targets` are not [T] integers, or `rows` is below 1.
    """
    check_integer("rows", rows, 1, error=ShapeError)
    step = cache.begin(plan, implementation)
    check_tokens(targets, step.plan.num_tokens, "targets")
    residual, step, experts = layers(params, step, tokens, index_qat, routed_experts)
    count, targets, cfg = step.plan.num_tokens, jnp.asarray(targets), cache.layout.cfg

    def of_rows(row: jax.Array) -> Sampled:
        logits = head(params, jax.tree.map(lambda x: x[row], residual), cfg, implementation)
        return log_probabilities(logits, targets[row], top=top)

    blocks, rows = -(-count // rows), min(rows, count)
    row = jnp.minimum(jnp.arange(blocks * rows, dtype=jnp.int32), np.int32(count - 1))
    scored = lax.map(of_rows, row.reshape(blocks, rows))
    scored = jax.tree.map(lambda x: x.reshape(blocks * rows, *x.shape[2:])[:count], scored)
    return scored._replace(experts=experts), step.finish()


def _last(plan: StepPlan) -> jax.Array:
    """Where each sequence's last token is."""
    return jnp.maximum(jnp.asarray(plan.seq_first) + plan.seq_count - np.int32(1), 0)


def decode_step(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, KVCache]:
    """Runs a step of one token per sequence as `forward` does: logits [B, vocab].

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
    sampling: jax.Array | None = None,
    masks: jax.Array | None = None,
    biases: jax.Array | None = None,
    counts: jax.Array | None = None,
    logprobs: bool = False,
    top: int = 0,
    routed_experts: bool = False,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[Sampled, KVCache]:
    """`num_steps` decode steps in one executable; each step's token is fed to the next. Drafts have no part in it.

    The plan has reserved the blocks (and table columns) of all steps ahead (`plan_step(steps=num_steps)`). In steps
    beyond those its sequences are padding: nothing is written, -1 is sampled.

    Args:
        plan: the first decode step; the later ones are its `advance`.
        tokens: [B] int32, fed by the first step; -1, such as a loop before this one drew: the sequence is padding.
        num_steps: K, static. Of fewer than were planned the manager has to be told (`KVCacheManager.accept(steps=)`).
        masks: as of `sample_step`, of a single step: what a second one allows follows from what the first one drew.
        others: as of `sample_step`.

    Returns:
        (`Sampled`: tokens [K, B] int32 sampled by each step, -1 of padding, and further fields [K, B, ...], experts of
        the tokens that each step fed, counts of after the last; the cache, which holds all but the last tokens).

    Raises as `sample_step`, and:
        ShapeError: the plan schedules more tokens than it has sequences.
        RequestError: masks for more than one step.
    """
    check_masks(masks, num_steps)
    asked: dict[str, Any] = dict(masks=masks, biases=biases, logprobs=logprobs, top=top, implementation=implementation)
    begun = cache.begin(_one_token_each(plan))
    cache, plan = begun.finish(partial=True), begun.plan.settled()  # once for all steps
    check_tokens(tokens, plan.num_seqs)
    plan, tokens = plan.only(jnp.asarray(tokens)[plan.seq_first] >= 0), jnp.maximum(tokens, 0)

    def step(carry: tuple[KVCache, jax.Array, jax.Array | None], ahead: jax.Array) -> tuple[tuple, Sampled]:
        cache, tokens, counts = carry
        here = plan.advance(ahead)
        residual, begun, experts = layers(params, cache.begin(here, implementation), tokens, index_qat, routed_experts)
        logits = head(params, residual, cache.layout.cfg, implementation)
        drawn = sample_rows(logits, here.seq_slot, here.token_position, sampling, counts, **asked)
        shown = jnp.where(here.token_slot > 0, drawn.tokens, np.int32(-1))
        carry = begun.finish(), drawn.tokens, drawn.counts
        return carry, drawn._replace(tokens=shown, experts=experts, counts=None)

    (cache, _, counts), sampled = lax.scan(step, (cache, tokens, counts), jnp.arange(num_steps, dtype=jnp.int32))
    return sampled._replace(counts=counts), cache


def layers(
    params: Params,
    step: CacheStep[KVCache],
    tokens: jax.Array,
    index_qat: bool | None,
    routed_experts: bool = False,
    *,
    rows: jax.Array | None = None,
) -> tuple[Residual, CacheStep[KVCache], jax.Array | None]:
    """The backbone's layers of a step, which has not ended then: the residual after the last one, the step, and if
    `routed_experts` those that each token chose in each layer, [T, layers, k] int16, -1 of padding.

    `rows`: [N] int32, of the tokens whose residual is wanted; None: of all, in their order.

    Raises:
        ShapeError: `tokens` does not match the plan.
    """
    residual, after, experts, _ = heard_layers(params, step, tokens, index_qat, routed_experts, (), rows=rows)
    return residual, after, experts


def heard_layers(
    params: Params,
    step: CacheStep[KVCache],
    tokens: jax.Array,
    index_qat: bool | None,
    routed_experts: bool,
    heard: Sequence[int],
    *,
    rows: jax.Array | None = None,
) -> tuple[Residual, CacheStep[KVCache], jax.Array | None, list[Residual]]:
    """Runs the layers as `layers` does; also gives the residual behind each of the layers that are `heard`.

    Of many tokens each device along `tensor` has the residuals of its share of them, from the first layer to the last,
    if products are alike whatever the number of their rows.
    """
    cfg, dtype, count = step.layout.cfg, activations(params), step.plan.num_tokens
    check_tokens(tokens, count)
    split = split_of(params["layers"][0]["attn"])
    shared = is_released(params) and split.shares_tokens(count)

    def run() -> tuple[Residual, CacheStep[KVCache], list[jax.Array], list[Residual]]:
        # All weights, not only what goes into the cache: of kernels without a gradient jax has words of its own.
        own = split.own_share(tokens) if shared else tokens
        residual, after, chosen, behind = without_gradient(embed(params, own, cfg)), step, [], []
        for i, p in enumerate(without_gradient(params["layers"])):
            residual, handle, experts = block(p, after.layer(i), residual, tokens, dtype, index_qat=index_qat)
            after = handle.step
            chosen += [experts] if routed_experts else []
            behind += [residual] if i in heard else []
        return residual, after, chosen, behind

    residual, after, chosen, behind = joined(run, count)()
    experts = jnp.stack(chosen, 1) if routed_experts else None
    if shared:
        residual, (experts, behind) = _of_all_shares(split, residual, rows, (experts, behind))
    elif rows is not None:
        residual = jax.tree.map(lambda x: x[rows], residual)
    if experts is not None:
        there = jnp.asarray(step.plan.token_slot)[:, None, None] > 0
        experts = jnp.where(there, experts, np.int32(-1)).astype(jnp.int16)
    return residual, after, experts, behind


def _of_all_shares(split: Split, residual: Residual, rows: jax.Array | None, others: T) -> tuple[Residual, T]:
    """Gathers in one exchange what devices have of their shares of the tokens: the residual, if `rows` of these tokens
    alone, and other arrays."""
    share = residual.streams.shape[0]
    if rows is not None:
        mine = jnp.clip(rows - lax.axis_index(TENSOR) * np.int32(share), 0, share - 1)
        residual = jax.tree.map(lambda x: x[mine], residual)
    leaves, tree = jax.tree.flatten((residual, others))
    residual, others = jax.tree.unflatten(tree, split.all_shares(*leaves))
    if rows is not None:  # every device has given as many
        of_owner = rows // np.int32(share) * np.int32(rows.size) + jnp.arange(rows.size, dtype=jnp.int32)
        residual = jax.tree.map(lambda x: x[of_owner], residual)
    return residual, others


def block(
    p: Params,
    handle: LayerCacheHandle[KVCache],
    residual: Residual,
    tokens: jax.Array,
    dtype: jax.typing.DTypeLike,
    *,
    index_qat: bool | None = None,
    attend: Callable[..., tuple[jax.Array, LayerCacheHandle[KVCache]]] = attention,
) -> tuple[Residual, LayerCacheHandle[KVCache], jax.Array]:
    """Runs a layer: attention over the cache, then experts, and which of the routed ones tokens chose, [T, k]."""
    cfg, implementation = handle.layout.cfg, handle.implementation
    x, streams, *back = read(p, "hc_attn", residual, cfg, dtype, implementation)
    y, handle = attend(p["attn"], handle, x, index_qat=index_qat)
    x, streams, *back = read(p, "hc_ffn", behind((y,), streams, *back), cfg, dtype, implementation)
    added, chosen = moe(p["ffn"], x, tokens, cfg)
    return behind(added, streams, *back), handle, chosen


def joined(function: Callable[[], T], rows: int) -> Callable[[], T]:
    """Returns `function` with many of its kernels in one call (`ops.in_sequence`) where that gains for so many rows."""
    if rows > MAX_JOINED:
        return function
    return ops.in_sequence(function, early=None if rows <= MAX_EARLY else ())


def check_tokens(tokens: Any, scheduled: int, name: str = "tokens") -> None:
    """Raises `ShapeError` unless they are an array of as many integers as are scheduled."""
    dtype = getattr(tokens, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise ShapeError(f"{name} are {shown(tokens) if dtype is None else dtype}, expected an array of integers")
    if tokens.shape != (scheduled,):
        raise ShapeError(f"{name} has shape {tokens.shape}, the plan schedules {(scheduled,)}")


def check_masks(masks: jax.Array | None, num_steps: int) -> None:
    """Raises `RequestError` if they are for several steps of a loop."""
    if masks is not None and num_steps > 1:
        raise RequestError(f"masks of a loop of {num_steps} steps: what is allowed follows from each step's token")


def _one_token_each(plan: StepPlan | PackedPlan) -> StepPlan:
    plan = plan.unpack()
    if plan.num_tokens != plan.num_seqs:
        raise ShapeError(
            f"a decode step has one token per sequence, the plan has {plan.num_tokens} for {plan.num_seqs}"
        )
    return plan


def embed(params: Params, tokens: jax.Array, cfg: DSV4Config) -> Residual:
    """Starts every stream as the token's embedding. [T] -> [T, n, hidden]"""
    x = params["embed"][tokens].astype(stream_dtype(params))
    return Residual(jnp.broadcast_to(x[:, None], (x.shape[0], cfg.hc_mult, x.shape[1])))
