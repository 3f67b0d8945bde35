"""Records of a host pool, gathered into one array and scattered from one; and the same over the ranks of a pool."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..cache import mesh_of
from .record_copy import HOST, Ids, SwapImplementation, choose_implementation, native_out, positions, read, write

__all__ = ["gather_of_ranks", "gather_records", "scatter_of_ranks", "scatter_records", "whole_rows"]


def gather_records(pool: jax.Array, records: jax.Array, implementation: SwapImplementation = None) -> jax.Array:
    """Returns rows `records` [N] int32 of a pool of host records as one array [N, bytes] in host memory.

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
    """Returns a pool of host records with rows `records` [N] int32 set to `packed` [N, bytes], in either memory.

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


def gather_of_ranks(pool: jax.Array, records: np.ndarray) -> jax.Array:
    """Gathers records in a computation of its own, from a pool split over ranks or not.

    Args:
        pool: [ranks * (1 + n), bytes].
        records: [ranks * N] int32, rows of each rank, in its own ids.

    Returns:
        [ranks * N, bytes] in host memory, split as the pool is.
    """
    gather, _, place = _over(*_placed(pool))
    return gather(pool, _put(records, place))


def scatter_of_ranks(pool: jax.Array, packed: np.ndarray, records: np.ndarray) -> jax.Array:
    """Does the inverse: returns `pool`, which is donated, with those rows set to `packed` [ranks * N, bytes]."""
    _, scatter, place = _over(*_placed(pool))
    return scatter(pool, _put(packed, place), _put(records, place))


def _placed(pool: jax.Array) -> tuple[Mesh | None, PartitionSpec]:
    placed = pool.sharding
    mesh = mesh_of(placed)
    return mesh, placed.spec if mesh is not None and isinstance(placed, NamedSharding) else PartitionSpec()


def _put(x: np.ndarray, place: NamedSharding | None) -> jax.Array | np.ndarray:
    return x if place is None else jax.device_put(x, place)


@functools.cache
def _over(mesh: Mesh | None, spec: PartitionSpec):
    """Gathering and scattering, jitted, and the sharding of their other arguments."""

    def gather(pool: jax.Array, records: jax.Array) -> jax.Array:
        return gather_records(pool, records)

    def scatter(pool: jax.Array, packed: jax.Array, records: jax.Array) -> jax.Array:
        return scatter_records(pool, packed, records)

    if mesh is None:
        return jax.jit(gather), jax.jit(scatter, donate_argnums=0), None
    each = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(each(gather)), jax.jit(each(scatter), donate_argnums=0), NamedSharding(mesh, spec)


def whole_rows(width: int) -> tuple[int, ...]:
    """`RecordFormat.descriptors` of a record that is a row of one array [rows, width] uint8."""
    return (0, 1, 1, width, 0, 1, width, 0, 0, 0, 0)
