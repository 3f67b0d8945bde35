"""A whole decode step of a model's layers and head, with weights as released, as one executable.

Random weights drawn on the device, random token ids, FP8 cache, FP4 index keys, every request at the same context. The
step is compared with the sum of its floors: for every part the larger of bytes / copy rate and FLOPs / matmul rate.
Of the experts only those count that the step's own tokens choose. On several devices floors are those of each of them,
and what they send each other counts in none. A step with drafts is timed beside the step that verifies as many tokens
and drafts none. By an MTP layer, which runs one time more than it drafts, it has no floor; by DSpark its stages' parts
are floors of their own. With `chunk` it is a step of prefill, of which each request's last token has logits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..cache import KVCache
from ..config import DSV4Config
from ..layout import CacheLayout, CacheSize
from ..model.draft_steps import draft_loop, draft_step
from ..model.dspark import block_logits
from ..model.forward import GPU_DECODE_OPTIONS, decode_step, forward, layers, prefill
from ..model.weights.names import MTP
from ..model.weights.params import RELEASED, Params, is_leaf, param_specs
from ..model.weights.placement import device_bytes
from ..model.weights.quantised import FP4, Quantised
from ..model.weights.split import ALONE, DATA, Split, in_blocks, parts_of
from ..ops import Exchange
from ..ops.exchange import Peers
from ..ops.exchange_buffers import open_exchanges
from ..ops.registry import Choice
from ..plan import PackedPlan
from ..sharding import cache_sharding, shard_step
from .shapes import DraftHead
from .step import StepOptions, cache_and_plan, cache_floors, cache_shape, compile_step, random_cache
from .timing import Ceilings, StepPart, against_floors, longest_kernels, timed

__all__ = [
    "DEFAULT_LAYERS",
    "FEW_REQUESTS",
    "TOKENS_A_STEP",
    "bytes_needed",
    "chosen_draft_experts",
    "chosen_experts",
    "draft_floors",
    "exchanges",
    "jitted_over",
    "launches",
    "measure_model",
    "mesh_of",
    "model_config",
    "model_floors",
    "spread_cache",
]

# Where the whole model does not fit: of Flash two layers of window attention and five each of CSA and HCA.
DEFAULT_LAYERS = 12
# Of up to so many requests a server would cut keys for latency (`CacheLayout(key_split="latency")`).
FEW_REQUESTS = 16
# Tokens that a step with so many drafts is taken to give. Random weights accept none; what a step takes does not depend
# on it. Of an MTP layer 47.2 % of drafts whose predecessors were accepted: three then give 1.8 tokens, as a peer saw on
# real text (vLLM on two GH200). Of DSpark what is published of V4-Pro, coding, thinking on; of 1, 2 and 4 drafts by
# another source (InferenceX on SPEED-Bench).
TOKENS_A_STEP: Mapping[DraftHead, Mapping[int, float]] = {
    "mtp": {n: sum(0.472**i for i in range(1 + n)) for n in (1, 2, 3)},
    "dspark": {1: 1.84, 2: 2.51, 3: 3.08, 4: 3.36, 5: 3.74},
}
# Beside weights and cache: temporaries, logits, what the allocator cannot use; and what a token of a chunk takes.
_SPARE_BYTES, _TOKEN_BYTES = 1 << 30, 1 << 20
# The tiny model in sizes that the released formats have, and that divide by eight devices.
_TINY: Mapping[str, Any] = dict(
    num_attention_heads=16,
    o_groups=8,
    n_routed_experts=8,
    hidden_size=128,
    q_lora_rank=128,
    head_dim=64,
    rope_dim=16,
    o_lora_rank=128,
    index_head_dim=32,
    moe_intermediate_size=128,
)


def model_config(options: StepOptions) -> DSV4Config:
    """Returns the config of the layers that run. "tiny" is as wide as the released formats need. Raises as
    `StepOptions.config`.
    """
    cfg = options.config()
    if options.model != "tiny":
        return cfg
    sizes: Any = {**_TINY, "num_mtp_layers": 1 if cfg.dspark is None else 0}
    return dataclasses.replace(cfg, **sizes)


def bytes_needed(options: StepOptions) -> int:
    """Returns the bytes that each device needs for weights, cache and some temporaries.

    Raises as `StepOptions.config` and `StepOptions.split`.
    """
    cfg = model_config(options)
    layout, size = cache_shape(cfg, options)
    return (
        device_bytes(cfg, split=options.split, drafts=options.drafts > 0)
        + layout.total_bytes(size)
        + (_SPARE_BYTES + _TOKEN_BYTES * size.num_slots * (options.chunk - 1) if options.model != "tiny" else 0)
    )


def measure_model(options: StepOptions, params: Params, ceilings: Ceilings | None) -> dict[str, Any]:
    """Runs the step and returns what was seen, ready for JSON. Without ceilings there is no floor to compare it with.

    Args:
        params: of `model_config(options)`, as `init_params(cfg, seed, "released", packed=True)` gives them, with
            the options' numerics, over the devices of `mesh_of(options)` if there are several; for drafts with the
            layers that draft.

    Raises:
        OptionError: the context exceeds the model's, or the step gives numbers that are not finite.
        ExchangeError: a device did not come to an exchange.
    """
    with exchanges(options) as opened:
        report = _measured(options, params, ceilings, [exchange.peers for exchange in opened])
        for exchange in opened:
            exchange.check()
    return report


def _measured(
    options: StepOptions, params: Params, ceilings: Ceilings | None, peers: Sequence[Peers]
) -> dict[str, Any]:
    cfg = model_config(options)
    layout, size, plan = cache_and_plan(cfg, options)
    split, mesh = options.split, mesh_of(options)
    known = options.batch * (1 if options.drafts and options.loop > 1 else options.fed)
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=known).astype(np.int32)
    plan, tokens = jax.device_put((plan, tokens), None if mesh is None else NamedSharding(mesh, PartitionSpec(DATA)))
    cache = spread_cache(layout, size, mesh) if mesh else random_cache(layout, size, jax.random.key(1))

    def step(params: Params, cache: KVCache, plan: PackedPlan, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        if not options.drafts:
            run = decode_step if options.chunk == 1 else prefill
            return run(params, cache, plan, tokens, implementation=options.implementation)
        wanted, width = jnp.full(plan.unpack().num_seqs, options.drafts, jnp.int32), options.drafts
        how: dict[str, Any] = dict(implementation=options.implementation)
        if options.loop > 1:
            drawn, _, cache = draft_loop(params, cache, plan, tokens, wanted, width, options.loop, **how)
            return drawn.tokens[-1, :, 0], cache
        drawn, _, cache = draft_step(params, cache, plan, tokens, wanted, width, **how)
        return drawn.tokens[:, 0], cache

    def call(params: Params, cache: KVCache, plan: PackedPlan, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        if options.loop == 1 or options.drafts:
            return step(params, cache, plan, tokens)
        first, _ = jax.eval_shape(step, params, cache, plan, tokens)
        out = jnp.zeros(first.shape, first.dtype)
        return jax.lax.fori_loop(0, options.loop, lambda _, carry: step(params, carry[1], plan, tokens), (out, cache))

    jitted = jitted_over(mesh, call, GPU_DECODE_OPTIONS | dict(options.xla), peers)
    compiled, report = compile_step(options, cfg, jitted, (params, cache, plan, tokens))
    report |= dict(
        kinds=dict(collections.Counter(kind.name for kind in cfg.layer_types)),
        devices=split.devices,
        tensor=split.tensor,
        drafts=options.drafts or None,
        numerics=None if options.numerics == "plain" else options.numerics,
        weights_gb=device_bytes(cfg, split=split, drafts=options.drafts > 0) / 1e9,
        cache_gb=layout.total_bytes(size) / 1e9,
        cache_in_place=report.pop("aliased") == layout.total_bytes(size),
        launches=launches(compiled.as_text() or ""),
    )

    def run() -> jax.Array:
        nonlocal cache
        logits, cache = compiled(params, cache, plan, tokens)
        return logits

    report |= timed(run, options.steps, options.loop)
    report["layer_ms"] = report["step_ms"] / cfg.num_layers
    if options.drafts:
        gives = TOKENS_A_STEP[options.draft_head][options.drafts]
        report |= dict(draft_head=options.draft_head, tokens_a_step=gives, token_ms=report["step_ms"] / gives)
    if mesh is not None:
        report["exchange"] = "cuda" if peers else "xla"
    if options.brief and options.profile is None:
        return report | {"kernel_ms": None}
    longest = longest_kernels(run, options.loop * split.devices, options.profile)
    if options.brief:
        return report | longest
    how: Any = dict(implementation=options.implementation)
    fed = tokens
    if options.drafts:
        every = np.random.default_rng(1).integers(cfg.vocab_size, size=options.batch * options.fed).astype(np.int32)
        fed = jax.device_put(every, None if mesh is None else NamedSharding(mesh, PartitionSpec(DATA)))
        verify = jitted_over(
            mesh, partial(_verified, loop=options.loop, **how), GPU_DECODE_OPTIONS | dict(options.xla), peers
        )

        def run_without() -> jax.Array:
            nonlocal cache
            drawn, cache = verify(params, cache, plan, fed)
            return drawn

        report["verify_ms"] = timed(run_without, options.steps, options.loop)["step_ms"]
        report["drafting_ms"] = report["step_ms"] - report["verify_ms"]

    def counted(chosen: Callable[..., Any], number: int) -> tuple[list[int], float]:
        """Experts that each layer reads on the device that reads the most, and on all of them, mean over layers."""
        nonlocal cache
        used = jitted_over(mesh, partial(chosen, **how), GPU_DECODE_OPTIONS, peers)
        masks, cache = used(params, cache, plan, fed)
        masks = np.asarray(masks).reshape(split.data, number, split.devices, -1).any(0)
        return masks.sum(2).max(1).tolist(), float(masks.sum() / number)

    experts, report["experts"] = counted(chosen_experts, cfg.num_layers)
    shared = options.numerics == "released" and split.shares_tokens(options.batch // split.data * options.fed)
    parts = model_floors(
        layout,
        experts,
        options.batch,
        options.context,
        split,
        options.fed,
        verified=options.drafts > 0,
        shared=shared,
    )
    of_drafts = []
    if options.drafts and cfg.dspark is not None:
        experts, report["draft_experts"] = counted(chosen_draft_experts, cfg.num_draft_layers)
        of_drafts = draft_floors(layout, experts, options.batch, options.drafts, split)
    if ceilings is not None and (of_drafts or not options.drafts):
        parts += of_drafts
        report |= against_floors(parts, ceilings, report["step_ms"])
        if of_drafts:
            report["drafting_floor_ms"] = sum(report["floor_us"][part.name] for part in of_drafts) / 1e3
        report["tokens_per_s"] = (
            1e3 * options.batch * options.chunk * report.get("tokens_a_step", 1) / report["step_ms"]
        )
        report |= dict(
            layer_floor_ms=report["floor_ms"] / cfg.num_layers, moved_gb=sum(part.bytes for part in parts) / 1e9
        )
    return report | longest


def mesh_of(options: StepOptions, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Makes the mesh of these options, of the first devices there are or of those given; None for one device."""
    return None if options.devices == 1 else options.split.mesh(devices)


