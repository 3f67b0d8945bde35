"""A whole decode step of the attention stack at full model size, as one executable.

Real projection sizes (bf16, random), FP8 cache, FP4 index keys, every request at the same context. The step is
compared with the sum of its floors: for every part the larger of bytes / copy rate and FLOPs / matmul rate.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache, init_cache
from ..config import AttentionType, DSparkHead, DSV4Config, Numerics
from ..errors import OptionError
from ..layout import CacheLayout, CacheSize, KeySplit
from ..manager.planning import build_plan
from ..manager.step_shape import StepSequence, shape_for
from ..model.attention import attention
from ..model.forward import GPU_DECODE_OPTIONS, joined
from ..model.numerics import rms_norm
from ..model.weights.packing import PackedLayers, pack_layers
from ..model.weights.params import param_specs
from ..model.weights.split import Split
from ..model.weights.stacking import stack_projections
from ..ops.registry import Choice
from ..plan import PackedPlan
from ..sharding import stack_plans
from .ops import random_part
from .shapes import DraftHead
from .timing import Ceilings, StepPart, against_floors, longest_kernels, timed

__all__ = [
    "MAX_DRAFTS",
    "StepOptions",
    "StepSetup",
    "cache_and_plan",
    "cache_floors",
    "cache_shape",
    "compile_step",
    "floors",
    "measure_step",
    "neutral_layers",
    "random_cache",
    "random_layers",
    "set_up",
]

# Of the published DSpark checkpoints: rows of a block, the noise's id, layers that are heard, and the tables' rank.
_BLOCK, _NOISE, _HEARD, _RANKS = 5, 128799, 3, {"flash": 256, "pro": 512, "tiny": 8}
MAX_DRAFTS: Mapping[DraftHead, int] = {"mtp": 3, "dspark": _BLOCK}


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Says what `measure_step` runs.

    Attributes:
        model: "flash", "pro" or "tiny".
        batch, context: requests on all devices, and tokens of each.
        chunk: tokens of each request that the step takes, the last of its context: 1 decodes, more is prefill.
        drafts: that are made for each request and that the step verifies, of whole layers alone.
        draft_head: what makes them: the model's MTP layer, or DSpark's stages in its place.
        layers: how many to run, from the first; None: all.
        implementation: of every op; None: the default of each.
        key_split: of the layout.
        numerics: of whole layers, whose weights are as released.
        steps: calls per synchronisation.
        loop: steps of a call, as `model.decode_loop` or `draft_loop` run several in one executable; times are those
            of one.
        profile: where to leave a profiler trace.
        xla: compiler options, such as ("xla_gpu_enable_triton_gemm", False), beside `GPU_DECODE_OPTIONS`.
        devices, tensor: of how many devices, and how many of them have the same requests (`model.shard_params`).
        exchange: between devices with the project's own CUDA where it can run, else with XLA's collectives.
        brief: of whole layers the step's time alone: no floor, no exchanges by themselves; kernels with `profile`.
    """

    model: str = "flash"
    batch: int = 64
    context: int = 128 * 1024
    chunk: int = 1
    drafts: int = 0
    draft_head: DraftHead = "mtp"
    layers: int | None = None
    implementation: Choice = None
    key_split: KeySplit = "throughput"
    numerics: Numerics = "plain"
    steps: int = 20
    loop: int = 1
    profile: pathlib.Path | None = None
    xla: tuple[tuple[str, str | bool], ...] = ()
    devices: int = 1
    tensor: int = 1
    exchange: bool = True
    brief: bool = False

    @property
    def split(self) -> Split:
        """Raises `OptionError`: devices do not divide by `tensor`, or requests by the data shards."""
        data, odd = divmod(self.devices, self.tensor)
        if odd or self.batch % data:
            raise OptionError(
                f"batch {self.batch}, {self.devices} devices, {self.tensor} of them with the same requests: no split"
            )
        return Split(data, self.tensor)

    @property
    def fed(self) -> int:
        """How many tokens of each request a step takes."""
        return self.chunk + self.drafts

    def config(self) -> DSV4Config:
        """Returns the config of the layers that run.

        Raises `OptionError`: the context exceeds the model's, the chunk the context, or the drafts what the head makes.
        """
        if self.drafts > (most := MAX_DRAFTS[self.draft_head]):
            raise OptionError(f"{self.drafts} drafts of a step: the head {self.draft_head} makes at most {most}")
        cfg = getattr(DSV4Config, self.model)()
        if self.context > cfg.max_position_embeddings:
            raise OptionError(f"context {self.context}: {self.model} has at most {cfg.max_position_embeddings}")
        steps = self.loop if self.drafts else 1
        if not 1 <= self.fed * steps <= self.context:
            raise OptionError(f"chunk {self.fed * steps} of a context of {self.context} tokens")
        cfg = dataclasses.replace(cfg, layer_types=cfg.layer_types[: self.layers]) if self.layers else cfg
        return _with_dspark(cfg, self.model) if self.draft_head == "dspark" else cfg


