"""A whole decode step of the attention stack at full model size, as one executable.

Real projection sizes (bf16, random), FP8 cache, FP4 index keys, every request at the same context. The step is
compared with the sum of its floors: for every part the larger of bytes / copy rate and FLOPs / matmul rate.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache, init_cache
from ..config import AttentionType, DSV4Config
from ..errors import BenchmarkError
from ..layout import CacheLayout, CacheSize, KeySplit
from ..manager import StepSequence, build_plan, shape_for
from ..model.attention import attention
from ..model.forward import GPU_DECODE_OPTIONS
from ..model.numerics import rms_norm
from ..model.packing import PackedLayers, pack_layers
from ..model.params import param_specs
from ..model.projections import stack_projections
from ..ops.registry import Choice
from ..plan import PackedPlan
from .ceilings import Ceilings
from .inputs import random_part
from .timing import profiled

__all__ = [
    "StepOptions",
    "StepSetup",
    "floors",
    "measure_step",
    "neutral_layers",
    "random_cache",
    "random_layers",
    "set_up",
]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What `measure_step` runs.

    Attributes:
        model: "flash", "pro" or "tiny".
        batch, context: requests, and tokens of each.
        layers: how many to run, from the first; None: all.
        implementation: of every op; None: the default of each.
        key_split: of the layout.
        steps: calls per synchronisation.
        loop: steps of a call, as `model.decode_loop` runs several in one executable; times are those of one.
        profile: where to leave a profiler trace.
        xla: compiler options, such as ("xla_gpu_enable_triton_gemm", False), beside `GPU_DECODE_OPTIONS`.
    """

    model: str = "flash"
    batch: int = 64
    context: int = 128 * 1024
    layers: int | None = None
    implementation: Choice = None
    key_split: KeySplit = "throughput"
    steps: int = 20
    loop: int = 1
    profile: pathlib.Path | None = None
    xla: tuple[tuple[str, str | bool], ...] = ()

    def config(self) -> DSV4Config:
        cfg = getattr(DSV4Config, self.model)()
        if self.context > cfg.max_position_embeddings:
            raise BenchmarkError(f"context {self.context}: {self.model} has at most {cfg.max_position_embeddings}")
        return dataclasses.replace(cfg, layer_types=cfg.layer_types[: self.layers]) if self.layers else cfg


class StepSetup(NamedTuple):
    """What a call of these options works on and does.

    Attributes:
        layout, size: of the cache.
        plan: of a step in which every request feeds its last token, on the host.
        call: (cache, layers, plan, x [batch, hidden] float32) -> (cache, x), to be jitted with cache and x donated.
    """

    layout: CacheLayout
    size: CacheSize
    plan: PackedPlan
    call: Callable[[KVCache, PackedLayers, PackedPlan, jax.Array], tuple[KVCache, jax.Array]]


def set_up(options: StepOptions) -> StepSetup:
    """Raises `BenchmarkError`: the context exceeds the model's."""
    cfg = options.config()
    layout = CacheLayout(cfg, key_split=options.key_split)
    columns = layout.blocks_for(options.context)
    size = CacheSize(options.batch * columns, options.batch, columns)
    rows = [StepSequence(slot + 1, options.context - 1, 1) for slot in range(options.batch)]

    def step(cache: KVCache, layers: PackedLayers, plan: PackedPlan, x: jax.Array) -> tuple[KVCache, jax.Array]:
        begun = cache.begin(plan, options.implementation)
        for i, p in enumerate(layers):
            y, layer = attention(p["attn"], begun.layer(i), rms_norm(x, None, cfg.rms_norm_eps))
            x, begun = x + y, layer.step
        return begun.finish(), x

    def call(cache: KVCache, layers: PackedLayers, plan: PackedPlan, x: jax.Array) -> tuple[KVCache, jax.Array]:
        if options.loop == 1:
            return step(cache, layers, plan, x)
        return jax.lax.fori_loop(0, options.loop, lambda _, carry: step(carry[0], layers, plan, carry[1]), (cache, x))

    return StepSetup(layout, size, build_plan(layout, rows, shape_for(layout, rows), size=size).pack(), call)