def jitted_over(
    mesh: Mesh | None, step: Callable[..., tuple[Any, KVCache]], xla: Mapping[str, Any], peers: Sequence[Peers] = ()
) -> Any:
    """Jits a step of (params, cache, plan, tokens) over a mesh, the cache donated."""
    if mesh is None:
        return jax.jit(step, donate_argnums=1, compiler_options=dict(xla))
    return shard_step(step, mesh, compiler_options=xla, peers=peers)


def exchanges(options: StepOptions) -> contextlib.AbstractContextManager[tuple[Exchange, ...]]:
    """Opens the exchanges of the mesh's axes, if the options want them."""
    return open_exchanges(mesh_of(options) if options.exchange else None)


def spread_cache(layout: CacheLayout, size: CacheSize, mesh: Mesh) -> KVCache:
    """Makes the `random_cache` of every data shard, all of them alike, on the devices where it stays."""
    shards = []
    for device in mesh.devices.flat:
        with jax.default_device(device):
            shards.append(jax.device_put(random_cache(layout, size, jax.random.key(1)), device))
    placements: dict[str, Any] = dict(cache_sharding(layout, mesh).arrays)
    arrays: dict[str, jax.Array] = {}
    for name, placement in placements.items():
        parts = [shard.arrays[name] for shard in shards]
        shape = (mesh.shape[DATA] * parts[0].shape[0], *parts[0].shape[1:])
        arrays[name] = jax.make_array_from_single_device_arrays(shape, placement, parts)
    return KVCache(arrays, layout)


