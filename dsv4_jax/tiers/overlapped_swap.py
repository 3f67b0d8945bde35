"""Swaps that a step's compute hides, in two halves.

Only the copy of a whole array between the memories runs beside the computations of a step. So records are packed into
one small array on one side, that array crosses inside a step, and is distributed on the other side.

Out: a step that also returns   `jax.device_put(pack_blocks(cache, plan), jax.memory.Space.Host)`
     later                      `host = scatter_to_host(host, packed, plan)`
In:  before                     `packed = gather_from_host(host, plan)`
     in the step                `cache = unpack_blocks(cache, jax.device_put(packed, jax.memory.Space.Device), plan)`

Everything here is traceable. Plans come from `plan_swap`; the same plan serves both halves. Along a pool axis each rank
moves its own pairs: `own_swaps` deals a plan out, and it, packed records and host pages are split over the axis, as the
blocks are (`LayoutError` for another plan).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..cache import KVCache
from ..errors import LayoutError, ShapeError
from ..plan import OwnSwapPlan, SwapPlan
from ..records import block_record
from .cache_units import ids_of, leaves_of, with_leaves
from .host_cache import HostCache
from .host_records import gather_records, scatter_records
from .record_copy import Ids, SwapImplementation, choose_implementation, native_in, native_out, pack, positions, unpack

__all__ = ["gather_from_host", "pack_blocks", "scatter_to_host", "unpack_blocks"]

Plan = SwapPlan | OwnSwapPlan


def pack_blocks(cache: KVCache, plan: Plan, *, implementation: SwapImplementation = None) -> jax.Array:
    """The records [N, record bytes] uint8 of blocks `plan.device_ids`, in device memory; padding gives zeros."""
    record, (units, _) = block_record(cache.layout), _ids_of(cache, plan)
    ids, leaves = Ids(units, positions(units), first_record=0), leaves_of(cache, record)
    if not leaves or not len(units):
        return jnp.zeros((len(units), record.bytes), jnp.uint8)
    if choose_implementation(implementation) == "ffi":
        return native_out(leaves, jnp.zeros((len(units), record.bytes), jnp.uint8), ids, record.descriptors)
    return pack(leaves, ids, (units > 0) & (units < cache.block_units), record)


def scatter_to_host(
    host: HostCache, packed: jax.Array, plan: Plan, *, implementation: SwapImplementation = None
) -> HostCache:
    """Copies packed records, in either memory, to host pages `plan.host_ids`; jit it with `host` donated."""
    device_ids, records = ids_of(plan, Plan)
    _check(packed, plan, host)
    if not packed.size:
        return host
    pages = scatter_records(host.pages, packed, jnp.where(device_ids > 0, records, 0), implementation)
    return dataclasses.replace(host, pages=pages)


def gather_from_host(host: HostCache, plan: Plan, *, implementation: SwapImplementation = None) -> jax.Array:
    """Host pages `plan.host_ids` as one array [N, record bytes] in host memory; padding gives zeros."""
    records = ids_of(plan, Plan)[1]
    if not block_record(host.layout).bytes:
        return jax.device_put(jnp.zeros((len(records), 0), jnp.uint8), jax.memory.Space.Host)
    return gather_records(host.pages, records, implementation)


def unpack_blocks(
    cache: KVCache, packed: jax.Array, plan: Plan, *, implementation: SwapImplementation = None
) -> KVCache:
    """Copies packed records, now in device memory, to cache blocks `plan.device_ids`."""
    record, (units, records) = block_record(cache.layout), _ids_of(cache, plan)
    _check(packed, plan, cache)
    if not packed.size:
        return cache
    units, leaves = jnp.where(records > 0, units, 0), leaves_of(cache, record)
    ids = Ids(units, positions(units), first_record=0)
    if choose_implementation(implementation) == "ffi":
        return with_leaves(cache, record, native_in(leaves, packed, ids, record.descriptors))
    valid = (units > 0) & (units < cache.block_units)
    return with_leaves(cache, record, unpack(leaves, packed, ids, valid, record))


def _ids_of(cache: KVCache, plan: Plan) -> tuple[jax.Array, jax.Array]:
    if cache.pool_axis.size > 1 and isinstance(plan, SwapPlan):
        raise LayoutError(f"the blocks are dealt out to {cache.pool_axis.size} ranks: so must the plan be (own_swaps)")
    return ids_of(plan, Plan)


def _check(packed: jax.Array, plan: Plan, holder: KVCache | HostCache) -> None:
    shape = (len(plan.device_ids), block_record(holder.layout).bytes)
    if packed.shape != shape or packed.dtype != jnp.uint8:
        raise ShapeError(f"packed records are {packed.dtype}{packed.shape}, expected uint8{shape}")
