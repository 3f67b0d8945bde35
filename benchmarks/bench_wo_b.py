"""What bits that do not depend on the number of devices cost along a tensor axis, in the product with `wo_b`.

    python benchmarks/bench_wo_b.py --json wo_b.json

Where heads are split, each device has the latents of its groups. `gathered`: all latents go to every device, which
multiplies them by the whole of `wo_b`, as the model does. `summed`: each multiplies its own by its columns of it, and
the products are added, in an order that depends on the number of devices. Flash's sizes, FP8; us of a layer, from
chains of a layer's product and exchange, each of what the one before gave, weights of their own in turn.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dsv4_jax import DSV4Config, ops
from dsv4_jax.cuda.exchange import open_exchanges
from dsv4_jax.model.forward import GPU_DECODE_OPTIONS
from dsv4_jax.model.quantised import FP8, Quantised, product
from dsv4_jax.model.split import DATA, TENSOR, Split
from dsv4_jax.ops.exchange import Peers, using

SHORT, LONG, CALLS, REPEATS = 8, 40, 5, 7
MATRICES = 8  # 270 MB: more than an L2 holds


def microseconds(split: Split, peers: Sequence[Peers], layer: Callable[..., Any], x: Any, weights: Any) -> float:
    mesh, spec = split.mesh(), PartitionSpec((DATA, TENSOR))
    best = {}
    for length in (SHORT, LONG):

        def chain(x: jax.Array, weights: list[Quantised], length: int = length) -> jax.Array:
            with using(*peers):
                for i in range(length):
                    x = layer(x, weights[i % len(weights)])[:, : x.shape[1]].astype(x.dtype)
            return x

        mapped = jax.shard_map(chain, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
        call = jax.jit(mapped, compiler_options=GPU_DECODE_OPTIONS)
        jax.block_until_ready([call(x, weights) for _ in range(2)])
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            jax.block_until_ready([call(x, weights) for _ in range(CALLS)])
            times.append((time.perf_counter() - start) / CALLS)
        best[length] = min(times)
    return (best[LONG] - best[SHORT]) / (LONG - SHORT) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--model", default="flash", help="tiny: small sizes")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    cfg, split = DSV4Config.flash(), Split(1, args.devices)
    hidden, latent = cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank
    if args.model == "tiny":
        hidden, latent = 256, 512
    mesh = split.mesh()
    draw = jax.jit(FP8.codec.draw, static_argnums=(1, 2))

    def drawn(columns: int) -> list[Quantised]:
        made = [draw(jax.random.key(i), hidden, columns) for i in range(MATRICES)]
        return jax.device_put([Quantised(tuple(parts), FP8) for parts in made], NamedSharding(mesh, PartitionSpec()))

    def gathered(x: jax.Array, weight: Quantised) -> jax.Array:
        return product(split.all_columns(x), weight)

    def summed(x: jax.Array, weight: Quantised) -> jax.Array:
        return ops.sum_to_all(product(x, weight), TENSOR)

    found = {}
    with open_exchanges(mesh) as opened:
        peers = [exchange.peers for exchange in opened]
        for name, layer, columns in (("gathered", gathered, latent), ("summed", summed, latent // split.tensor)):
            weights = drawn(columns)
            for tokens in (1, 2, 4, 8):
                given = np.full((tokens * args.devices, min(latent // split.tensor, hidden)), 1e-2, np.float32)
                where = NamedSharding(mesh, PartitionSpec((DATA, TENSOR)))
                x = jax.device_put(given.astype(jnp.bfloat16), where)
                found[f"{name}, {tokens} tokens"] = us = microseconds(split, peers, layer, x, weights)
                print(f"{name}, {tokens} tokens: {us:.2f} us a layer", flush=True)
            del weights
        for exchange in opened:
            exchange.check()
    for tokens in (1, 2, 4, 8):
        more = found[f"gathered, {tokens} tokens"] - found[f"summed, {tokens} tokens"]
        print(f"{tokens} tokens: equal bits cost {more:.2f} us a layer, {more * cfg.num_layers / 1e3:.3f} ms of a step")
    if args.json:
        args.json.write_text(json.dumps({"us": found, "exchange": "cuda" if opened else "xla"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
