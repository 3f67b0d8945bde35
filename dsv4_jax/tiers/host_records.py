"""Records of a host pool, gathered into one array and scattered from one. Traceable."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..records import whole_rows
from .record_copy import HOST, Ids, SwapImplementation, choose_implementation, native_out, positions, read, write

__all__ = ["gather_records", "scatter_records"]


def gather_records(pool: jax.Array, records: jax.Array, implementation: SwapImplementation = None) -> jax.Array:
    """Rows `records` [N] int32 of a pool of host records as one array [N, bytes] in host memory.

    Ids that are null or out of range give zeros.
    """
    width = pool.shape[1]
    if not len(records) or not width:
        return jax.device_put(jnp.zeros((len(records), width), jnp.uint8), HOST)
    if choose_implementation(implementation) == "ffi":
        packed = jax.device_put(jnp.zeros((len(records), width), jnp.uint8), HOST)
        ids = Ids(records, positions(records), first_record=0)
        return native_out((pool,), packed, ids, whole_rows(width))
    valid = (records > 0) & (records < pool.shape[0])
    return jax.device_put(read(pool, jnp.where(valid, records, 0)), HOST)


def scatter_records(
    pool: jax.Array, packed: jax.Array, records: jax.Array, implementation: SwapImplementation = None
) -> jax.Array:
    """A pool of host records with rows `records` [N] int32 set to `packed` [N, bytes], in either memory.

    Ids that are null or out of range set nothing.
    """
    if choose_implementation(implementation) == "ffi":
        ids = Ids(positions(records), records, first_unit=0)
        return native_out((packed,), pool, ids, whole_rows(pool.shape[1]))
    valid = (records > 0) & (records < pool.shape[0])
    if jax.typeof(packed).memory_space == HOST:
        # Nothing is computed in host memory.
        packed = jax.device_put(packed, jax.memory.Space.Device)
    packed = jnp.where(valid[:, None], packed, jnp.uint8(0))
    return write(pool, packed, jnp.where(valid, records, 0))
