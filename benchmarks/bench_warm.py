"""Kernel times of the small write ops with everything they touch in L2, as peers' kernels are often timed.

    PYTHONPATH=. python benchmarks/bench_warm.py [--implementations cuda,pallas]

`dsv4-jax bench` times the same calls cold, which is how a decode step meets them. Mean of 16 calls of an executable,
from the profiler, after two executions on the same buffers.
"""

from __future__ import annotations

import argparse

import jax

from dsv4_jax.bench.ops import problem
from dsv4_jax.bench.shapes import CASES
from dsv4_jax.bench.timing import executable, profiled

SHAPES = {
    ("append", "fused"): (1, 64, 1024),
    ("compress_csa", "decode"): (1, 64),
    ("compress_csa", "decode-both"): (1, 64),
    ("compress_index", "decode"): (1, 64),
    ("compress_hca", "decode"): (1, 64),
}
CALLS = 16


def warm_us(op: str, name: str, batch: int, implementation: str) -> float:
    """us of kernel time a call."""
    (case,) = (case for case in CASES if (case.op, case.name) == (op, name))
    inputs = problem(op, case.make(batch), CALLS, pool_rows=1 << 16)

    step, carry = executable(inputs, implementation), inputs.carry()
    for _ in range(2):
        carry, outs = step(inputs.shared, carry, inputs.calls, CALLS)
    jax.block_until_ready((carry, outs))
    return sum(profiled(lambda: step(inputs.shared, carry, inputs.calls, CALLS)).values()) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", default="cuda,pallas", metavar="NAME,...")
    names = parser.parse_args().implementations.split(",")
    for (op, shape), batches in SHAPES.items():
        for batch in batches:
            times = "  ".join(f"{name} {warm_us(op, shape, batch, name):6.2f}" for name in names)
            print(f"{op:15} {shape:12} {batch:5}  {times}", flush=True)


if __name__ == "__main__":
    main()
