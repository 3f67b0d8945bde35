"""What a step on several devices needs beside that on one, and how long its exchanges take by themselves."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ..cache import KVCache
from ..config import DSV4Config
from ..layout import CacheLayout, CacheSize
from ..model.weights.split import DATA, TENSOR
from ..ops import Exchange, open_exchanges
from ..ops.exchange import Peers, using
from ..sharding import cache_sharding, shard_step
from .step import StepOptions, random_cache

__all__ = ["exchange_times", "exchanges", "jitted_over", "mesh_of", "spread_cache"]

_IN_A_ROW = 40  # exchanges of an executable, each of what the one before gave


def mesh_of(options: StepOptions, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Makes the mesh of these options, of the first devices there are or of those given; None for one device."""
    return None if options.devices == 1 else options.split.mesh(devices)


def jitted_over(
    mesh: Mesh | None, step: Callable[..., tuple[Any, KVCache]], xla: Mapping[str, Any], peers: Sequence[Peers] = ()
) -> Any:
    """Jits a step of (params, cache, plan, tokens) over a mesh, the cache donated."""
    if mesh is None:
        return jax.jit(step, donate_argnums=1, compiler_options=dict(xla))
    return shard_step(step, mesh, compiler_options=xla, peers=peers)


def exchanges(options: StepOptions) -> contextlib.AbstractContextManager[tuple[Exchange, ...]]:
    """Opens the exchanges of the mesh's axes, if the options want them."""
    return open_exchanges(mesh_of(options) if options.exchange else None)


def spread_cache(layout: CacheLayout, size: CacheSize, mesh: Mesh) -> KVCache:
    """Makes the `random_cache` of every data shard, all of them alike, on the devices where it stays."""
    shards = []
    for device in mesh.devices.flat:
        with jax.default_device(device):
            shards.append(jax.device_put(random_cache(layout, size, jax.random.key(1)), device))
    placements: dict[str, Any] = dict(cache_sharding(layout, mesh).arrays)
    arrays: dict[str, jax.Array] = {}
    for name, placement in placements.items():
        parts = [shard.arrays[name] for shard in shards]
        shape = (mesh.shape[DATA] * parts[0].shape[0], *parts[0].shape[1:])
        arrays[name] = jax.make_array_from_single_device_arrays(shape, placement, parts)
    return KVCache(arrays, layout)


def exchange_times(cfg: DSV4Config, options: StepOptions, peers: Sequence[Peers] = ()) -> dict[str, float]:
    """Times each exchange of a layer, in us: many in one executable, with the copies that `Split` makes for them."""
    split, mesh = options.split, mesh_of(options)
    assert mesh is not None
    tokens, hidden, top = options.batch * options.fed // split.data, cfg.hidden_size, cfg.num_experts_per_tok
    latent = cfg.o_groups // split.tensor * cfg.o_lora_rank

    def all_tokens(x: jax.Array, chosen: jax.Array, share: jax.Array) -> Any:
        return tuple(rows[: x.shape[0]] for rows in split.all_tokens(x, chosen, share))

    def own_sums(x: jax.Array) -> Any:
        return (jnp.tile(split.own_sums(x), (split.data, 1)),)

    def all_columns(x: jax.Array) -> Any:
        return (split.all_columns(x)[:, : x.shape[1]],)

    cases: dict[str, tuple[Callable[..., Any], list[tuple[int, int, Any]]]] = {}
    if split.data > 1:
        rows = [(tokens, hidden, jnp.bfloat16), (tokens, top, jnp.int32), (tokens, top, jnp.float32)]
        cases["all_tokens"] = all_tokens, rows
    cases["own_sums"] = own_sums, [(split.data * tokens, hidden, jnp.float32)]
    if split.tensor > 1:
        cases["all_columns"] = all_columns, [(tokens, latent, jnp.bfloat16)]
    return {name: _time(mesh, peers, *case) for name, case in cases.items()}


def _time(
    mesh: Mesh, peers: Sequence[Peers], exchange: Callable[..., Any], shapes: list[tuple[int, int, Any]]
) -> float:
    def run(*rows: jax.Array) -> Any:
        with using(*peers):
            for _ in range(_IN_A_ROW):
                rows = exchange(*rows)
        return rows

    spec = PartitionSpec((DATA, TENSOR))
    called = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    total = mesh.devices.size
    rows = tuple(
        jax.device_put(np.zeros((total * count, width), dtype), jax.sharding.NamedSharding(mesh, spec))
        for count, width, dtype in shapes
    )
    best = math.inf
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(called(*rows))
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / _IN_A_ROW
