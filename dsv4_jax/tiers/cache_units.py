"""What a swap moves: the leaves of a cache that a record holds, its units, and the ids of a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..cache import KVCache
from ..errors import LayoutError, ShapeError
from ..plan import OwnSwapPlan, StateSwapPlan, SwapPlan
from ..record_format import RecordFormat, RecordScope
from .host_cache import HostCache
from .record_copy import Ids

__all__ = ["check_same_records", "ids_of", "leaves_of", "state_ids_of", "units_of", "with_leaves"]


def leaves_of(cache: KVCache, record: RecordFormat) -> tuple[jax.Array, ...]:
    """The cache arrays a record holds a unit of, in its order."""
    return tuple(cache.arrays[leaf.name] for leaf in record.leaves)


def with_leaves(cache: KVCache, record: RecordFormat, leaves: tuple[jax.Array, ...]) -> KVCache:
    """The cache with these leaves: the inverse of `leaves_of`."""
    names = (leaf.name for leaf in record.leaves)
    return dataclasses.replace(cache, arrays=cache.arrays | dict(zip(names, leaves, strict=True)))


def units_of(cache: KVCache, scope: RecordScope) -> int:
    """Returns blocks or slots of the cache, the null unit included."""
    return cache.block_units if scope == "block" else cache.slot_units


def ids_of(plan: SwapPlan | OwnSwapPlan, kind: Any = SwapPlan) -> tuple[jax.Array, jax.Array]:
    """Returns the device and host ids of a plan of blocks. Raises `ShapeError` if it is not of this kind, or they are
    not int32 [N], of one N."""
    if not isinstance(plan, kind):
        raise ShapeError(f"blocks are swapped by a SwapPlan, got {type(plan).__name__}")
    device, host = (jnp.asarray(ids) for ids in plan)
    if device.shape != host.shape or device.ndim != 1 or not device.dtype == host.dtype == jnp.int32:
        raise ShapeError(
            f"a swap plan holds two int32 [N] arrays, got {device.dtype}{device.shape} and {host.dtype}{host.shape}"
        )
    return device, host


def state_ids_of(plan: StateSwapPlan) -> Ids:
    """Returns the ids of a plan of states. Raises `ShapeError` if they are not int32 [N], [N, K] and [N]."""
    if not isinstance(plan, StateSwapPlan):
        raise ShapeError(f"states are swapped by a StateSwapPlan, got {type(plan).__name__}")
    device, host, tokens = (jnp.asarray(ids) for ids in plan)
    shaped = host.ndim == 2 and host.shape[:1] == device.shape == tokens.shape
    if not shaped or {x.dtype for x in (device, host, tokens)} != {jnp.dtype(jnp.int32)}:
        raise ShapeError(
            f"a plan of states holds int32 [N], [N, K] and [N] arrays, got {device.dtype}{device.shape}, "
            f"{host.dtype}{host.shape} and {tokens.dtype}{tokens.shape}"
        )
    return Ids(device, host, num_tokens=tokens)


def check_same_records(cache: KVCache, host: HostCache, scope: RecordScope) -> None:
    """Raises `LayoutError` unless the host's records of the scope are as the cache's layout has them."""
    name, what = ("block_fingerprint", "blocks") if scope == "block" else ("snapshot_fingerprint", "states")
    if cache.layout != host.layout and getattr(cache.layout, name) != getattr(host.layout, name):
        raise LayoutError(f"host records of {host.layout} cannot hold {what} of {cache.layout}")
