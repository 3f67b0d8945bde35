"""Swaps as computations of their own, each with a `TransferHandle` for who needs to know when it has ended.

Over a mesh (host records with a `sharding`) every data shard moves between its own cache and its own records, by its
part of the plan: `dsv4_jax.stack_transfers` makes one of the plans of all. The ranks of a pool axis share a plan.

Pages of a plan are checked against the host cache (`PlanError`): one that is smaller than its manager's `HostSize`
would lose what it cannot hold.
"""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..cache import KVCache, cache_partition, mesh_of
from ..errors import LayoutError, PlanError
from . import state_blocks, swap
from .host_cache import HostCache
from .record_copy import SwapImplementation
from .transfer_handle import TransferHandle

__all__ = ["start_swap"]

Operation = Literal["swap_out", "swap_in", "snapshot", "restore", "put_states", "get_states", "spill_states"]
ON_DEVICE = ("put_states", "get_states")  # operations that need no host cache


def start_swap(
    operation: Operation,
    cache: KVCache,
    host: HostCache | None,
    plan: Any,
    *,
    implementation: SwapImplementation = None,
) -> tuple[Any, TransferHandle]:
    """Starts an operation of `dsv4_jax.tiers.swap`, or of `state_blocks`, as a computation of its own.

    Args:
        operation: its name. "swap_out", "snapshot" and "spill_states" write to `host`, the others to `cache`: that one
            is donated.
        cache, host, plan, implementation: as for the operation; those between slots and blocks need no host.

    Returns:
        What the operation returns (a `HostCache` or a `KVCache`), and a handle that says when it is there.

    Raises as the operation, and:
        PlanError: a page that the host cache has not.
        LayoutError: blocks and host pages are split over different axes, or there is no host.
    """
    started = time.monotonic()
    if host is None and operation not in ON_DEVICE:
        raise LayoutError(f"{operation} needs a host cache")
    placed = (cache.block_table if host is None else host.pages).sharding
    mesh = mesh_of(placed)
    spec = placed.spec if mesh is not None and isinstance(placed, NamedSharding) else PartitionSpec()
    axis = cache.pool_axis.name
    if axis is not None and axis not in _axes(spec):
        raise LayoutError(f"blocks are split over {axis!r}, host pages over {spec}: give these the sharding of blocks")
    if host is not None:
        _check_pages(cache, host, plan)
    result, token = _compiled(operation, mesh, spec)(cache, host, plan, implementation=implementation)
    return result, TransferHandle(token, started)


def __getattr__(name: str) -> Any:
    """Former names, for one release: `swap_out_async` and its like."""
    former = {f"{operation}_async": operation for operation in get_args(Operation)}
    if (operation := former.get(name)) is not None:
        warnings.warn(f"{__name__}.{name} is start_swap({operation!r}, ...) now", DeprecationWarning, stacklevel=2)
        return functools.partial(start_swap, operation)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_pages(cache: KVCache, host: HostCache, plan: Any) -> None:
    """Raises `PlanError` for a page that the host has not: a copy takes it for padding, and its bytes are lost."""
    ids = getattr(plan, "host_ids", None)
    if not isinstance(ids, np.ndarray) or not ids.size:
        return
    most = (host.pages.sharding.shard_shape(host.pages.shape)[0] - 1) * cache.pool_axis.size
    if (last := int(ids.max())) > most:
        at = int(np.argwhere(ids == last)[0, 0])
        raise PlanError(
            f"host_ids[{at}]: page {last} is beyond the host cache's {most} pages, fewer than the plan was made for"
        )


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Over which the leading axis is split."""
    first = spec[0] if len(spec) else None
    return () if first is None else first if isinstance(first, tuple) else (first,)


@functools.cache
def _compiled(operation: str, mesh: Mesh | None, spec: PartitionSpec):
    """The operation, jitted; over a mesh, with caches, records and plans split as `spec` says."""
    written = "host" if operation in ("swap_out", "snapshot", "spill_states") else "cache"

    def move(cache: KVCache, host: Any, plan: Any, implementation: SwapImplementation) -> Any:
        if operation in ON_DEVICE:
            return getattr(state_blocks, operation)(cache, plan)
        if operation == "spill_states":
            return state_blocks.spill_states(cache, host, plan)
        return getattr(swap, operation)(cache, host, plan, implementation=implementation)

    def run(cache: KVCache, host: Any, plan: Any, implementation: SwapImplementation):
        def here(cache: KVCache, host: Any, plan: Any):
            # Outputs of one executable become ready together: any of them tells of the transfer.
            return move(cache, host, plan, implementation), jnp.sum(jnp.asarray(plan[0]))[None]

        if mesh is None:
            return here(cache, host, plan)
        data = tuple(axis for axis in _axes(spec) if axis != cache.pool_axis.name) or None
        shared = PartitionSpec(data)  # by all ranks of a pool axis
        if AxisType.Explicit in mesh.axis_types:
            plan = jax.reshard(plan, NamedSharding(mesh, shared))
        of_cache = cache_partition(cache.layout, cache.pool_axis, data, checked=cache.checked)
        specs = (of_cache, spec, shared)
        out = (spec if written == "host" else of_cache, shared)
        each = jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return each(cache, host, plan)

    return jax.jit(run, donate_argnames=written, static_argnames="implementation")
