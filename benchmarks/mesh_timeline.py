"""What runs beside the exchanges of a step over several GPUs, and what the host does for it.

    python benchmarks/mesh_timeline.py --layers 12 --json timeline.json

The first layers with weights as released: heads split over all devices, one request; experts split, 64 requests. Of
each device: its kernels from a profile with command buffers on; for how long exchanges ran, and for how long of it
nothing else did (they wait for the other devices, which is in it); what ran beside them; one HCA and one CSA layer.
Then the host's longest events by thread, and its time a call, also where a call's result is given back to the next, so
that all addresses stay as they were.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from step_timeline import PROFILED, Kernel, read_trace

from dsv4_jax.bench import model
from dsv4_jax.bench.mesh import exchanges, mesh_of, spread_cache
from dsv4_jax.bench.step import StepOptions, cache_and_plan
from dsv4_jax.config import AttentionType
from dsv4_jax.model import decode_step, init_params
from dsv4_jax.model.forward import GPU_DECODE_OPTIONS
from dsv4_jax.sharding import shard_step

CALLS = 3  # under the profiler, one after the other; the last is shown
EXCHANGE = ("exchange_kernel", "nccl", "ncclDevKernel")


def beside(kernels: list[Kernel]) -> tuple[float, float, int, dict[str, float]]:
    """us of exchanges, us of them in which nothing else ran, how many, and us of others beside them, by name."""
    total, alone, count = 0.0, 0.0, 0
    others: dict[str, float] = collections.defaultdict(float)
    for start, end, name, _ in kernels:
        if not name.startswith(EXCHANGE):
            continue
        count, total, covered = count + 1, total + end - start, start
        for first, last, other, _ in kernels:
            low, high = max(first, start), min(last, end)
            if low >= high or other.startswith(EXCHANGE):
                continue
            others[other] += high - low
            alone += max(low - covered, 0.0)
            covered = max(covered, high)
        alone += end - covered
    return total, alone, count, dict(sorted(others.items(), key=lambda pair: -pair[1])[:8])


def last_call(kernels: list[Kernel], calls: int) -> list[Kernel]:
    heads = [i for i, kernel in enumerate(kernels) if "hyper_connection" in kernel[2]]
    first = heads[-(len(heads) // calls)] if heads else 0
    return kernels[first:]


def show(name: str, cfg: Any, folder: pathlib.Path) -> dict[str, Any]:
    kernels, host = read_trace(folder)
    found: dict[str, Any] = {}
    for device, every in kernels.items():
        call = last_call(every, CALLS)
        total, alone, count, others = beside(call)
        took = call[-1][1] - call[0][0]
        ran = {kernel: round(us) for kernel, us in others.items()}
        print(f"{name} {device}: {len(call)} kernels in {took:.0f} us; {count} exchanges {total:.0f} us, alone for "
              f"{alone:.0f}; beside them, us: {ran}", flush=True)  # fmt: skip
        found[device] = {"us": took, "exchanges": count, "exchange_us": total, "alone_us": alone, "beside_us": others}
        starts = [i for i, kernel in enumerate(call) if "hyper_connection" in kernel[2]][::2]
        for kind in (AttentionType.HCA, AttentionType.CSA):
            layer = len(cfg.layer_types) - 1 - cfg.layer_types[::-1].index(kind)
            if device != min(kernels) or layer + 1 >= len(starts):
                continue
            print(f"  layer {layer}, {kind.name}")
            first = call[starts[layer]][0]
            for start, end, kernel, stream in call[starts[layer] : starts[layer + 1]]:
                print(f"  {start - first:7.1f} {end - first:7.1f} {end - start:6.1f} {stream:12.12} {kernel}")
    threads = sorted(host, key=lambda line: -sum(map(sum, host[line].values())))[:5]
    for thread in threads:
        events = sorted(host[thread].items(), key=lambda pair: -sum(pair[1]))[:14]
        print(f"  host thread {thread}")
        for event, times in events:
            print(f"    {sum(times) / CALLS:9.1f} us a call, {len(times) / CALLS:5.1f} times, {event}")
        found[f"host {thread}"] = {event: [len(times) / CALLS, sum(times) / CALLS] for event, times in events}
    return found


def dispatch(options: StepOptions, params: Any, kept: bool) -> tuple[float, float]:
    """us of the host a call, the first and of twenty in a row; `kept`: the result's buffer is given back."""
    mesh, (layout, size, plan) = mesh_of(options), cache_and_plan(model.model_config(options), options)
    assert mesh is not None
    rows = NamedSharding(mesh, PartitionSpec("data"))
    plan, tokens = jax.device_put((plan, np.zeros(options.batch, np.int32)), rows)
    cache = spread_cache(layout, size, mesh)
    with exchanges(options) as opened:
        step = shard_step(decode_step, mesh, peers=[exchange.peers for exchange in opened])
        given = jax.device_put(jnp.zeros((options.batch, layout.cfg.vocab_size), jnp.float32), rows)
        donated: Any = dict(donate_argnums=(1, 4), keep_unused=True) if kept else dict(donate_argnums=1)
        call = jax.jit(lambda p, c, plan, tokens, _: step(p, c, plan, tokens),
                       compiler_options=GPU_DECODE_OPTIONS, **donated)  # fmt: skip
        out, firsts, each = given, [], []
        for _ in range(6):
            jax.block_until_ready(out)
            start = time.perf_counter()
            for i in range(20):
                out, cache = call(params, cache, plan, tokens, out if kept else given)
                if not i:
                    firsts.append(time.perf_counter() - start)
            each.append((time.perf_counter() - start) / 20)
        jax.block_until_ready(out)
        for exchange in opened:
            exchange.check()
    return min(firsts[1:]) * 1e6, min(each[1:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flash")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    base = StepOptions(args.model, context=8192 if args.model != "tiny" else 200, layers=args.layers,
                       devices=args.devices, brief=True, xla=(PROFILED,))  # fmt: skip
    few: Any = dict(batch=1, tensor=args.devices, key_split="latency")
    many: Any = dict(batch=64 if args.model != "tiny" else 4)
    found, longest = dict[str, Any](), model.longest_kernels

    def several(run: Callable[[], jax.Array], loop: int, keep: pathlib.Path | None) -> dict[str, Any]:
        return longest(lambda: [run() for _ in range(CALLS)][-1], CALLS * loop, keep)

    for name, given in {"tensor": few, "data": many}.items():
        options = dataclasses.replace(base, **given)
        cfg = model.model_config(options)
        params = init_params(cfg, 0, "released", packed=True, mesh=mesh_of(options))
        with tempfile.TemporaryDirectory() as temporary, mock.patch.object(model, "longest_kernels", several):
            folder = pathlib.Path(temporary)
            report = model.measure_model(dataclasses.replace(options, profile=folder), params, None)
            print(f"== {name}: {report['step_ms']:.3f} ms, host {report['dispatch_us']:.0f} us a call, first "
                  f"{report['first_dispatch_us']:.0f}, {report['launches']} launches", flush=True)  # fmt: skip
            found[name] = report | show(name, cfg, folder)
        for kept in (False, True):
            first, each = dispatch(dataclasses.replace(options, xla=()), params, kept)
            print(f"{name}: host {each:.0f} us a call, first {first:.0f}; result given back: {kept}", flush=True)
            found[name][f"dispatch_us, result given back {kept}"] = [first, each]
        if args.json:
            args.json.write_text(json.dumps(found, default=str))
        del params


if __name__ == "__main__":
    main()
