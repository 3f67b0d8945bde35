"""staging: swaps hidden behind compute, in two steps.

Only the copy of a whole array between the memories runs beside the computations of a step. So blocks are gathered in
a small array on one side, that array crosses inside a step, and is distributed on the other side.

Out: a step that also returns   `jax.device_put(stage_out(cache, plan), jax.memory.Space.Host)`
     later                      `host = commit_staged(host, staged, plan)`
In:  before                     `staged = prefetch_in(host, plan)`
     in the step                `cache = land(cache, jax.device_put(staged, jax.memory.Space.Device), plan)`

Everything here is traceable. Plans come from `plan_swap`; the same plan serves both halves.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..cache import KVCache
from ..errors import ShapeError
from ..plan import SwapPlan
from .host import HostCache
from .moves import HOST, Ids, SwapImplementation, native_in, native_out, pack, pick, read, unpack, write
from .records import block_record
from .swap import ids_of, leaves_of, with_leaves

__all__ = ["commit_staged", "gather_records", "land", "prefetch_in", "scatter_records", "stage_out"]


def stage_out(cache: KVCache, plan: SwapPlan, *, implementation: SwapImplementation = None) -> jax.Array:
    """The records [N, record bytes] uint8 of blocks `plan.device_ids`, in device memory; padding gives zeros."""
    record, (units, _) = block_record(cache.layout), ids_of(plan)
    ids, leaves = Ids(units, _count(units), first_record=0), leaves_of(cache, record)
    if not leaves or not len(units):
        return jnp.zeros((len(units), record.bytes), jnp.uint8)
    if pick(implementation) == "ffi":
        return native_out(leaves, jnp.zeros((len(units), record.bytes), jnp.uint8), ids, record.descriptors)
    return pack(leaves, ids, (units > 0) & (units < cache.block_units), record)


def commit_staged(
    host: HostCache, staged: jax.Array, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> HostCache:
    """Copies staged records, in either memory, to host records `plan.host_ids`; jit it with `host` donated."""
    device_ids, records = ids_of(plan)
    _check(staged, plan, host)
    if not staged.size:
        return host
    blocks = scatter_records(host.blocks, staged, jnp.where(device_ids > 0, records, 0), implementation)
    return dataclasses.replace(host, blocks=blocks)


def scatter_records(
    pool: jax.Array, staged: jax.Array, records: jax.Array, implementation: SwapImplementation = None
) -> jax.Array:
    """A pool of host records with rows `records` [N] int32 set to `staged` [N, bytes], in either memory.

    Ids that are null or out of range set nothing.
    """
    if pick(implementation) == "ffi":
        return native_out((staged,), pool, Ids(_count(records), records, first_unit=0), (1, pool.shape[1], 0))
    valid = (records > 0) & (records < pool.shape[0])
    if jax.typeof(staged).memory_space == HOST:
        # Nothing is computed in host memory.
        staged = jax.device_put(staged, jax.memory.Space.Device)
    staged = jnp.where(valid[:, None], staged, jnp.uint8(0))
    return write(pool, staged, jnp.where(valid, records, 0))


def prefetch_in(host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None) -> jax.Array:
    """Host records `plan.host_ids` as one array [N, record bytes] in host memory; padding gives zeros."""
    return gather_records(host.blocks, ids_of(plan)[1], implementation)


def gather_records(pool: jax.Array, records: jax.Array, implementation: SwapImplementation = None) -> jax.Array:
    """Rows `records` [N] int32 of a pool of host records as one array [N, bytes] in host memory.

    Ids that are null or out of range give zeros.
    """
    width = pool.shape[1]
    if not len(records) or not width:
        return jax.device_put(jnp.zeros((len(records), width), jnp.uint8), HOST)
    if pick(implementation) == "ffi":
        staged = jax.device_put(jnp.zeros((len(records), width), jnp.uint8), HOST)
        ids = Ids(records, _count(records), first_record=0)
        return native_out((pool,), staged, ids, (1, width, 0))
    valid = (records > 0) & (records < pool.shape[0])
    return jax.device_put(read(pool, jnp.where(valid, records, 0)), HOST)


def land(cache: KVCache, staged: jax.Array, plan: SwapPlan, *, implementation: SwapImplementation = None) -> KVCache:
    """Copies prefetched records, now in device memory, to cache blocks `plan.device_ids`."""
    record, (units, records) = block_record(cache.layout), ids_of(plan)
    _check(staged, plan, cache)
    if not staged.size:
        return cache
    units, leaves = jnp.where(records > 0, units, 0), leaves_of(cache, record)
    ids = Ids(units, _count(units), first_record=0)
    if pick(implementation) == "ffi":
        return with_leaves(cache, record, native_in(leaves, staged, ids, record.descriptors))
    valid = (units > 0) & (units < cache.block_units)
    return with_leaves(cache, record, unpack(leaves, staged, ids, valid, record))


def _count(ids: jax.Array) -> jax.Array:
    return jnp.arange(len(ids), dtype=jnp.int32)


def _check(staged: jax.Array, plan: SwapPlan, holder: KVCache | HostCache) -> None:
    shape = (len(plan.device_ids), block_record(holder.layout).bytes)
    if staged.shape != shape or staged.dtype != jnp.uint8:
        raise ShapeError(f"staged records are {staged.dtype}{staged.shape}, expected uint8{shape}")
