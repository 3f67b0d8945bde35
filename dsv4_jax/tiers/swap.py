"""swap: blocks and slots of the cache to and from host records, inside jitted steps.

    host = dsv4.init_host_cache(layout, num_pages)
    plan = plan_swap("out", device_ids, host_ids, num_device=size.num_blocks, num_host=host.num_pages)
    host = swap_out(cache, host, plan)      # traceable; jit it with the destination donated

Each direction is one native call that updates its destination in place (`implementation="ffi"`, the default where the
library is there: see `dsv4_jax.ffi`), or plain XLA operations (`"xla"`). Both leave everything alone that the plan does
not name, whatever its ids hold. Under `jax.shard_map` each shard moves between its own cache and its own records. Along
a pool axis ids are those of all ranks: a block and its record are one rank's, a state is written by the rank that has
its pages and restored to all.

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
from jax import lax

from ..cache import KVCache
from ..ops.pool_axis import PoolAxis
from ..ops.scatter import set_existing
from ..plan import StateSwapPlan, SwapPlan
from ..record_format import RecordFormat, RecordScope
from ..records import record_format
from .cache_units import check_same_records, ids_of, leaves_of, state_ids_of, units_of, with_leaves
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
    """Copies cache blocks `plan.device_ids` to host pages `plan.host_ids`.

    Raises:
        LayoutError: the records are of another layout.
        ShapeError: the plan's fields are not int32 [N].
        ImplementationError: unknown name, or "ffi" without its library.
    """
    return dataclasses.replace(host, pages=_out(cache, host, Ids(*ids_of(plan)), "block", implementation))


def swap_in(cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None) -> KVCache:
    """Copies host pages `plan.host_ids` to cache blocks `plan.device_ids`. Raises as `swap_out`."""
    return _in(cache, host, Ids(*ids_of(plan)), "block", implementation)


def snapshot(
    cache: KVCache, host: HostCache, plan: StateSwapPlan, *, implementation: SwapImplementation = None
) -> HostCache:
    """Copies the states of slots `plan.device_ids`, of requests of `plan.num_tokens` tokens, to host pages.

    With the request's blocks swapped out this is all of it: its slot and blocks can be given to others, and
    `restore` and `swap_in` make any slot and blocks continue it, to the byte, also in a cache with another
    `draft_tokens`. (The block table names device blocks: the plan of the next step sets it anew.)

    Raises as `swap_out`.
    """
    return dataclasses.replace(host, pages=_out(cache, host, state_ids_of(plan), "slot", implementation))


def restore(
    cache: KVCache, host: HostCache, plan: StateSwapPlan, *, implementation: SwapImplementation = None
) -> KVCache:
    """Copies states from host pages `plan.host_ids` to slots `plan.device_ids`, by the positions of their rows.

    What of a slot is no part of its state (see `dsv4_jax.records`) becomes zero: nothing reads it before it is
    written. Raises as `snapshot`.
    """
    return _in(cache, host, state_ids_of(plan), "slot", implementation)


def _out(cache: KVCache, host: HostCache, ids: Ids, scope: RecordScope, choice: SwapImplementation) -> jax.Array:
    check_same_records(cache, host, scope)
    record, pool, choice = record_format(cache.layout, scope), host.pages, choose_implementation(choice)
    if not record.pieces or not ids.records.size:
        return pool
    leaves, ids = leaves_of(cache, record), _own(ids, cache.pool_axis, scope)
    if choice == "ffi":
        return native_out(leaves, pool, ids, record.descriptors)
    rows, there = _records(ids, pool)
    valid = _is_unit(ids, units_of(cache, scope)) & there[:, 0]
    packed = _cut(pack(leaves, ids, valid, record), rows.shape[1], pool.shape[1])
    # Pairs that move nothing write zeros to the null record, which holds them already.
    there &= valid[:, None]
    packed = jnp.where(there.reshape(-1, 1), packed, jnp.uint8(0))
    return write(pool, packed, jnp.where(there, rows, 0).reshape(-1))


def _in(cache: KVCache, host: HostCache, ids: Ids, scope: RecordScope, choice: SwapImplementation) -> KVCache:
    check_same_records(cache, host, scope)
    record, pool, choice = record_format(cache.layout, scope), host.pages, choose_implementation(choice)
    if not record.pieces or not ids.records.size:
        return cache
    leaves, everyones, axis = leaves_of(cache, record), ids, cache.pool_axis
    ids = _own(ids, axis, scope)

    def to_all(leaves: tuple[jax.Array, ...]) -> KVCache:
        if scope == "slot" and axis.size > 1:
            leaves = _shared(leaves, everyones, record, units_of(cache, scope), axis)
        after = with_leaves(cache, record, leaves)
        if everyones.num_tokens is None:
            return after
        restored = everyones.records.reshape(len(everyones.units), -1)[:, 0] > 0
        return after.standing(jnp.where(restored, everyones.units, 0), everyones.num_tokens)

    if choice == "ffi":
        return to_all(native_in(leaves, pool, ids, record.descriptors))
    rows, there = _records(ids, pool)
    valid = _is_unit(ids, units_of(cache, scope)) & there[:, 0]
    records = read(pool, jnp.where(there, rows, 0).reshape(-1)).reshape(len(rows), -1)  # record 0 is zeros
    records = jnp.pad(records, ((0, 0), (0, max(record.bytes - records.shape[1], 0))))
    return to_all(unpack(leaves, records, ids, valid, record))


def _own(ids: Ids, axis: PoolAxis, scope: RecordScope) -> Ids:
    """The ids of this rank; what other ranks move becomes padding."""
    units = axis.own_blocks(ids.units) if scope == "block" else ids.units
    return ids._replace(units=units, records=axis.own_blocks(ids.records))


def _shared(
    leaves: tuple[jax.Array, ...], ids: Ids, record: RecordFormat, units: int, axis: PoolAxis
) -> tuple[jax.Array, ...]:
    """The leaves with the states that another rank has restored, too."""
    first = ids.records.reshape(len(ids.units), -1)[:, 0]
    owner = jnp.maximum(first - np.int32(1), 0) % np.int32(axis.size)
    real = _is_unit(ids, units) & (first > 0)

    def one(leaf: jax.Array, layers: int) -> jax.Array:
        view = leaf.reshape(layers, units, -1)
        mine = view.at[:, ids.units].get(mode="clip", wrap_negative_indices=False)
        everyones = lax.all_gather(mine, axis.name)  # [ranks, layers, N, ...]
        theirs = everyones[owner, :, jnp.arange(len(owner), dtype=jnp.int32)].swapaxes(0, 1)
        return set_existing(view, jnp.where(real, ids.units, np.int32(units)), theirs, axis=1).reshape(leaf.shape)

    return tuple(one(leaf, spec.layers) for leaf, spec in zip(leaves, record.leaves, strict=True))


def _is_unit(ids: Ids, units: int) -> jax.Array:
    """[N] bool: pairs whose unit exists."""
    return (ids.units > 0) & (ids.units < np.int32(units))


def _records(ids: Ids, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the records of every pair [N, K], and whether they exist."""
    rows = ids.records.reshape(len(ids.units), -1)
    return rows, (rows > 0) & (rows < np.int32(pool.shape[0]))


def _cut(packed: jax.Array, count: int, width: int) -> jax.Array:
    """States or blocks [N, bytes] as rows of a pool [N * count, width]; what these do not reach is left out."""
    packed = packed[:, : count * width]
    return jnp.pad(packed, ((0, 0), (0, count * width - packed.shape[1]))).reshape(-1, width)