def _with_dspark(cfg: DSV4Config, model: str) -> DSV4Config:
    """The same backbone with the head of its published DSpark checkpoint; the last layers that run are heard."""
    heard = tuple(range(max(cfg.num_layers - _HEARD, 0), cfg.num_layers))
    head = DSparkHead(_BLOCK, min(_NOISE, cfg.vocab_size - 1), heard, _RANKS[model])
    return dataclasses.replace(cfg, num_mtp_layers=0, dspark=head)


class StepSetup(NamedTuple):
    """Holds what a call of these options works on and does.

    Attributes:
        layout, size: of the cache.
        plan: of a step in which every request feeds its last token, or chunk, on the host.
        call: (cache, layers, plan, x [batch x chunk, hidden] float32) -> (cache, x), to be jitted with cache and x
            donated.
    """

    layout: CacheLayout
    size: CacheSize
    plan: PackedPlan
    call: Callable[[KVCache, PackedLayers, PackedPlan, jax.Array], tuple[KVCache, jax.Array]]


def set_up(options: StepOptions) -> StepSetup:
    """Raises `OptionError`: the context exceeds the model's, or the chunk the context."""
    cfg = options.config()
    layout, size, plan = cache_and_plan(cfg, options)

    def step(cache: KVCache, layers: PackedLayers, plan: PackedPlan, x: jax.Array) -> tuple[KVCache, jax.Array]:
        def run() -> tuple[KVCache, jax.Array]:
            begun, y = cache.begin(plan, options.implementation), x
            for i, p in enumerate(layers):
                of_layer, layer = attention(p["attn"], begun.layer(i), rms_norm(y, None, cfg.rms_norm_eps))
                y, begun = y + of_layer, layer.step
            return begun.finish(), y

        return joined(run, x.shape[0])()

    def call(cache: KVCache, layers: PackedLayers, plan: PackedPlan, x: jax.Array) -> tuple[KVCache, jax.Array]:
        if options.loop == 1:
            return step(cache, layers, plan, x)
        return jax.lax.fori_loop(0, options.loop, lambda _, carry: step(carry[0], layers, plan, carry[1]), (cache, x))

    return StepSetup(layout, size, plan, call)


def cache_shape(cfg: DSV4Config, options: StepOptions) -> tuple[CacheLayout, CacheSize]:
    """Returns layout and size of a data shard's cache that holds every request's context, and no more."""
    mtp = options.drafts > 0
    how: dict[str, Any] = dict(key_split=options.key_split, numerics=options.numerics)
    layout = CacheLayout(cfg, draft_tokens=options.drafts, include_drafts=mtp, **how)
    columns, batch = layout.blocks_for(options.context), options.batch // options.split.data
    return layout, CacheSize(batch * columns, batch, columns)


def cache_and_plan(cfg: DSV4Config, options: StepOptions) -> tuple[CacheLayout, CacheSize, PackedPlan]:
    """Returns what a step runs on, and the plan, on the host, of a step in which every request feeds its last tokens.

    The cache is that of a data shard, the plan that of all of them.
    """
    layout, size = cache_shape(cfg, options)
    steps = options.loop if options.drafts else 1  # a loop with drafts goes on; others do the same step again
    first = options.context - steps * options.fed
    rows = [StepSequence(slot + 1, first, options.fed) for slot in range(size.num_slots)]
    plan = build_plan(layout, rows, shape_for(layout, rows, steps=steps), size=size, steps=steps)
    return layout, size, stack_plans([plan] * options.split.data)


