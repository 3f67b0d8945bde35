"""States in blocks of the device: from slots to blocks and back, and to the host. Plain XLA operations.

A state at a block boundary is a `dsv4_jax.records.snapshot_record`, cut into as many bytes as a block has over all
leaves of blocks (`block_bytes`). Nothing but the manager's books tells such a block from one with entries: it is
nobody's in the block table. States move one by one, so that there is never more than one beside the cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache import KVCache
from ..errors import LayoutError, ShapeError
from ..layout import CacheLayout
from ..plan import SpillPlan, StateBlocksPlan
from ..records import block_bytes, snapshot_record, state_blocks, state_record
from .cache_units import check_same_records, leaves_of, with_leaves
from .host_cache import HostCache
from .record_copy import Ids, pack, unpack, write

__all__ = ["get_states", "put_states", "spill_states"]


def put_states(cache: KVCache, plan: StateBlocksPlan) -> KVCache:
    """Copies the states of slots `plan.slots` to blocks `plan.blocks`.

    Raises:
        ShapeError: the plan's fields are not int32 [N], [N, K] and [N], with the K of the layout.
        LayoutError: the layout has no blocks, or they lie on the ranks of a pool axis.
    """
    slots, blocks, tokens = _checked(cache, plan)
    blocks_of, state = block_bytes(cache.layout), snapshot_record(cache.layout)

    def one(leaves: tuple[jax.Array, ...], pair: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
        slot, into, num_tokens = pair
        real = (slot > 0) & (slot < np.int32(cache.slot_units)) & (into[0] > 0)
        ids = Ids(slot[None], into[None], num_tokens=num_tokens[None])
        packed = pack(leaves_of(cache, state), ids, real[None], state)
        records = _fit(packed, len(into) * blocks_of.bytes).reshape(len(into), -1)
        return unpack(leaves, records, Ids(into, into), real & _is_block(cache, into), blocks_of), None

    return with_leaves(cache, blocks_of, lax.scan(one, leaves_of(cache, blocks_of), (slots, blocks, tokens))[0])


def get_states(cache: KVCache, plan: StateBlocksPlan) -> KVCache:
    """Copies the states in blocks `plan.blocks` to slots `plan.slots`; what of a slot is no part of its state becomes
    zero. Raises as `put_states`."""
    slots, blocks, tokens = _checked(cache, plan)
    whole = state_record(cache.layout)

    def one(leaves: tuple[jax.Array, ...], pair: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
        slot, source, num_tokens = pair
        real = (slot > 0) & (slot < np.int32(cache.slot_units)) & (source[0] > 0)
        record = _fit(_state_in(cache, source), whole.bytes)
        ids = Ids(slot[None], source[None], num_tokens=num_tokens[None])
        return unpack(leaves, record, ids, real[None], whole), None

    after = with_leaves(cache, whole, lax.scan(one, leaves_of(cache, whole), (slots, blocks, tokens))[0])
    return after.standing(jnp.where(blocks[:, 0] > 0, slots, 0), tokens)


def spill_states(cache: KVCache, host: HostCache, plan: SpillPlan) -> HostCache:
    """Copies the states in blocks `plan.blocks` to host pages `plan.host_ids`.

    Raises as `put_states`, and `LayoutError` if the host's records are of another layout.
    """
    check_same_records(cache, host, "slot")
    if not isinstance(plan, SpillPlan):
        raise ShapeError(f"states in blocks are spilled by a SpillPlan, got {type(plan).__name__}")
    blocks, pages = (jnp.asarray(ids) for ids in plan)
    _check_blocks(cache.layout, cache, blocks)
    size = host.pages.shape[1]

    def one(pool: jax.Array, source: jax.Array, into: jax.Array) -> jax.Array:
        there = (into > 0) & (into < np.int32(pool.shape[0])) & (source[0] > 0)
        records = _fit(_state_in(cache, source), len(into) * size).reshape(len(into), size)
        # Pairs that move nothing write zeros to the null record, which holds them already.
        records = jnp.where(there[:, None], records, jnp.uint8(0))
        return write(pool, records, jnp.where(there, into, 0))

    pool = host.pages
    for i in range(blocks.shape[0]):
        pool = one(pool, blocks[i], pages[i])
    return dataclasses.replace(host, pages=pool)


def _state_in(cache: KVCache, blocks: jax.Array) -> jax.Array:
    """Returns the bytes [1, K * block bytes] of the state in these blocks [K]."""
    record = block_bytes(cache.layout)
    return pack(leaves_of(cache, record), Ids(blocks, blocks), _is_block(cache, blocks), record).reshape(1, -1)


def _is_block(cache: KVCache, blocks: jax.Array) -> jax.Array:
    return (blocks > 0) & (blocks < np.int32(cache.block_units))


def _fit(record: jax.Array, size: int) -> jax.Array:
    """A record [1, bytes] in so many bytes; what is cut off is padding."""
    record = record[:, :size]
    return jnp.pad(record, ((0, 0), (0, size - record.shape[1])))


def _checked(cache: KVCache, plan: StateBlocksPlan) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not isinstance(plan, StateBlocksPlan):
        raise ShapeError(f"states in blocks are moved by a StateBlocksPlan, got {type(plan).__name__}")
    slots, blocks, tokens = (jnp.asarray(ids) for ids in plan)
    _check_blocks(cache.layout, cache, blocks)
    if slots.shape != blocks.shape[:1] or tokens.shape != slots.shape or not slots.dtype == tokens.dtype == jnp.int32:
        raise ShapeError(f"slots are {slots.dtype}{slots.shape}, tokens {tokens.dtype}{tokens.shape}, not int32 [N]")
    return slots, blocks, tokens


def _check_blocks(layout: CacheLayout, cache: KVCache, blocks: jax.Array) -> None:
    if not (count := state_blocks(layout)) or cache.pool_axis.size > 1:
        raise LayoutError("states lie in blocks only where there are blocks, and all of them on one device")
    if blocks.ndim != 2 or blocks.shape[1] != count or blocks.dtype != jnp.int32:
        raise ShapeError(f"the blocks of states are int32 [N, {count}], got {blocks.dtype}{blocks.shape}")
