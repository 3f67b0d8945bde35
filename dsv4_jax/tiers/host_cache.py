"""The host tier: page-locked records that are part of the functional state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from ..errors import CapacityError
from ..layout import CacheLayout
from ..records import block_record, snapshot_record

__all__ = ["HostCache", "init_host_cache"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HostCache:
    """Host records of blocks and of slot snapshots. A pytree: carry it beside the `KVCache`, donate it.

    Attributes:
        blocks: [1 + num_blocks, block_record(layout).bytes] uint8 in pinned host memory; record 0 is
            null: no id names it, it stays zero.
        snapshots: [1 + num_snapshots, snapshot_record(layout).bytes] likewise; None if there are none.
        layout: static.
    """

    blocks: jax.Array
    snapshots: jax.Array | None
    layout: CacheLayout

    def __repr__(self) -> str:
        return f"HostCache({self.num_blocks} blocks, {self.num_snapshots} snapshots, {self.layout})"

    @property
    def num_blocks(self) -> int:
        """Usable block records (of all shards together, outside `shard_map`): ids 1..num_blocks."""
        return self.blocks.shape[0] - 1

    @property
    def num_snapshots(self) -> int:
        """Usable snapshot records: ids 1..num_snapshots."""
        return 0 if self.snapshots is None else self.snapshots.shape[0] - 1


jax.tree_util.register_dataclass(HostCache, data_fields=["blocks", "snapshots"], meta_fields=["layout"])


def init_host_cache(
    layout: CacheLayout,
    num_blocks: int,
    *,
    snapshots: int = 0,
    device: jax.Device | None = None,
    sharding: NamedSharding | None = None,
) -> HostCache:
    """Empty host records, all zeros, in memory that the device can read and write.

    Page-locking takes a while (measured: 2.6 GB/s), so allocate once and donate from then on. It
    needs no device memory. A GPU process may lock 64 GiB unless the environment variable
    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says otherwise before jax starts.

    Args:
        layout: of the cache whose blocks and slots they shall hold.
        num_blocks: block records (per shard), the null record not counted.
        snapshots: snapshot records (per shard), the null record not counted.
        device: whose host memory; default: the default device.
        sharding: instead of `device`: as one leaf of `cache_sharding`. The leading axis is multiplied by
            the number of shards, each holding records of its own, null record included.

    Raises:
        CapacityError: impossible counts, or the memory is not available; says how much was asked for.
    """
    for name, count, least in (("num_blocks", num_blocks, 1), ("snapshots", snapshots, 0)):
        if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < least:
            raise CapacityError(f"{name} must be an integer >= {least}, got {count!r}")
    placement: Sharding
    shards = 1
    if sharding is not None:
        placement = sharding.with_memory_kind("pinned_host")
        shards = (1 << 40) // placement.shard_shape((1 << 40, 1))[0]
    else:
        placement = SingleDeviceSharding(device or jax.devices()[0], memory_kind="pinned_host")
    blocks = _allocate(shards * (1 + int(num_blocks)), block_record(layout).bytes, placement)
    states = _allocate(shards * (1 + int(snapshots)), snapshot_record(layout).bytes, placement) if snapshots else None
    return HostCache(blocks, states, layout)


def _allocate(records: int, width: int, placement: Any) -> jax.Array:
    # NumPy's zeros take no memory until they are written, and unlike jnp's they take none of the device's. A CPU
    # device makes an array that begins at a multiple of 64 bytes its own, never to be updated in place: not this one.
    zeros = np.zeros(records * width + 128, np.uint8)
    start = -zeros.ctypes.data % 64 + 16
    zeros = zeros[start : start + records * width].reshape(records, width)
    try:
        return jax.block_until_ready(jax.device_put(zeros, placement))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise CapacityError(
            f"{records} host records of {width} bytes: {records * width} bytes of page-locked memory are not available "
            "(a GPU process may lock 64 GiB unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise)"
        ) from error
