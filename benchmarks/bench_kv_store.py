"""The store kernel of `KVPool`: rows of a program and warps against each other, and against the reference.

    python benchmarks/bench_kv_store.py [--storage bf16,fp8] [--tokens 65536] [--variants 1x4,4x4] [--json FILE]

The calls of `dsv4-jax bench kv_store` (K and V of 8 heads of 128, each call its own values and rows, spread at random
over pools of a million rows), timed the same way: kernel times of the profiler on a GPU. A variant is the rows of a
program x its warps. Before it is timed, all bytes of the pools after all of its calls are compared with the
reference's. Shares are of the copy ceiling (read + write) of the same run. Fails if a byte differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import shlex
import sys
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from dsv4_jax.bench.ceilings import measure_ceilings
from dsv4_jax.bench.measure import one_line
from dsv4_jax.bench.ops import Problem, problem
from dsv4_jax.bench.records import new_record
from dsv4_jax.bench.shapes import KVStoreShape
from dsv4_jax.bench.timing import call_count, time_problem
from dsv4_jax.pallas import kv_store
from dsv4_jax.pools.kv_pool import KVStoreArguments

KVStorage: TypeAlias = Literal["bf16", "fp8"]
STORAGE: tuple[KVStorage, ...] = get_args(KVStorage)
VARIANTS = "1x4,2x4,4x4,8x4,4x2,8x8"
MOST_CALLS = 8  # of an executable: each compiles its own kernel


def variant(base: Problem, storage: str, rows: int, warps: int) -> Problem:
    """The same calls by the kernel with these parameters, whatever implementation is named."""

    def apply(_: Any, pools: Any, call: Any, name: Any) -> tuple[Any, None]:
        return list(
            kv_store.call(KVStoreArguments(*pools, *call, storage=storage), per_program=rows, warps=warps)
        ), None

    return dataclasses.replace(base, apply=apply)


def after_all_calls(subject: Problem) -> Any:
    """The pools."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools: Any, calls: Any) -> Any:
        for call in calls:
            pools, _ = subject.apply((), pools, call, "xla")
        return pools

    return run(subject.carry(), subject.calls)


@jax.jit
def differing(a: Any, b: Any) -> jax.Array:
    """Elements that are not the same bits."""
    unequal = [jnp.sum(jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
                       != jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}"), dtype=jnp.int32)
               for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]  # fmt: skip
    return jnp.stack(unequal).sum()


def measure(storage: KVStorage, tokens: int, variants: list[tuple[int, int]], copy: float, quick: bool) -> list[dict]:
    shape = KVStoreShape(tokens, 8, 128, storage)
    calls = min(MOST_CALLS, call_count(shape.bytes_moved, quick=quick))
    base = problem("kv_store", shape, calls, pool_rows=1 << (10 if quick else 20))
    k, v, _ = base.calls[0]
    default = kv_store.rows_per_program(k, v), kv_store.WARPS
    subjects = {"xla": base} | {f"{rows}x{warps}": variant(base, storage, rows, warps) for rows, warps in variants}
    want, found = after_all_calls(base), []
    for name, subject in subjects.items():
        chosen = name in ("xla", f"{default[0]}x{default[1]}")
        row: dict[str, Any] = {"table": "ops", "op": "kv_store", "shape": storage, "batch": tokens}
        row |= {"implementation": "xla" if name == "xla" else "pallas", "bytes": shape.bytes_moved}
        row |= {} if chosen else {"variant": name, "tuning": True}
        try:
            wrong = int(differing(after_all_calls(subject), want))
            row["correct"] = wrong == 0
            timing = time_problem(subject, "xla" if name == "xla" else "pallas", repeats=2 if quick else 6)
            us = timing.us if timing.kernel_us is None else timing.kernel_us
            row |= {"timer": timing.timer, "us": timing.us, "kernel_us": timing.kernel_us, "kernels": timing.kernels}
            row["gb_per_s"] = shape.bytes_moved / us / 1e3
            row["of_copy"] = 1e6 * shape.bytes_moved / us / copy
            text = f"{us:10.1f} us {row['gb_per_s']:7.0f} GB/s {row['of_copy']:6.1%} of copy, {wrong} wrong"
        except Exception as error:  # a variant may not compile; the others still count
            row["problem"] = text = one_line(error)
        print(f"{storage} {tokens:6} {name:>5} {text}{'  (default)' if chosen else ''}", flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=lambda text: text.split(","), default=list(STORAGE), metavar="NAME,...")
    parser.add_argument("--tokens", default="65536", metavar="N,...")
    parser.add_argument("--variants", default=VARIANTS, metavar="ROWSxWARPS,...")
    parser.add_argument("--quick", action="store_true", help="a small pool and two repeats (the default on a CPU)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    quick = args.quick or jax.default_backend() != "gpu"
    variants = [(int(rows), int(warps)) for rows, warps in (text.split("x") for text in args.variants.split(","))]
    ceilings = measure_ceilings(quick=quick)
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: copy {ceilings.copy / 1e9:,.0f} GB/s, read + write")
    found = [
        row
        for storage in STORAGE
        if storage in args.storage
        for tokens in map(int, args.tokens.split(","))
        for row in measure(storage, tokens, variants, ceilings.copy, quick)
    ]
    if args.json:
        command = shlex.join(["python", *sys.argv])
        software = {"jax": jax.__version__}
        result = new_record(
            found, device=device, command=command, software=software, ceilings=ceilings.as_dict(), quick=quick
        )
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(any(row.get("correct") is False or "problem" in row for row in found))


if __name__ == "__main__":
    main()