def measure_step(options: StepOptions, ceilings: Ceilings | None) -> dict[str, Any]:
    """Runs the step and returns what was seen, ready for JSON. Without ceilings there is no floor to compare it with.

    Raises:
        OptionError: the context exceeds the model's, the chunk the context, or the step gives numbers that are not
            finite.
    """
    cfg = options.config()
    layout, size, plan, call = set_up(options)
    key = jax.random.key(0)
    params = random_layers(cfg, key)
    cache = random_cache(layout, size, key)
    plan = jax.device_put(plan)
    x = jax.random.normal(key, (options.batch * options.chunk, cfg.hidden_size), jnp.float32)

    # The activations are donated too: a command buffer is launched as it is while its buffers keep their addresses.
    jitted = jax.jit(call, donate_argnums=(0, 3), compiler_options=GPU_DECODE_OPTIONS | dict(options.xla))
    compiled, report = compile_step(options, cfg, jitted, (cache, params, plan, x))
    text = compiled.as_text() or ""
    report |= dict(
        cache_gb=layout.total_bytes(size) / 1e9,
        cache_in_place=report.pop("aliased") == layout.total_bytes(size) + x.nbytes,
        command_buffers=text.count("command_buffer"),
        custom_calls=text.count("custom-call("),
    )

    def run() -> jax.Array:
        nonlocal cache, x
        cache, x = compiled(cache, params, plan, x)
        return x

    report |= timed(run, options.steps, options.loop)
    if ceilings is not None:
        parts = floors(layout, params, options.batch, options.context, options.chunk)
        report |= against_floors(parts, ceilings, report["step_ms"])
        report["tokens_per_s"] = options.batch * options.chunk / report["step_ms"] * 1e3
    return report | longest_kernels(run, options.loop, options.profile)


