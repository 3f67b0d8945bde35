"""What context parallelism costs a GPU, on one: `key_split="context"` beside attend, a rank's share, its selection.

    python benchmarks/bench_context.py [--json FILE] [--quick]

Times are of one call, by the profiler's kernel times where there is a GPU, over several calls with inputs of their own.
"plain": `ops.attend`. "context": the same keys in eight parts by their blocks (`ops.attend_parts`). "share/n": what one
of n ranks computes, without the exchange. "merge/n": the selection of n ranks' candidates, beside "top_k" of the scores
that one device has.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import formats
from dsv4_jax.bench.timing import flush_l2, profiled
from dsv4_jax.ops.append import WindowView
from dsv4_jax.ops.attend import attend
from dsv4_jax.ops.attend_parts import attend_parts
from dsv4_jax.ops.merge import merge_candidates
from dsv4_jax.ops.pool_axis import ONE_RANK, PoolAxis
from dsv4_jax.ops.top_k import top_k

HEADS, DIM, WINDOW, BLOCKS = 64, 512, 128, 8192
CASES = {  # name: (entries of a block, selected or None, context, batches)
    "csa-128k": (32, 512, 1 << 17, (1, 16, 64, 256)),
    "hca-128k": (1, None, 1 << 17, (1, 64)),
}
CALLS = 8


def pool(rows: int, key: Any) -> tuple[jax.Array, ...]:
    fmt = formats.kv_format("fp8", DIM, 64)
    keys = jax.random.split(key, 2)
    nope = jax.random.randint(keys[0], (rows, 448), 0, 0x77, jnp.uint8)
    rope = jax.random.normal(keys[1], (rows, 64), jnp.bfloat16)
    made = {
        "nope": nope,
        "rope": jax.lax.bitcast_convert_type(rope, jnp.uint16),
        "scale": jnp.full((rows, 8), 120, jnp.uint8),
    }
    return tuple(made[part.name].astype(part.dtype) for part in fmt.parts)


def us_of(call: Callable[..., Any], inputs: list[Any], shared: Any) -> dict[str, float]:
    """Times of one call: by the clock, and by its kernels."""
    step = jax.jit(lambda shared, inputs: [call(shared, *x) for x in inputs])
    few, flush = inputs[: len(inputs) // 4], flush_l2()
    best = []
    for some in (few, inputs):
        jax.block_until_ready(step(shared, some))
        took = []
        for _ in range(10):
            flush()
            start = time.perf_counter()
            jax.block_until_ready(step(shared, some))
            took.append(time.perf_counter() - start)
        best.append(min(took))
    wall = 1e6 * (best[1] - best[0]) / (len(inputs) - len(few))
    if jax.default_backend() != "gpu":
        return {"us": wall}
    flush()
    kernels = profiled(lambda: step(shared, inputs))
    return {"us": wall, "kernel_us": sum(kernels.values()) / len(inputs)}


def attention(name: str, batch: int) -> list[dict[str, Any]]:
    per_block, selected, context, _ = CASES[name]
    columns, fmt = context // 128, formats.kv_format("fp8", DIM, 64)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    entries, window_rows = pool(BLOCKS * per_block, next(keys)), pool(batch * WINDOW, next(keys))
    sink, freq = jnp.zeros(HEADS, jnp.float32), jnp.linspace(1, 0.01, 32, dtype=jnp.float32)
    window = WindowView(
        window_rows, jnp.arange(batch * WINDOW, dtype=jnp.int32).reshape(batch, -1), jnp.ones((batch, WINDOW), bool)
    )
    position = jnp.full(batch, context - 1, jnp.int32)
    inputs = []
    for i in range(CALLS):
        rng = np.random.default_rng(i)
        q = jax.random.normal(next(keys), (batch, HEADS, DIM), jnp.bfloat16)
        table = jnp.asarray(rng.integers(1, BLOCKS, (batch, columns)), jnp.int32)
        total = columns * per_block
        picked = rng.permuted(np.tile(np.arange(total), (batch, 1)), axis=1)[:, :selected] if selected else None
        listed = jnp.asarray(picked, jnp.int32) if selected else jnp.zeros((batch, 0), jnp.int32)
        inputs.append((q, table, listed))
    shared = (entries, window, sink, freq, position)
    count = jnp.full(batch, selected or columns * per_block, jnp.int32)
    how = dict(scale=DIM**-0.5, fmt=fmt, dtype=jnp.bfloat16)

    def rows(table: jax.Array, tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        return table[tokens[:, None], chosen // per_block] * per_block + chosen % per_block

    def plain(shared: Any, q: jax.Array, table: jax.Array, listed: jax.Array) -> Any:
        entries, window, sink, freq, position = shared
        if not selected:
            listed = jnp.broadcast_to(jnp.arange(columns * per_block, dtype=jnp.int32), (batch, columns * per_block))
        ids = rows(table, jnp.arange(batch, dtype=jnp.int32), listed)
        return attend(q, sink, window, entries, ids, count, inverse_rope=(position, freq), **how)[0]

    def cut(axis: PoolAxis, parts: int) -> Callable[..., Any]:
        def call(shared: Any, q: jax.Array, table: jax.Array, listed: jax.Array) -> Any:
            entries, window, sink, freq, position = shared
            return attend_parts(
                q, sink, window, entries, listed if selected else None, count,
                rows_of=lambda tokens, chosen: rows(table, tokens, chosen), axis=axis, parts=parts, heads=HEADS,
                per_block=per_block, columns=columns, inverse_rope=(position, freq), **how,
            )[0]  # fmt: skip

        return call

    ways = {"plain": plain, "context": cut(ONE_RANK, 8)}
    ways |= {f"share/{n}": cut(PoolAxis(None, n), n) for n in (2, 8)}  # as rank 0
    found = {way: us_of(call, inputs, shared) for way, call in ways.items()}
    whole, parts = (np.asarray(jax.jit(ways[w])(shared, *inputs[0]), np.float32) for w in ("plain", "context"))
    apart = float(np.abs(whole - parts).max() / np.abs(whole).max())
    return [{"case": name, "batch": batch, "way": way, **times, "apart": apart} for way, times in found.items()]


def selection(batch: int, context: int = 1 << 17, k: int = 512) -> list[dict[str, Any]]:
    total, out = context // 4, []
    rngs = [np.random.default_rng(i) for i in range(CALLS)]
    scores = [(jnp.asarray(rng.random((batch, total)), jnp.float32),) for rng in rngs]
    count = jnp.full(batch, total, jnp.int32)
    one = us_of(lambda _, s: top_k(s, count, k=k)[0], scores, ())
    out.append({"case": "select", "batch": batch, "way": "top_k", **one})
    for n in (2, 8):
        some = [
            (s[:, : n * k], jnp.asarray(rng.permuted(np.tile(np.arange(n * k), (batch, 1)), axis=1), jnp.int32))
            for (s,), rng in zip(scores, rngs, strict=True)
        ]
        times = us_of(lambda _, s, ids: merge_candidates(s, ids, k=k), some, ())
        out.append({"case": "select", "batch": batch, "way": f"merge/{n}", **times})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one small batch of each")
    args = parser.parse_args()
    results = []
    for name, (*_, batches) in CASES.items():
        for batch in batches[:1] if args.quick else batches:
            results += attention(name, batch)
    for batch in (1,) if args.quick else (1, 64):
        results += selection(batch)
    base = {(r["case"], r["batch"]): r.get("kernel_us", r["us"]) for r in results if r["way"] in ("plain", "top_k")}
    for r in results:
        us = r.get("kernel_us", r["us"])
        print(
            f"{r['case']:9} {r['batch']:4} {r['way']:8} {us:9.1f} us  {us / base[r['case'], r['batch']]:5.2f}x",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": jax.devices()[0].device_kind, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
