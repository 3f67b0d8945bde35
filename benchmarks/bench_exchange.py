"""The exchange between GPUs (csrc/exchange.cu) against XLA's collectives. Needs two GPUs or more.

    python benchmarks/bench_exchange.py [--json FILE] [--sizes 512,16,128,1024,2048] [--quick]

A time is that of one exchange among many in one executable, each the operand of the next: the difference between a long
chain and a short one, over the difference in length. A size is what a GPU sends to one other, in KiB. The ceiling is a
copy of 1 GiB from one GPU's memory to the other's.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax.bench.records import dumps, new_record
from dsv4_jax.bench.targets import TARGETS, Target, verdict
from dsv4_jax.cuda.exchange import Exchange
from dsv4_jax.model import GPU_DECODE_OPTIONS
from dsv4_jax.ops import all_gather, sum_to_all, sum_to_owner

AXIS = "devices"
SHORT, LONG = 20, 120  # exchanges in a chain
CALLS, REPEATS = 6, 7
MOST_PACKETS = 512  # KiB
Step = Callable[[jax.Array], jax.Array]


def steps(**rest: Any) -> dict[str, tuple[int, Step]]:
    """Name -> how many exchanges a step of a chain has, and the step."""

    def there_and_back(x: jax.Array) -> jax.Array:
        return sum_to_owner(all_gather((x,), AXIS, **rest)[0], AXIS, **rest)

    return {"sum_to_all": (1, lambda x: sum_to_all(x, AXIS, **rest)), "all_gather, sum_to_owner": (2, there_and_back)}


def xla_steps() -> dict[str, tuple[int, Step]]:
    """XLA's own of the same meaning, in its order of summation."""

    def there_and_back(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(lax.all_gather(x, AXIS, tiled=True), AXIS, tiled=True)

    return {"sum_to_all": (1, lambda x: lax.psum(x, AXIS)), "all_gather, sum_to_owner": (2, there_and_back)}


def nothing(x: jax.Array) -> jax.Array:
    return lax.optimization_barrier(x * np.float32(0.5))


def seconds(mesh: Mesh, step: Step, length: int, x: jax.Array, options: dict[str, Any]) -> float:
    """Of one call with `length` steps, the median."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(length):
            x = step(x)
        return x

    spec = P(AXIS)
    mapped = jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    call = jax.jit(mapped, compiler_options=options)
    jax.block_until_ready([call(x) for _ in range(3)])
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([call(x) for _ in range(CALLS)])
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


def microseconds(mesh: Mesh, exchanges: int, step: Step, x: jax.Array, options: dict[str, Any]) -> float:
    short, long = (seconds(mesh, step, n // exchanges, x, options) for n in (SHORT, LONG))
    return (long - short) / (LONG - SHORT) * 1e6


def copy_ceiling(devices: list[jax.Device]) -> float:
    """GB/s of a large copy from one GPU to another."""
    x = jax.device_put(np.ones(256 << 20, np.float32), devices[0])
    times = []
    for _ in range(6):
        jax.block_until_ready(x)
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(x, devices[1]))
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times) / 1e9


def measured(kind: str, kib: int, n: int, name: str, us: float) -> dict[str, Any]:
    """A row of the record. What each GPU sends is its bytes."""
    shape, sent = f"{kind}, {kib} KiB", (kib << 10) * (n - 1)
    row: dict[str, Any] = {"table": "ops", "op": "exchange", "shape": shape, "batch": n, "timer": "chain", "us": us,
                           "bytes": sent, "gb_per_s": sent / us / 1e3}  # fmt: skip
    if name == "XLA":
        return row | {"implementation": "xla"}
    target = TARGETS.get(("exchange", shape, n), Target())
    row |= {"implementation": "cuda", "required_us": target.required, "goal_us": target.goal}
    row |= {"verdict": verdict(us, target.required, target.goal)}
    row |= {"variant": None if name == "ours" else name, "tuning": name in ("flags", "packets") or None}
    return {key: value for key, value in row.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    parser.add_argument("--sizes", default="512,16,128,1024,2048", help="KiB from a GPU to one other")
    parser.add_argument("--quick", action="store_true", help="ours alone")
    options = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    n = mesh.size
    ceiling = copy_ceiling(list(mesh.devices.flat))
    print(f"{n} x {jax.devices()[0].device_kind}; copy from one to another {ceiling:.0f} GB/s", flush=True)
    rows = []
    opened = functools.partial(Exchange, mesh, AXIS, slot_bytes=4 << 20, channels=1, limit_s=5)
    with opened() as chosen, opened(packet_bytes=0) as flags, opened(packet_bytes=4 << 20) as packets:
        ours = {
            name: (steps(peers=exchange.peers, implementation="cuda"), compiled)
            for name, exchange, compiled in (
                ("ours", chosen, GPU_DECODE_OPTIONS),
                ("launched", chosen, {"xla_gpu_graph_min_graph_size": 1 << 20}),
                ("flags", flags, GPU_DECODE_OPTIONS),
                ("packets", packets, GPU_DECODE_OPTIONS),
            )
        }
        theirs = {} if options.quick else {"XLA": (xla_steps(), {})}
        for kib in map(int, options.sizes.split(",")):
            given = np.full((n * 64, kib * 4), 1e-3, np.float32)  # [64, ...] float32 on each
            x = jax.device_put(given, NamedSharding(mesh, P(AXIS)))
            empty = microseconds(mesh, 1, nothing, x, GPU_DECODE_OPTIONS)
            print(f"{kib:5} KiB: an elementwise operation {empty:.1f} us", flush=True)
            for name, (kinds, compiled) in (ours | theirs).items():
                if name == "packets" and kib > MOST_PACKETS:
                    continue
                for kind, (exchanges, step) in kinds.items():
                    us = microseconds(mesh, exchanges, step, x, compiled)
                    row = measured(kind, kib, n, name, us)
                    rows.append(row)
                    rate = row["gb_per_s"]
                    print(f"{kib:5} KiB {kind:25} {name:9} {us:6.2f} us  {rate:5.0f} GB/s, {rate / ceiling:.2f} of "
                          f"a copy {row.get('verdict', '')}", flush=True)  # fmt: skip
        for exchange in (chosen, flags, packets):
            exchange.check()
    if options.json:
        made = new_record(
            rows, device=f"{n} x {jax.devices()[0].device_kind}", command=shlex.join(["python", *sys.argv]),
            software={"jax": jax.__version__}, ceilings={"peer_copy_gb_per_s": ceiling},
        )  # fmt: skip
        options.json.write_text(dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main()