def measure_step(options: StepOptions, ceilings: Ceilings | None) -> dict[str, Any]:
    """Runs the step and returns what was seen, ready for JSON. Without ceilings there is no floor to compare it with.

    Raises:
        BenchmarkError: the context exceeds the model's, or the step gives numbers that are not finite.
    """
    cfg = options.config()
    layout, size, plan, call = set_up(options)
    key = jax.random.key(0)
    params = random_layers(cfg, key)
    cache = random_cache(layout, size, key)
    plan = jax.device_put(plan)
    x = jax.random.normal(key, (options.batch, cfg.hidden_size), jnp.float32)

    # The activations are donated too: a command buffer is launched as it is while its buffers keep their addresses.
    start = time.perf_counter()
    chosen = GPU_DECODE_OPTIONS | dict(options.xla)
    jitted = jax.jit(call, donate_argnums=(0, 3), compiler_options=chosen)
    compiled = jitted.lower(cache, params, plan, x).compile()
    compile_s = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None
    report: dict[str, Any] = dict(
        model=options.model, layers=cfg.num_layers, batch=options.batch, context=options.context,
        loop=options.loop, implementation=options.implementation or "default", key_split=options.key_split,
        xla=chosen, compile_s=compile_s,
        cache_gb=layout.total_bytes(size) / 1e9,
        cache_in_place=memory.alias_size_in_bytes == layout.total_bytes(size) + x.nbytes,
        temp_mb=memory.temp_size_in_bytes / 1e6,
        command_buffers=text.count("command_buffer"), custom_calls=text.count("custom-call("),
    )  # fmt: skip

    for _ in range(2):
        cache, x = compiled(cache, params, plan, x)
    if not bool(jnp.isfinite(x).all()):
        raise BenchmarkError("the step gave numbers that are not finite")
    walls, firsts, issues = [], [], []
    for _ in range(5):
        start = time.perf_counter()
        cache, x = compiled(cache, params, plan, x)
        firsts.append(time.perf_counter() - start)
        for _ in range(options.steps - 1):
            cache, x = compiled(cache, params, plan, x)
        issues.append((time.perf_counter() - start) / options.steps)
        jax.block_until_ready(x)
        walls.append((time.perf_counter() - start) / options.steps)
    step_s = min(walls) / options.loop
    # Host time of a call: with nothing queued, and of calls issued one after the other.
    first_us, issue_us = min(firsts) * 1e6 / options.loop, min(issues) * 1e6 / options.loop
    report |= dict(step_ms=step_s * 1e3, first_dispatch_us=first_us, dispatch_us=issue_us)

    if ceilings is not None:
        parts = floors(layout, params, options.batch, options.context)
        floor_us = {name: ceilings.floor_us(bytes_, flops) for name, bytes_, flops in parts}
        moved = sum(bytes_ for _, bytes_, _ in parts)
        total = sum(floor_us.values())
        over, rate = 1e6 * step_s / total, moved / step_s / 1e9
        report |= dict(floor_us=floor_us, floor_ms=total / 1e3, over_floor=over, gb_per_s=rate)
    report |= dict(kernel_ms=None, kernels=None)
    if options.profile or jax.default_backend() == "gpu":
        report |= _profile(lambda: compiled(cache, params, plan, x), options.profile, options.loop)
    return report


def _profile(call: Callable[[], Any], keep: pathlib.Path | None, steps: int) -> dict[str, Any]:
    """Kernel time of one step of a call, and of each of its twenty longest kernels."""
    times = {name: us / steps for name, us in profiled(call, keep).items()}
    if not times:
        return {}
    longest = sorted(times, key=lambda name: -times[name])[:20]
    return {"kernel_ms": sum(times.values()) / 1e3, "kernels": {name: times[name] for name in longest}}


def neutral_layers(cfg: DSV4Config) -> PackedLayers:
    """The layers' "attn" parameters as they are decoded with, stacked and packed: unit norms, the rest 0."""

    def neutral(path: tuple, spec: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(spec.shape, "norm" in jax.tree_util.keystr(path), spec.dtype)

    specs = ({"attn": layer["attn"]} for layer in param_specs(cfg, jnp.bfloat16)["layers"])
    layers = tuple(jax.tree_util.tree_map_with_path(neutral, layer) for layer in specs)
    return pack_layers(stack_projections({"layers": layers}))["layers"]


def random_layers(cfg: DSV4Config, key: jax.Array) -> PackedLayers:
    """`neutral_layers` with normal matrices scaled by their width."""

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
    """A cache full of valid rows and a block table that scatters every request over the pool."""
    cache = init_cache(layout, size)
    arrays = dict(cache.arrays)
    rows = {"index": layout.index_row} | dict.fromkeys(("swa", "csa", "hca"), layout.kv_row)
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


def floors(layout: CacheLayout, params: PackedLayers, batch: int, context: int) -> list[tuple[str, float, float]]:
    """(part, bytes, FLOPs) of one step: every weight and every visible row read once.

    Queries and outputs count as bf16, the least a step could keep them in.
    """
    cfg, rows = layout.cfg, []
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    matrices = sum(math.prod(x.shape) for x in jax.tree.leaves(params) if x.ndim >= 2 and x.dtype == jnp.bfloat16)
    rows.append(("projections", float(weights), 2.0 * matrices * batch))
    for attn in AttentionType:
        same = [schema for schema in layout.schemas if schema.attn is attn]
        if not same:
            continue
        layers, schema = len(same), same[0]
        entries = context // schema.ratio if schema.ratio else 0
        if schema.index_keys is not None:
            keys = entries * layout.row_format(schema.index_keys).row_bytes
            flops = 2.0 * cfg.index_n_heads * schema.index_keys.width * entries
            rows.append(("index_scores", float(layers * batch * keys), layers * batch * flops))
        if schema.selected_entries:
            entries = min(entries, schema.selected_entries)
        seen, width = schema.swa_window_size + entries, cfg.num_attention_heads * schema.entry_head_dim
        bytes_ = layers * batch * (seen * layout.row_format(schema.window).row_bytes + 4 * width)
        rows.append((f"attend {attn.name}", float(bytes_), layers * batch * 4.0 * width * seen))
    return rows
