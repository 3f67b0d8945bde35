"""Times a whole decode step of the attention stack at full model size, as one executable, on one GPU.

    python benchmarks/bench_step.py --model flash --batch 64 --context 131072
    python benchmarks/bench_step.py --model pro --batch 64 --context 32768 --json step.json

Real projection sizes (bf16, random), FP8 cache, FP4 index keys, every request at the same context.
The step is compared with the sum of its floors: for every part the larger of bytes / copy rate and
FLOPs / matmul rate, both rates measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import KVCache, init_cache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager.planning import RowFeed, build_plan, shape_for
from dsv4_jax.model.attention import attention
from dsv4_jax.model.numerics import rms_norm
from dsv4_jax.model.params import param_specs


def random_params(specs: dict, key: jax.Array) -> dict:
    """One layer's "attn" parameters: normal matrices scaled by their width, unit norms, zero biases."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(specs)

    def draw(i: int, path: tuple, spec: jax.ShapeDtypeStruct) -> jax.Array:
        if spec.dtype != jnp.bfloat16:
            return jnp.full(spec.shape, "norm" in jax.tree_util.keystr(path), spec.dtype)
        return jax.random.normal(jax.random.fold_in(key, i), spec.shape, spec.dtype) * spec.shape[-1] ** -0.5

    return jax.tree.unflatten(tree, [draw(i, path, spec) for i, (path, spec) in enumerate(leaves)])


def random_cache(layout: CacheLayout, size: CacheSize, key: jax.Array) -> KVCache:
    """A cache full of valid rows and a block table that scatters every request over the pool."""

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def fill(key: jax.Array, name: str, shape: tuple[int, int], dtype: str) -> jax.Array:
        part = name.split(".")[1]
        if dtype == "float32":
            return jnp.abs(jax.random.normal(key, shape, jnp.float32))
        bits = jax.random.bits(key, shape, dtype)
        if part == "scale":
            return (bits % np.uint8(6)) + np.uint8(118)
        if part == "rope":  # bf16 in +-[0.5, 1)
            return (bits & np.uint16(0x807F)) | np.uint16(0x3F00)
        return bits & np.uint8(0xF7) if part == "nope" else bits  # no e4m3 NaN

    cache = init_cache(layout, size)
    arrays = dict(cache.arrays)
    for i, leaf in enumerate(layout.leaves):
        if leaf.scope != "table":
            arrays[leaf.name] = fill(jax.random.fold_in(key, i), leaf.name, arrays[leaf.name].shape, leaf.dtype)
    ids = np.random.default_rng(0).permutation(size.num_blocks)[: size.num_slots * size.max_blocks_per_request] + 1
    table = np.zeros(arrays["block_table.ids"].shape, np.int32)
    table[1 : size.num_slots + 1] = ids.reshape(size.num_slots, -1)
    arrays["block_table.ids"] = jnp.asarray(table)
    return KVCache(arrays, layout)


def floors(layout: CacheLayout, params: list, batch: int, context: int) -> list[tuple[str, float, float]]:
    """(part, bytes, FLOPs) of one step: every weight and every visible row read once."""
    cfg, rows = layout.cfg, []
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.ndim == 2 and x.dtype == jnp.bfloat16)
    rows.append(("projections", weights, 2.0 * matrices * batch))
    for attn in AttentionType:
        layers, ratio = cfg.count(attn), cfg.ratio(attn)
        entries = context // ratio if ratio else 0
        if attn is AttentionType.CSA:
            keys = entries * layout.index_row.row_bytes
            flops = 2.0 * cfg.index_n_heads * cfg.index_head_dim * entries
            rows.append(("index_scores", float(layers * batch * keys), layers * batch * flops))
            entries = min(entries, cfg.index_topk)
        seen = cfg.sliding_window + entries
        bytes_ = layers * batch * (seen * layout.kv_row.row_bytes + 4 * cfg.num_attention_heads * cfg.head_dim)
        rows.append((f"attend {attn.name}", float(bytes_), layers * batch * 4.0 * cfg.num_attention_heads * 512 * seen))
    return rows


