"""The exchange between GPUs (csrc/exchange/exchange.cu) against XLA's collectives. Needs two GPUs or more.

    python benchmarks/bench_exchange.py [--json FILE] [--sizes 512,16,128,1024,2048] [--parts sizes,wo_b]
        [--forms ours,launched,flags,packets,XLA]

A time is that of one exchange among many in one executable, each the operand of the next: the difference between a long
chain and a short one, over the difference in length. A size is what a GPU sends to one other, in KiB. The ceiling is a
copy of 1 GiB from one GPU's memory to the other's.

`wo_b`: what bits that do not depend on the number of devices cost along a tensor axis. Where heads are split, each has
the latents of its groups. *Gathered*: all latents go to every device, which multiplies them by the whole of `wo_b`, as
the model does; *summed*: each multiplies its own by its columns of it, and the products are added, in an order that
depends on the number of devices. Flash's sizes, FP8, us of a layer, weights of its own in turn.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Recorder, jax_device, parser
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax import DSV4Config
from dsv4_jax.model import GPU_DECODE_OPTIONS
from dsv4_jax.model.numerics import product
from dsv4_jax.model.weights.quantised import FP8, Quantised
from dsv4_jax.model.weights.split import TENSOR, Split
from dsv4_jax.ops import Exchange, all_gather, sum_to_all, sum_to_owner
from dsv4_jax.ops.exchange import using
from dsv4_jax.ops.exchange_buffers import open_exchanges

AXIS = "devices"
SHORT, LONG = 20, 120  # exchanges in a chain
CALLS, REPEATS = 6, 7
MAX_PACKETS = 512  # KiB
FORMS = ("ours", "launched", "flags", "packets", "XLA")
MATRICES = 8  # of wo_b in turn: 270 MB, more than an L2 holds
Step = Callable[[jax.Array], jax.Array]


def steps(**rest: Any) -> dict[str, tuple[int, Step]]:
    """Returns by name how many exchanges a step of a chain has, and the step."""

    def there_and_back(x: jax.Array) -> jax.Array:
        return sum_to_owner(all_gather((x,), AXIS, **rest)[0], AXIS, **rest)

    return {"sum_to_all": (1, lambda x: sum_to_all(x, AXIS, **rest)), "all_gather, sum_to_owner": (2, there_and_back)}


def xla_steps() -> dict[str, tuple[int, Step]]:
    """Returns the same of XLA's own collectives, in their order of summation."""

    def there_and_back(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(lax.all_gather(x, AXIS, tiled=True), AXIS, tiled=True)

    return {"sum_to_all": (1, lambda x: lax.psum(x, AXIS)), "all_gather, sum_to_owner": (2, there_and_back)}


def nothing(x: jax.Array) -> jax.Array:
    return lax.optimization_barrier(x * np.float32(0.5))


def seconds(
    mesh: Mesh, step: Callable[..., jax.Array], length: int, x: jax.Array, options: dict[str, Any], weights: Any = ()
) -> float:
    """Returns the median seconds of a call with `length` steps. Each step is given one of `weights`, if there are any,
    in turn.
    """
    axes = P(mesh.axis_names)

    def chain(x: jax.Array, weights: Any) -> jax.Array:
        for i in range(length):
            x = step(x, weights[i % len(weights)]) if weights else step(x)
        return x

    mapped = jax.shard_map(chain, mesh=mesh, in_specs=(axes, P()), out_specs=axes, check_vma=False)
    call = jax.jit(mapped, compiler_options=options)
    jax.block_until_ready([call(x, weights) for _ in range(3)])
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([call(x, weights) for _ in range(CALLS)])
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


def microseconds(
    mesh: Mesh,
    step: Callable[..., jax.Array],
    x: jax.Array,
    options: dict[str, Any],
    exchanges: int = 1,
    weights: Any = (),
) -> float:
    """Returns us of one exchange, of which a step has `exchanges`."""
    short, long = (seconds(mesh, step, n // exchanges, x, options, weights) for n in (SHORT, LONG))
    return (long - short) / (LONG - SHORT) * 1e6


def copy_ceiling(devices: list[jax.Device]) -> float:
    """Returns GB/s of a large copy from one GPU to another."""
    x = jax.device_put(np.ones(256 << 20, np.float32), devices[0])
    times = []
    for _ in range(6):
        jax.block_until_ready(x)
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(x, devices[1]))
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times) / 1e9


def measure_sizes(mesh: Mesh, sizes: list[int], asked: list[str], ceiling: float, recorder: Recorder) -> None:
    """Times exchanges of each size in the forms that are asked for."""
    n, buffers = mesh.size, functools.partial(Exchange, mesh, AXIS, slot_bytes=4 << 20, channels=1, limit_s=5)
    packet_bytes: dict[str, dict[str, int]] = {"flags": {"packet_bytes": 0}, "packets": {"packet_bytes": 4 << 20}}
    with contextlib.ExitStack() as stack:
        opened: list[Exchange] = []
        ways: dict[str, tuple[dict[str, tuple[int, Step]], dict[str, Any]]] = {}
        for name in asked:
            compiled: dict[str, Any] = (
                {"xla_gpu_graph_min_graph_size": 1 << 20} if name == "launched" else GPU_DECODE_OPTIONS
            )
            if name == "XLA":
                ways[name] = xla_steps(), {}
                continue
            opened.append(stack.enter_context(buffers(**packet_bytes.get(name, {}))))
            ways[name] = steps(peers=opened[-1].peers, implementation="cuda"), compiled
        for kib in sizes:
            given = np.full((n * 64, kib * 4), 1e-3, np.float32)  # [64, ...] float32 on each
            x = jax.device_put(given, NamedSharding(mesh, P(AXIS)))
            empty = microseconds(mesh, nothing, x, GPU_DECODE_OPTIONS)
            print(f"{kib:5} KiB: an elementwise operation {empty:.1f} us", flush=True)
            for name, (kinds, compiled) in ways.items():
                if name == "packets" and kib > MAX_PACKETS:
                    continue
                for kind, (exchanges, step) in kinds.items():
                    us = microseconds(mesh, step, x, compiled, exchanges)
                    sent = (kib << 10) * (n - 1)
                    row = recorder.op(
                        "exchange",
                        f"{kind}, {kib} KiB",
                        n,
                        us,
                        clock="us",
                        timer="chain",
                        bytes=sent,
                        gb_per_s=sent / us / 1e3,
                        implementation="xla" if name == "XLA" else "cuda",
                        variant=None if name in ("ours", "XLA") else name,
                        tuning=True if name in ("flags", "packets") else None,
                    )
                    print(
                        f"{kib:5} KiB {kind:25} {name:9} {us:6.2f} us  {row['gb_per_s']:5.0f} GB/s, "
                        f"{row['gb_per_s'] / (ceiling or math.inf):.2f} of a copy {row.get('verdict', '')}",
                        flush=True,
                    )
        for exchange in opened:
            exchange.check()


def measure_wo_b(devices: int, tiny: bool, recorder: Recorder) -> None:
    """Times the product with `wo_b` where heads are split: latents gathered, or products summed."""
    cfg, split = DSV4Config.flash(), Split(1, devices)
    hidden, latent = (256, 512) if tiny else (cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank)
    mesh = split.mesh()
    draw = jax.jit(FP8.codec.draw, static_argnums=(1, 2))

    def drawn(columns: int) -> list[Quantised]:
        made = [draw(jax.random.key(i), hidden, columns) for i in range(MATRICES)]
        return jax.device_put([Quantised(tuple(parts), FP8) for parts in made], NamedSharding(mesh, P()))

    def gathered(x: jax.Array, weight: Quantised) -> jax.Array:
        return product(split.all_columns(x), weight)

    def summed(x: jax.Array, weight: Quantised) -> jax.Array:
        return sum_to_all(product(x, weight), TENSOR)

    ways = {
        "latents gathered, as the model does": (gathered, latent),
        "products of shares summed": (summed, latent // devices),
    }
    with open_exchanges(mesh) as opened:
        for name, (layer, columns) in ways.items():
            weights = drawn(columns)

            def step(x: jax.Array, weight: Quantised, layer: Any = layer) -> jax.Array:
                with using(*(exchange.peers for exchange in opened)):
                    return layer(x, weight)[:, : x.shape[1]].astype(x.dtype)

            for tokens in (1, 2, 4, 8):
                given = np.full((tokens * devices, min(latent // devices, hidden)), 1e-2, np.float32)
                x = jax.device_put(given.astype(jnp.bfloat16), NamedSharding(mesh, P(mesh.axis_names)))
                us = microseconds(mesh, step, x, GPU_DECODE_OPTIONS, weights=weights)
                recorder.fact("mesh", f"wo_b, a layer, {tokens} tokens: {name}", us, "us")
            del weights
        for exchange in opened:
            exchange.check()


def main() -> None:
    """Runs the command line."""
    command = parser(__doc__)
    command.add_argument("--sizes", default="512,16,128,1024,2048", help="KiB from a GPU to one other")
    command.add_argument("--parts", default="sizes,wo_b")
    command.add_argument("--model", default="flash", help="tiny: wo_b at small sizes, on any devices")
    command.add_argument("--forms", default=",".join(FORMS), help="of sizes: ours, how else it could be, XLA's own")
    options = command.parse_args()
    mesh, device = jax.make_mesh((jax.device_count(),), (AXIS,)), jax_device()
    n, tiny = mesh.size, options.model == "tiny"
    ceiling = 0.0 if tiny else copy_ceiling(list(mesh.devices.flat))
    device["device"] = f"{n} x {device['device']}"
    recorder = Recorder(options.json, **device, ceilings={"peer_copy_gb_per_s": ceiling}, quick=tiny)
    print(f"{device['device']}; copy from one to another {ceiling:.0f} GB/s", flush=True)
    if "sizes" in options.parts.split(","):
        sizes, forms = [int(kib) for kib in options.sizes.split(",")], options.forms.split(",")
        if unknown := {*forms} - {*FORMS}:
            command.error(f"--forms: {', '.join(sorted(unknown))}, expected some of {', '.join(FORMS)}")
        measure_sizes(mesh, sizes, forms, ceiling, recorder)
    if "wo_b" in options.parts.split(","):
        measure_wo_b(n, tiny, recorder)


if __name__ == "__main__":
    main()