def compile_step(
    options: StepOptions, cfg: DSV4Config, jitted: Any, args: tuple[Any, ...]
) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Compiles a step, and returns it with what its report begins with; `aliased`: bytes that are updated in place.

    Raises:
        OptionError: the compiler does not say what memory the step takes.
    """
    start = time.perf_counter()
    compiled = jitted.lower(*args).compile()
    compile_s, memory = time.perf_counter() - start, compiled.memory_analysis()
    if memory is None:
        raise OptionError("the compiler does not say what memory the step takes")
    return compiled, dict(
        model=options.model,
        layers=cfg.num_layers,
        batch=options.batch,
        context=options.context,
        chunk=options.chunk if options.chunk > 1 else None,
        loop=options.loop,
        implementation=options.implementation or "default",
        key_split=options.key_split,
        xla=GPU_DECODE_OPTIONS | dict(options.xla),
        compile_s=compile_s,
        temp_mb=memory.temp_size_in_bytes / 1e6,
        aliased=memory.alias_size_in_bytes,
    )


def neutral_layers(cfg: DSV4Config) -> PackedLayers:
    """Makes the layers' "attn" parameters as they are decoded with, stacked and packed: unit norms, the rest 0."""

    def neutral(path: tuple, spec: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(spec.shape, "norm" in jax.tree_util.keystr(path), spec.dtype)

    specs = ({"attn": layer["attn"]} for layer in param_specs(cfg, jnp.bfloat16)["layers"])
    layers = tuple(jax.tree_util.tree_map_with_path(neutral, layer) for layer in specs)
    return pack_layers(stack_projections({"layers": layers}))["layers"]


def random_layers(cfg: DSV4Config, key: jax.Array) -> PackedLayers:
    """Makes `neutral_layers` with normal matrices scaled by their width."""

    def draw(i: int, spec: jax.ShapeDtypeStruct) -> jax.Array:
        scale = jnp.asarray(spec.shape[-1] ** -0.5, spec.dtype)
        return jax.random.normal(jax.random.fold_in(key, i), spec.shape, spec.dtype) * scale

    # Only what is not a matrix is made and packed; the packs of matrices are drawn as they are.
    packed = jax.eval_shape(partial(neutral_layers, cfg))
    small = jax.jit(lambda: [None if x.dtype == jnp.bfloat16 else x for x in neutral_layers(cfg).arrays])()
    drawn = jax.jit(draw, static_argnums=(0, 1))
    pairs = enumerate(zip(small, packed.arrays, strict=True))
    return dataclasses.replace(packed, arrays=tuple(drawn(i, spec) if x is None else x for i, (x, spec) in pairs))


def random_cache(layout: CacheLayout, size: CacheSize, key: jax.Array) -> KVCache:
    """Makes a cache full of valid rows, with a block table that scatters every request over the pool."""
    cache = init_cache(layout, size)
    arrays = dict(cache.arrays)
    rows = {"index": layout.index_row} | dict.fromkeys(("swa", "csa", "hca", "draft"), layout.kv_row)
    holds = {f"{pool}.{part.name}": part.holds for pool, fmt in rows.items() for part in fmt.parts}
    for i, leaf in enumerate(layout.leaves):
        if leaf.scope != "table":
            shape = arrays[leaf.name].shape
            arrays[leaf.name] = random_part(jax.random.fold_in(key, i), shape, leaf.dtype, holds.get(leaf.name))
    ids = np.random.default_rng(0).permutation(size.num_blocks)[: size.num_slots * size.max_blocks_per_request] + 1
    table = np.zeros(arrays["block_table.ids"].shape, np.int32)
    table[1 : size.num_slots + 1] = ids.reshape(size.num_slots, -1)
    arrays["block_table.ids"] = jnp.asarray(table)
    return KVCache(arrays, layout)


def floors(layout: CacheLayout, params: PackedLayers, batch: int, context: int, chunk: int = 1) -> list[StepPart]:
    """Returns the parts of one step of the attention stack: every weight and every visible row is read once."""
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    matrices = sum(math.prod(x.shape) for x in jax.tree.leaves(params) if x.ndim >= 2 and x.dtype == jnp.bfloat16)
    products = StepPart("projections", weights, 2 * matrices * batch * chunk)
    return [products, *cache_floors(layout, batch, context, chunk=chunk)]


def cache_floors(layout: CacheLayout, batch: int, context: int, tensor: int = 1, chunk: int = 1) -> list[StepPart]:
    """Returns the parts of reading the cache: every row that any token of a request sees once, FLOPs of each token.

    Queries and outputs count as bf16, the least a step could keep them in; `tensor` devices share the heads. The
    indexer's FLOPs count half where its products are of FP8, which are twice as fast.
    """
    cfg, rows = layout.cfg, []
    tokens = np.arange(context - chunk, context) + 1  # that each token of a chunk sees, itself among them
    for attn in AttentionType:
        same = [schema for schema in layout.schemas if schema.attn is attn]
        if not same:
            continue
        layers, schema = len(same), same[0]
        entries = tokens // schema.ratio if schema.ratio else np.zeros_like(tokens)
        seen, last = np.minimum(tokens, schema.swa_window_size), int(entries[-1])
        if schema.index_keys is not None:
            keys = last * layout.row_format(schema.index_keys).row_bytes
            flops = 2 * cfg.index_n_heads * schema.index_keys.width * int(entries.sum())
            flops //= 1 if layout.index_row.name in ("bf16", "f32") else 2
            rows.append(StepPart("index_scores", layers * batch * keys, layers * batch * flops))
        if schema.selected_entries:
            entries = np.minimum(entries, schema.selected_entries)
        width = cfg.num_attention_heads // tensor * schema.entry_head_dim
        read = min(context, schema.swa_window_size + chunk - 1) + min(last, int(entries.sum()))
        bytes_ = layers * batch * (read * layout.row_format(schema.window).row_bytes + 4 * width * chunk)
        rows.append(StepPart(f"attend {attn.name}", bytes_, layers * batch * 4 * width * int((seen + entries).sum())))
    return rows