def launches(text: str) -> int:
    """Counts fusions and custom calls of a step in an executable's text, and all that are joined into one.

    (`ops.sequence`.) Each counts once, though a custom call may launch several kernels. They stand in the entry, or in
    the body of a loop: in the computation that has most of them.
    """

    joined = sum(names.count(";") for names in re.findall(r'targets = "([^"]*)"', text))
    return max(part.count(" fusion(") + part.count(" custom-call(") for part in text.split("\n\n")) + joined


def chosen_experts(
    params: Params, cache: KVCache, plan: PackedPlan, tokens: jax.Array, *, implementation: Choice = None
) -> tuple[jax.Array, KVCache]:
    """Returns which experts each layer of a step reads, [layers, experts] bool, and the cache after the step."""
    _, step, experts = layers(params, cache.begin(plan, implementation), tokens, None, routed_experts=True)
    assert experts is not None
    every = np.arange(cache.layout.cfg.n_routed_experts, dtype=np.int16)[None, None, None]
    return (experts[..., None] == every).any((0, 2)), step.finish()


def chosen_draft_experts(
    params: Params, cache: KVCache, plan: PackedPlan, tokens: jax.Array, *, implementation: Choice = None
) -> tuple[jax.Array, KVCache]:
    """Returns which experts each of DSpark's stages reads for the blocks of a step with drafts, as `chosen_experts`."""
    here, cfg = plan.unpack().settled(), cache.layout.cfg
    wanted = here.seq_count - np.int32(1)
    *_, experts = block_logits(params, cache, here, tokens[here.seq_first], wanted, 1, implementation)
    every = np.arange(cfg.n_routed_experts, dtype=np.int16)[None, None, None]
    return (experts[..., None] == every).any((0, 2)), cache


