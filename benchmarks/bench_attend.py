"""attend on a GPU: every implementation at the named shapes, checked against the reference, then timed.

    python benchmarks/bench_attend.py [--implementations cuda,pallas,xla] [--json]

Time of a call = (time of 24 calls in one executable - time of 8) / 16, best of several repeats; every call of an
executable has its own queries and row ids (uniform over a pool of 0.6 GB), so rows come from device memory.
Bytes count the key rows alone (584 each). The copy ceiling is measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.formats import kv_format
from dsv4_jax.ops import attend

FMT = kv_format("fp8", 512, 64)
ROW_BYTES = FMT.row_bytes
SCALE = 512**-0.5
# name: (heads, window, entries, batches)
SHAPES = {
    "CSA Flash": (64, 128, 512, (1, 16, 64, 128, 256)),
    "HCA Flash 128K": (64, 128, 1024, (1, 64, 256)),
    "CSA Pro": (128, 128, 1024, (1, 64, 256)),
}
FEW, MANY = 8, 24


def make_pool(key: jax.Array, rows: int) -> tuple[jax.Array, ...]:
    """Random finite rows of values near 1."""
    a, b, c = jax.random.split(key, 3)
    nope = jax.random.bits(a, (rows, 448), jnp.uint8) & np.uint8(0xFE)
    rope = jax.lax.bitcast_convert_type(jax.random.normal(b, (rows, 64), jnp.bfloat16), jnp.uint16)
    return nope, rope, jax.random.randint(c, (rows, 8), 116, 123, jnp.int32).astype(jnp.uint8)


def make_calls(key: jax.Array, calls: int, batch: int, heads: int, window: int, entries: int, rows: int):
    """Arguments of `calls` calls that differ between them."""
    out = []
    for k in jax.random.split(key, calls):
        a, b, c = jax.random.split(k, 3)
        start = jax.random.randint(b, (batch, 1), 0, rows - window, jnp.int32)
        out.append(
            (
                jax.random.normal(a, (batch, heads, 512), jnp.bfloat16),
                start + jnp.arange(window, dtype=jnp.int32),
                jnp.ones((batch, window), jnp.bool),
                jax.random.randint(c, (batch, entries), 0, rows, jnp.int32),
                jnp.full(batch, entries, jnp.int32),
            )
        )
    return out


def run(pool, sink, calls, implementation):
    results = []
    for q, w_ids, visible, e_ids, count in calls:
        results.append(
            attend(
                q, sink, pool, w_ids, visible, pool, e_ids, count, scale=SCALE, fmt=FMT, implementation=implementation
            )
        )
    return results


def seconds(f, *args, repeats: int = 12) -> float:
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def copy_ceiling() -> float:
    """Bytes read and written per second by an elementwise kernel over 2 GiB."""
    x = jnp.zeros(1 << 29, jnp.int32)
    f = jax.jit(lambda x: x + np.int32(1))
    return 2 * x.nbytes / seconds(f, x)


def error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def is_batch_invariant(pool, sink, call, implementation) -> bool:
    """Whether the rows of a batch of 256 have the same bits at batch 1, 2, 16 and 64."""
    f = jax.jit(functools.partial(run, implementation=implementation))
    whole = f(pool, sink, [call])[0]
    for size in (1, 2, 16, 64):
        for first in (0, 100):
            part = f(pool, sink, [tuple(x[first : first + size] for x in call)])[0]
            if not all(np.array_equal(a[first : first + size], b) for a, b in zip(whole, part, strict=True)):
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", default="cuda,pallas,xla")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    key = jax.random.key(0)
    rows = 1 << 20
    pool = make_pool(key, rows)
    ceiling = copy_ceiling()
    records = []
    for name, (heads, window, entries, batches) in SHAPES.items():
        sink = jax.random.normal(key, (heads,), jnp.float32)
        few = make_calls(jax.random.fold_in(key, 1), 1, 4, heads, window, entries, rows)
        want = jax.jit(functools.partial(run, implementation="xla"))(pool, sink, few)[0]
        for implementation in options.implementations.split(","):
            f = jax.jit(functools.partial(run, implementation=implementation))
            got = f(pool, sink, few)[0]
            out_error, lse_error = error(got[0], want[0]), float(np.abs(got[1] - want[1]).max())
            assert out_error <= 3e-3 and lse_error <= 1e-3, (name, implementation, out_error, lse_error)
            for batch in batches:
                calls = make_calls(jax.random.fold_in(key, batch), MANY, batch, heads, window, entries, rows)
                if implementation == "xla" and batch > 64:
                    continue
                us = 1e6 * (seconds(f, pool, sink, calls) - seconds(f, pool, sink, calls[:FEW])) / (MANY - FEW)
                moved, flops = batch * (window + entries) * ROW_BYTES, 4 * heads * 512 * (window + entries) * batch
                record = dict(
                    shape=name, implementation=implementation, batch=batch, us=round(us, 1),
                    gb_per_s=round(moved / us / 1e3), tflop_per_s=round(flops / us / 1e6, 1),
                    of_copy=round(moved / us * 1e6 / ceiling, 3), relative_l2=round(out_error, 5),
                )  # fmt: skip
                records.append(record)
                if not options.json:
                    print(record, flush=True)
            if implementation != "xla" and 256 in batches:
                calls = make_calls(jax.random.fold_in(key, 7), 1, 256, heads, window, entries, rows)
                assert is_batch_invariant(pool, sink, calls[0], implementation), (name, implementation)
    if options.json:
        print(json.dumps({"device": jax.devices()[0].device_kind, "copy_gb_per_s": ceiling / 1e9, "calls": records}))
    else:
        print(f"copy ceiling {ceiling / 1e9:.0f} GB/s; every row's bits are the same at batch 1, 2, 16, 64 and 256")


if __name__ == "__main__":
    main()
