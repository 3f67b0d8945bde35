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
import pathlib
import time
from collections.abc import Callable, Iterator
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
    "csa-128k": (32, 512, 1 << 17, (64, 1)),
    "hca-128k": (1, None, 1 << 17, (64,)),
}
CALLS = 8
FMT = formats.kv_format("fp8", DIM, 64)


def pool(rows: int, seed: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    rope = np.asarray(rng.normal(size=(rows, 64)), jnp.bfloat16).view(np.uint16)
    nope = rng.integers(0, 0x77, (rows, 448), np.uint8)
    made = {"nope": nope, "rope": rope, "scale": np.full((rows, 8), 120, np.uint8)}
    return tuple(jnp.asarray(made[part.name]) for part in FMT.parts)


def time_of(call: Callable[..., Any], shared: Any, inputs: tuple[jax.Array, ...]) -> tuple[dict[str, float], Any]:
    """Times of one call, by the clock and by its kernels, and what it gives."""
    step = jax.jit(lambda shared, inputs: jax.lax.map(lambda x: call(shared, *x), inputs))
    out, flush, took = jax.block_until_ready(step(shared, inputs)), flush_l2(), []
    for _ in range(10):
        flush()
        start = time.perf_counter()
        jax.block_until_ready(step(shared, inputs))
        took.append(time.perf_counter() - start)
    times = {"us": 1e6 * min(took) / CALLS}
    if jax.default_backend() == "gpu":
        flush()
        times["kernel_us"] = sum(profiled(lambda: step(shared, inputs)).values()) / CALLS
    return times, out


def attention(name: str, batch: int) -> Iterator[dict[str, Any]]:
    per_block, selected, context, _ = CASES[name]
    columns, rng = context // 128, np.random.default_rng(0)
    total = columns * per_block
    entries, window_rows = pool(BLOCKS * per_block, 1), pool(batch * WINDOW, 2)
    sink, freq = jnp.zeros(HEADS, jnp.float32), jnp.linspace(1, 0.01, 32, dtype=jnp.float32)
    ids = jnp.arange(batch * WINDOW, dtype=jnp.int32).reshape(batch, -1)
    window, position = WindowView(window_rows, ids, jnp.ones_like(ids, bool)), jnp.full(batch, context - 1, jnp.int32)
    picked = np.stack([[rng.permutation(total)[:selected] for _ in range(batch)] for _ in range(CALLS)])
    inputs = (
        jnp.asarray(rng.normal(size=(CALLS, batch, HEADS, DIM)), jnp.bfloat16),
        jnp.asarray(rng.integers(1, BLOCKS, (CALLS, batch, columns)), jnp.int32),
        jnp.asarray(picked if selected else np.tile(np.arange(total), (CALLS, batch, 1)), jnp.int32),
    )
    shared = (entries, window, sink, freq, position)
    count = jnp.full(batch, selected or total, jnp.int32)
    how = dict(scale=DIM**-0.5, fmt=FMT)

    def rows(table: jax.Array, tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        return table[tokens[:, None], chosen // per_block] * per_block + chosen % per_block

    def plain(shared: Any, q: jax.Array, table: jax.Array, listed: jax.Array) -> jax.Array:
        entries, window, sink, freq, position = shared
        here = rows(table, jnp.arange(batch, dtype=jnp.int32), listed)
        return attend(q, sink, window, entries, here, count, inverse_rope=(position, freq), dtype=jnp.bfloat16, **how)[
            0
        ]

    def cut(axis: PoolAxis, parts: int) -> Callable[..., jax.Array]:
        def call(shared: Any, q: jax.Array, table: jax.Array, listed: jax.Array) -> jax.Array:
            entries, window, sink, freq, position = shared
            return attend_parts(
                q, sink, window, entries, listed if selected else None, count,
                rows_of=lambda tokens, chosen: rows(table, tokens, chosen), axis=axis, parts=parts, heads=HEADS,
                per_block=per_block, columns=columns, inverse_rope=(position, freq), dtype=jnp.bfloat16, **how,
            )[0]  # fmt: skip

        return call

    whole = None
    for way, call in (("plain", plain), ("context", cut(ONE_RANK, 8)), ("share/2", cut(PoolAxis(None, 2), 2))):
        times, out = time_of(call, shared, inputs)
        found = {"case": name, "batch": batch, "way": way, **times}
        whole = whole if whole is not None else np.asarray(out, np.float32)
        if way == "context":
            found["apart"] = float(np.abs(np.asarray(out, np.float32) - whole).max() / np.abs(whole).max())
        yield found


def selection(batch: int, context: int = 1 << 17, k: int = 512) -> Iterator[dict[str, Any]]:
    total, rng = context // 4, np.random.default_rng(0)
    scores, count = jnp.asarray(rng.random((CALLS, batch, total)), jnp.float32), jnp.full(batch, total, jnp.int32)
    times, _ = time_of(lambda _, s: top_k(s, count, k=k)[0], (), (scores,))
    yield {"case": "select", "batch": batch, "way": "top_k", **times}
    for n in (2, 8):
        ids = np.stack([[rng.permutation(n * k) for _ in range(batch)] for _ in range(CALLS)])
        some = (scores[:, :, : n * k], jnp.asarray(ids, jnp.int32))
        times, _ = time_of(lambda _, s, ids: merge_candidates(s, ids, k=k), (), some)
        yield {"case": "select", "batch": batch, "way": f"merge/{n}", **times}


def measured(quick: bool) -> Iterator[dict[str, Any]]:
    for name, (*_, batches) in CASES.items():
        for batch in (1,) if quick else batches:
            yield from attention(name, batch)
    yield from selection(1 if quick else 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one token of each")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    base = 1.0
    for one in measured(args.quick):
        results.append(one)
        us = one.get("kernel_us", one["us"])
        if one["way"] in ("plain", "top_k"):
            base = us
        apart = f"  apart {one['apart']:.1e}" if "apart" in one else ""
        print(f"{one['case']:9} {one['batch']:4} {one['way']:8} {us:9.1f} us  {us / base:5.2f}x{apart}", flush=True)
        if args.json:  # what there is, whatever comes after
            device = jax.devices()[0].device_kind
            pathlib.Path(args.json).write_text(json.dumps({"device": device, "results": results}, indent=1))


if __name__ == "__main__":
    main()
