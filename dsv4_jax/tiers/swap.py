"""swap: blocks and slots of the cache to and from host records, inside jitted steps.

    host = dsv4.init_host_cache(layout, num_blocks, snapshots=n)
    plan = dsv4.plan_swap("out", device_ids, host_ids, num_device=size.num_blocks, num_host=host.num_blocks)
    host = dsv4.swap_out(cache, host, plan)      # traceable; jit it with the destination donated

Each direction is one native call that updates its destination in place (`implementation="ffi"`, the default where the
library is there: see `dsv4_jax.ffi`), or plain XLA operations (`"xla"`). Both leave everything alone that the plan does
not name, whatever its ids hold. Under `jax.shard_map` each shard moves between its own cache and its own records.

Records are committed to their device, so what a step makes of them is, and so are the caches of `init_cache`. One made
in another way should be too (`jax.device_put(cache, device)`), or the step compiles once more after the first swap_in.

The transfer takes its time in the step; to hide it behind compute, see `overlapped_swap`. To wait for it,
see `async_swap`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache
from ..errors import LayoutError
from ..plan import SwapPlan
from ..records import RecordScope, record_format
from .cache_units import check_same_layout, ids_of, leaves_of, units_of, with_leaves
from .host_cache import HostCache
from .record_copy import (
    Ids,
    SwapImplementation,
    choose_implementation,
    native_in,
    native_out,
    pack,
    read,
    unpack,
    write,
)

__all__ = ["restore", "snapshot", "swap_in", "swap_out"]


def swap_out(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> HostCache:
    """Copies cache blocks `plan.device_ids` to host records `plan.host_ids`.

    Raises:
        LayoutError: the records are of another layout.
        ShapeError: the plan's fields are not int32 [N].
        ImplementationError: unknown name, or "ffi" without its library.
    """
    return dataclasses.replace(host, blocks=_out(cache, host, host.blocks, plan, "block", implementation))


def swap_in(cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None) -> KVCache:
    """Copies host records `plan.host_ids` to cache blocks `plan.device_ids`. Raises as `swap_out`."""
    return _in(cache, host, host.blocks, plan, "block", implementation)


def snapshot(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> HostCache:
    """Copies window and compressor state of slots `plan.device_ids` to snapshot records `plan.host_ids`.

    With the request's blocks swapped out this is all of it: its slot and blocks can be given to others, and
    `restore` and `swap_in` make any slot and blocks continue it, to the byte. (The block table names device
    blocks: the plan of the next step sets it anew.)

    Raises as `swap_out`; also `LayoutError` if the host cache has no snapshots.
    """
    return dataclasses.replace(host, snapshots=_out(cache, host, _snapshots(host), plan, "slot", implementation))


def restore(cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None) -> KVCache:
    """Copies snapshot records `plan.host_ids` to slots `plan.device_ids`. Raises as `snapshot`."""
    return _in(cache, host, _snapshots(host), plan, "slot", implementation)


def _out(
    cache: KVCache, host: HostCache, pool: jax.Array, plan: SwapPlan, scope: RecordScope, choice: SwapImplementation
) -> jax.Array:
    check_same_layout(cache, host)
    record, ids, choice = record_format(cache.layout, scope), Ids(*ids_of(plan)), choose_implementation(choice)
    if not record.pieces or not len(ids.units):
        return pool
    leaves = leaves_of(cache, record)
    if choice == "ffi":
        return native_out(leaves, pool, ids, record.descriptors)
    valid = _valid(ids, units_of(cache, scope), pool)
    # Pairs that move nothing write zeros to the null record, which holds them already.
    return write(pool, pack(leaves, ids, valid, record), jnp.where(valid, ids.records, 0))


def _in(
    cache: KVCache, host: HostCache, pool: jax.Array, plan: SwapPlan, scope: RecordScope, choice: SwapImplementation
) -> KVCache:
    check_same_layout(cache, host)
    record, ids, choice = record_format(cache.layout, scope), Ids(*ids_of(plan)), choose_implementation(choice)
    if not record.pieces or not len(ids.units):
        return cache
    leaves = leaves_of(cache, record)
    if choice == "ffi":
        return with_leaves(cache, record, native_in(leaves, pool, ids, record.descriptors))
    valid = _valid(ids, units_of(cache, scope), pool)
    records = read(pool, jnp.where(valid, ids.records, 0))
    return with_leaves(cache, record, unpack(leaves, records, ids, valid, record))


def _valid(ids: Ids, units: int, pool: jax.Array) -> jax.Array:
    """[N] bool: pairs whose unit and record exist."""
    return (ids.units > 0) & (ids.units < np.int32(units)) & (ids.records > 0) & (ids.records < np.int32(pool.shape[0]))


def _snapshots(host: HostCache) -> jax.Array:
    if host.snapshots is None:
        raise LayoutError("this host cache has no snapshots: give init_host_cache a number of them")
    return host.snapshots
