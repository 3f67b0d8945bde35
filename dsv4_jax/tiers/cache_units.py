"""What a swap moves: the leaves of a cache that a record holds, its units, and the ids of a plan."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..cache import KVCache
from ..errors import LayoutError, ShapeError
from ..plan import SwapPlan
from ..records import RecordFormat, RecordScope
from .host_cache import HostCache

__all__ = ["check_same_layout", "ids_of", "leaves_of", "units_of", "with_leaves"]


def leaves_of(cache: KVCache, record: RecordFormat) -> tuple[jax.Array, ...]:
    """The cache arrays a record holds a unit of, in its order."""
    return tuple(cache.arrays[piece.leaf.name] for piece in record.pieces)


def with_leaves(cache: KVCache, record: RecordFormat, leaves: tuple[jax.Array, ...]) -> KVCache:
    """The inverse of `leaves_of`."""
    names = (piece.leaf.name for piece in record.pieces)
    return dataclasses.replace(cache, arrays=cache.arrays | dict(zip(names, leaves, strict=True)))


def units_of(cache: KVCache, scope: RecordScope) -> int:
    """Blocks or slots of the cache, the null unit included."""
    return cache.block_units if scope == "block" else cache.slot_units


def ids_of(plan: SwapPlan) -> tuple[jax.Array, jax.Array]:
    """The plan's device and host ids. Raises `ShapeError` if they are not int32 [N], of one N."""
    device, host = (jnp.asarray(ids) for ids in plan)
    if device.shape != host.shape or device.ndim != 1 or not device.dtype == host.dtype == jnp.int32:
        raise ShapeError(
            f"a swap plan holds two int32 [N] arrays, got {device.dtype}{device.shape} and {host.dtype}{host.shape}"
        )
    return device, host


def check_same_layout(cache: KVCache, host: HostCache) -> None:
    """Raises `LayoutError` unless the records are of the cache's layout."""
    if cache.layout != host.layout:
        raise LayoutError(f"host records of {host.layout} cannot hold blocks of {cache.layout}")
