"""What context parallelism costs a GPU, on one: `key_split="context"` beside attend, a rank's share, its selection.

    python benchmarks/bench_context.py [--json FILE] [--quick] [--kernels]

Times are of one call, by the profiler's kernel times where there is a GPU, over several calls with inputs of their own.
"plain": `ops.attend`. "context": the same keys in eight parts by their blocks (`ops.attend_parts`). "parts/2": what two
ranks compute together, their outputs over the normal cut, on one device. "share/n": what one of n ranks computes,
without the exchange. "merge/n": the selection of n ranks' candidates, beside "top_k" of the scores that one device has.

"error": norm of the float32 output's difference to float64's, over the norm of that. "rounded": the same of the bf16
output. "from plain": of the difference of the two float32 outputs. "steps": the largest difference of the bf16 outputs,
in steps of bf16 at the largest output of its row (a step is 2^-8 to 2^-7 of it): two numbers closer than one float32
step can round to neighbours.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Recorder, jax_device, parser

from dsv4_jax import formats
from dsv4_jax.bench.timing import flush_l2, profiled
from dsv4_jax.ops.append import WindowView, load
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
CHECKED = 4  # tokens whose outputs are compared with float64
FIGURES = ("error", "rounded", "from_plain", "steps")
FMT = formats.kv_format("fp8", DIM, 64)


def pool(rows: int, seed: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    rope = np.asarray(rng.normal(size=(rows, 64)), jnp.bfloat16).view(np.uint16)
    nope = rng.integers(0, 0x77, (rows, 448), np.uint8)
    made = {"nope": nope, "rope": rope, "scale": np.full((rows, 8), 120, np.uint8)}
    return tuple(jnp.asarray(made[part.name]) for part in FMT.parts)


def time_of(call: Callable[..., Any], shared: Any, inputs: tuple[jax.Array, ...]) -> tuple[dict[str, Any], Any]:
    """Returns the times of one call, by the clock and by its kernels, and what it gives."""
    step = jax.jit(lambda shared, inputs: jax.lax.map(lambda x: call(shared, *x), inputs))
    out, flush, took = jax.block_until_ready(step(shared, inputs)), flush_l2(), []
    for _ in range(10):
        flush()
        start = time.perf_counter()
        jax.block_until_ready(step(shared, inputs))
        took.append(time.perf_counter() - start)
    times: dict[str, Any] = {"us": 1e6 * min(took) / CALLS}
    if jax.default_backend() == "gpu":
        flush()
        kernels = {name: us / CALLS for name, us in profiled(lambda: step(shared, inputs)).items()}
        times["kernel_us"] = sum(kernels.values())
        times["kernels"] = dict(sorted(kernels.items(), key=lambda kernel: -kernel[1]))
    return times, out


def relative(x: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(x, float) - expected) / np.linalg.norm(expected))


def exact(q: Any, keys: list[Any]) -> np.ndarray:
    """Computes attend with a sink of 0 in float64, of the first tokens: [tokens, heads, dim]."""
    outs = []
    for mine, rows in zip(np.asarray(q, float), keys, strict=False):
        weights = np.exp(mine @ rows.T * DIM**-0.5)
        outs.append(weights @ rows / (weights.sum(-1, keepdims=True) + 1))
    return np.stack(outs)


def decoded(rows: tuple[jax.Array, ...], ids: Any) -> np.ndarray:
    return np.asarray(formats.codec(FMT).decode(FMT, load(rows, jnp.asarray(ids)), jnp.float32), float)


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
    how: dict[str, Any] = dict(scale=DIM**-0.5, fmt=FMT, key_split="throughput", implementation=None)

    def rows(table: jax.Array, tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        return table[tokens[:, None], chosen // per_block] * per_block + chosen % per_block

    def plain(shared: Any, q: jax.Array, table: jax.Array, listed: jax.Array, **last: Any) -> jax.Array:
        entries, window, sink, freq, position = shared
        here = rows(table, jnp.arange(batch, dtype=jnp.int32), listed)
        last = last or dict(inverse_rope=(position, freq), dtype=jnp.bfloat16)
        return attend(q, sink, window, entries, here, count, **last, **how)[0]

    def cut(axis: PoolAxis, parts: int) -> Callable[..., jax.Array]:
        def call(shared: Any, q: jax.Array, table: jax.Array, listed: jax.Array, **last: Any) -> jax.Array:
            entries, window, sink, freq, position = shared
            last = last or dict(inverse_rope=(position, freq), dtype=jnp.bfloat16)
            return attend_parts(
                q,
                sink,
                window,
                entries,
                listed if selected else None,
                count,
                rows_of=lambda tokens, chosen: rows(table, tokens, chosen),
                axis=axis,
                parts=parts,
                heads=HEADS,
                per_block=per_block,
                columns=columns,
                **last,
                **how,
            )[0]

        return call

    first = tuple(x[0] for x in inputs)
    chosen = np.asarray(rows(first[1], jnp.arange(batch, dtype=jnp.int32), first[2]))[:CHECKED]
    keys = [np.concatenate([decoded(window_rows, ids[t]), decoded(entries, chosen[t])]) for t in range(len(chosen))]
    expected, whole = exact(first[0], keys), dict[str, np.ndarray]()
    ways = {
        "plain": plain,
        "context": cut(ONE_RANK, 8),
        "parts/2": cut(ONE_RANK, 2),
        "share/2": cut(PoolAxis(None, 2), 2),
    }
    for way, call in ways.items():
        times, out = time_of(call, shared, inputs)
        found = {"case": name, "batch": batch, "way": way, **times}
        if way != "share/2":
            asked = dict(inverse_rope=None, dtype=jnp.float32)
            as32 = np.asarray(jax.jit(functools.partial(call, **asked))(shared, *first))[: len(expected)]
            as16 = np.asarray(jnp.asarray(as32, jnp.bfloat16), np.float32)
            turned = np.asarray(out, np.float32)
            whole = whole or {"as32": as32, "turned": turned}
            step = 2.0 ** (np.floor(np.log2(np.abs(whole["turned"]).max(-1, keepdims=True))) - 7)
            found |= {"error": relative(as32, expected), "rounded": relative(as16, expected)}
            found |= {"from_plain": relative(as32, whole["as32"].astype(float))}
            found["steps"] = float((np.abs(turned - whole["turned"]) / step).max())
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
    """Runs the command line."""
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="one token of each")
    command.add_argument("--kernels", action="store_true", help="print the times of kernels")
    args = command.parse_args()
    recorder, base = Recorder(args.json, **jax_device(), quick=args.quick), 1.0
    for one in measured(args.quick):
        us = one.get("kernel_us", one["us"])
        if one["way"] in ("plain", "top_k"):
            base = us
        what = f"{one['case']}, {one['batch']} token{'s' * (one['batch'] > 1)}, {one['way']}"
        recorder.fact("context", what, us, "us")
        if "error" in one:
            name = f"{what}: float32 output from float64's"
            recorder.fact("context", name, 1e4 * one["error"], "1e-4 relative L2")
        figures = [f"{figure.replace('_', ' ')} {one[figure]:.1e}" for figure in FIGURES if figure in one]
        print(f"    {us / base:5.2f}x ", *figures, flush=True)
        for kernel, took in one.get("kernels", {}).items() if args.kernels else ():
            print(f"    {took:8.1f} us  {kernel}")


if __name__ == "__main__":
    main()