def _verified(
    params: Params, cache: KVCache, plan: PackedPlan, tokens: jax.Array, *, loop: int, implementation: Choice
) -> tuple[jax.Array, KVCache]:
    """Runs `loop` times a step of known tokens, without layers that draft: the likeliest successor of each, [T]."""

    def step(cache: KVCache) -> tuple[jax.Array, KVCache]:
        logits, cache = forward(params, cache, plan, tokens, implementation=implementation)
        return logits.argmax(-1).astype(jnp.int32), cache

    if loop == 1:
        return step(cache)
    return jax.lax.fori_loop(0, loop, lambda _, carry: step(carry[1]), (tokens, cache))


def model_floors(
    layout: CacheLayout,
    experts: Sequence[int],
    batch: int,
    context: int,
    split: Split = ALONE,
    chunk: int = 1,
    *,
    verified: bool = False,
    shared: bool = False,
) -> list[StepPart]:
    """Returns the parts of one step of a device: every weight that the tokens need, every visible row, the streams
    between blocks.

    `fp8`: dense matrices and their scales. `fp4`: the experts that were chosen; FLOPs are those of all tokens. `plain`:
    bf16 and f32 weights; of the embedding and of hash layers' tables the tokens' rows. `head`: its matrix, and logits
    in f32. `streams`: f32, read by every block and by the head, written by every block but the first, which has them
    as they were. The rest is as `step.cache_floors` says.

    Args:
        experts: how many each layer reads, of those of a device.
        batch: requests on all devices.
        chunk: tokens of each in the step.
        verified: all of them have logits, not the last of each request alone.
        shared: devices along `tensor` share out the tokens (`Split.shares_tokens`): what matrices that each of them has
            whole multiply, and streams, are of a share.
    """
    cfg, everyone, batch = layout.cfg, batch * chunk, batch // split.data
    tokens = batch * chunk
    specs = param_specs(cfg, RELEASED)
    own = tokens // split.tensor if shared else tokens
    sums = _of_layers(cfg, specs["layers"], experts, tokens, everyone, split, own)
    _add(sums["plain"], own, specs["hc_head"], specs["norm"])
    embedding = specs["embed"]
    sums["plain"][0] += own * embedding.shape[1] * embedding.dtype.itemsize
    with_logits = tokens if verified else batch
    streams = 4 * cfg.num_layers * own * 4 * cfg.hc_mult * cfg.hidden_size
    return [
        *(StepPart(name, *both) for name, both in sums.items()),
        _head(cfg, "head", with_logits, split),
        StepPart("streams", streams, 0),
        *cache_floors(layout, batch, context, split.tensor, chunk),
    ]