def seconds(fn, *args, calls: int = 20) -> float:
    """Seconds per call, many calls per sync, best of three."""
    jax.block_until_ready(fn(*args))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def ceilings() -> tuple[float, float]:
    """(copy bytes per second, bf16 matmul FLOP per second) of this GPU, now."""
    on_gpu = jax.default_backend() == "gpu"
    x = jnp.ones((1 << 30 if on_gpu else 1 << 22,), jnp.uint32)
    copy = 2 * x.nbytes / seconds(jax.jit(lambda x: x + np.uint32(1)), x)
    n = 8192 if on_gpu else 256
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    return copy, 2 * n**3 / seconds(jax.jit(lambda a: a @ a), a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flash", "pro", "tiny"), default="flash")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--layers", type=int, help="only the first so many layers")
    parser.add_argument("--implementation", choices=("xla", "pallas", "cuda"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--profile", metavar="DIR", help="write a jax profiler trace of three steps")
    args = parser.parse_args()

    cfg = getattr(DSV4Config, args.model)()
    if args.layers:
        import dataclasses

        cfg = dataclasses.replace(cfg, layer_types=cfg.layer_types[: args.layers])
    layout = CacheLayout(cfg)
    columns = layout.blocks_for(args.context)
    size = CacheSize(args.batch * columns, args.batch, columns)
    report = dict(model=args.model, layers=cfg.num_layers, batch=args.batch, context=args.context)
    copy_rate, matmul_rate = ceilings()
    report |= dict(copy_GBps=copy_rate / 1e9, matmul_TFLOPs=matmul_rate / 1e12)

    key = jax.random.key(0)
    params = [
        jax.jit(functools.partial(random_params, layer["attn"]))(jax.random.fold_in(key, i))
        for i, layer in enumerate(param_specs(cfg, jnp.bfloat16)["layers"])
    ]
    cache = random_cache(layout, size, key)
    rows = [RowFeed(slot + 1, args.context - 1, 1) for slot in range(args.batch)]
    plan = build_plan(layout, rows, shape_for(layout, rows)).pack()
    x = jax.random.normal(key, (args.batch, cfg.hidden_size), jnp.float32)

    def step(cache: KVCache, params: list, plan, x: jax.Array) -> tuple[KVCache, jax.Array]:
        plan = plan.unpack()
        cache = cache.begin(plan)
        for spec, p in zip(layout.schedule, params, strict=True):
            handle = cache.layer(spec.layer_idx, plan, implementation=args.implementation)
            y, handle = attention(p, handle, rms_norm(x, None, cfg.rms_norm_eps))
            x, cache = x + y, handle.cache
        return cache, x

    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(cache, params, plan, x).compile()
    report["compile_s"] = time.perf_counter() - start
    memory = compiled.memory_analysis()
    report |= dict(
        cache_GB=layout.total_bytes(size) / 1e9, alias_is_cache=memory.alias_size_in_bytes == layout.total_bytes(size),
        temp_MB=memory.temp_size_in_bytes / 1e6,
    )  # fmt: skip
    text = compiled.as_text()
    report["command_buffers"] = text.count("command_buffer")
    report["custom_calls"] = text.count("custom-call(")

    jitted = jax.jit(step, donate_argnums=0)
    for _ in range(3):
        cache, out = jitted(cache, params, plan, x)
    jax.block_until_ready(out)
    assert bool(jnp.isfinite(out).all()), "the step gave non-finite numbers"
    walls, dispatches = [], []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(args.steps):
            cache, out = jitted(cache, params, plan, x)
        dispatches.append((time.perf_counter() - start) / args.steps)
        jax.block_until_ready(out)
        walls.append((time.perf_counter() - start) / args.steps)
    report |= dict(step_ms=min(walls) * 1e3, dispatch_us=min(dispatches) * 1e6)
    start = time.perf_counter()
    cache, out = jitted(cache, params, plan, x)
    report["first_dispatch_us"] = (time.perf_counter() - start) * 1e6
    jax.block_until_ready(out)

    parts = floors(layout, params, args.batch, args.context)
    floor = 0.0
    for name, bytes_, flops in parts:
        t = max(bytes_ / copy_rate, flops / matmul_rate)
        floor += t
        report[f"floor {name} us"] = t * 1e6
    report |= dict(floor_ms=floor * 1e3, ratio=min(walls) / floor, GBps=sum(b for _, b, _ in parts) / min(walls) / 1e9)
    if args.profile:
        with jax.profiler.trace(args.profile):
            for _ in range(3):
                cache, out = jitted(cache, params, plan, x)
            jax.block_until_ready(out)
    for name, value in report.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