def draft_floors(
    layout: CacheLayout, experts: Sequence[int], batch: int, drafts: int, split: Split = ALONE
) -> list[StepPart]:
    """Returns the parts of drafting by DSpark on a device: every weight that the blocks' rows need, the head's again.

    `drafts fp8`, `drafts fp4`, `drafts plain`, `drafts head`, `drafts streams`: as of `model_floors`, of the stages.
    `drafts pairs`: of the tables of pairs of tokens, the second of which is read anew for each draft. What the stages
    read of the cache is among the backbone's.

    Args:
        experts: how many each stage reads, of those of a device.
        batch, split: as of `model_floors`.
        drafts: of each request. A block has all of its rows whatever it is.
    """
    cfg, spark = layout.cfg, layout.cfg.dspark
    assert spark is not None
    everyone, batch = batch * spark.block_size, batch // split.data
    tokens, specs = batch * spark.block_size, param_specs(cfg, RELEASED, drafts=True)
    *_, last = stages = specs[MTP]
    pairs = last["markov"]["w2"]
    alike = [{name: stage[name] for name in stages[1]} for stage in stages]  # the second has what all have
    sums = _of_layers(cfg, alike, experts, tokens, everyone, split, tokens)
    sums["fp8"][0] += sum(math.prod(part.shape) for part in stages[0]["main_proj"].parts)
    _add(sums["plain"], tokens, stages[0]["main_norm"], last["hc_head"], last["norm"])
    sums["plain"][0] += 2 * batch * cfg.hidden_size * specs["embed"].dtype.itemsize  # the last token, and the noise
    row = spark.markov_rank * pairs.dtype.itemsize
    streams = 4 * len(stages) * tokens * 4 * cfg.hc_mult * cfg.hidden_size
    return [
        *(StepPart(f"drafts {name}", *both) for name, both in sums.items()),
        _head(cfg, "drafts head", batch * drafts, split),
        StepPart("drafts pairs", drafts * (cfg.vocab_size * row + batch * row), 2 * batch * drafts * pairs.size),
        StepPart("drafts streams", streams, 0),
    ]


def _add(sum_: list[int], tokens: int, *leaves: Any) -> None:
    """Adds the bytes of weights that are read once, and the FLOPs of those that are matrices."""
    for leaf in jax.tree.leaves(leaves):
        sum_[0] += leaf.size * leaf.dtype.itemsize
        sum_[1] += 2 * tokens * leaf.size if len(leaf.shape) > 1 else 0


def _head(cfg: DSV4Config, name: str, rows: int, split: Split) -> StepPart:
    """The head's matrix, and so many rows of logits in float32."""
    embedding = param_specs(cfg, RELEASED)["embed"]
    words = embedding.size // (split.tensor if in_blocks(embedding.shape, embedding.dtype) else 1)
    return StepPart(name, words * embedding.dtype.itemsize + 4 * rows * cfg.vocab_size, 2 * rows * words)


def _of_layers(
    cfg: DSV4Config,
    specs: Sequence[Params],
    experts: Sequence[int],
    tokens: int,
    everyone: int,
    split: Split,
    own: int,
) -> dict[str, list[int]]:
    """Sums the bytes and FLOPs of layers by how weights are stored.

    Args:
        specs, experts: of each layer, and how many of a device's experts it reads.
        tokens, everyone: of a data shard, and of all of them.
        own: tokens that matrices multiply which are whole on each device.
    """
    sums = {name: [0, 0] for name in ("fp8", "fp4", "plain")}

    def add(name: str, bytes_: int, multiplied: int = 0, rows: int = own) -> None:
        sums[name][0] += bytes_
        sums[name][1] += 2 * rows * multiplied

    for layer, used in zip(specs, experts, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer, is_leaf=is_leaf):
            name, size = path[-1].key, math.prod(leaf.shape)
            if isinstance(leaf, Quantised):
                bytes_ = sum(math.prod(part.shape) for part in leaf.parts)
                if leaf.format == FP4:
                    each = cfg.n_routed_experts
                    sums["fp4"][0] += bytes_ // each * used
                    sums["fp4"][1] += 2 * everyone * (size // each) * cfg.num_experts_per_tok // split.devices
                else:
                    parts = parts_of(path, split)
                    add("fp8", bytes_ // parts, size // parts, tokens if parts > 1 else own)
            elif name == "tid2eid":
                add("plain", own * leaf.shape[1] * leaf.dtype.itemsize)
            else:
                add("plain", size * leaf.dtype.itemsize, size if len(leaf.shape) > 1 and name != "ape" else 0)
    return sums
