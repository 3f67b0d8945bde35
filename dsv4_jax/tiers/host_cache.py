"""The host tier: page-locked records that are part of the functional state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from ..checks import check_integer
from ..errors import CapacityError
from ..layout import CacheLayout, check_layout
from ..records import page_bytes

__all__ = ["HostCache", "init_host_cache"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HostCache:
    """Host records of blocks and of slots' states, in pages. A pytree: carry it beside the `KVCache`, donate it.

    A block record takes one page, a state `dsv4_jax.records.state_pages` of them, anywhere.

    Attributes:
        pages: [1 + num_pages, page_bytes(layout)] uint8 in pinned host memory; page 0 is null: no id names it, it stays
            zero.
        layout: static.
    """

    pages: jax.Array
    layout: CacheLayout

    def __repr__(self) -> str:
        return f"HostCache({self.num_pages} pages, {self.layout})"

    @property
    def num_pages(self) -> int:
        """Usable pages (of all shards together, outside `shard_map`): ids 1..num_pages."""
        return self.pages.shape[0] - 1


jax.tree_util.register_dataclass(HostCache, data_fields=["pages"], meta_fields=["layout"])


def init_host_cache(
    layout: CacheLayout,
    num_pages: int,
    *,
    device: jax.Device | None = None,
    sharding: NamedSharding | None = None,
) -> HostCache:
    """Empty host records, all zeros, in memory that the device can read and write.

    Page-locking takes a while (measured: 2.6 GB/s), so allocate once and donate from then on. It
    needs no device memory. A GPU process may lock 64 GiB unless the environment variable
    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says otherwise before jax starts.

    Args:
        layout: of the cache whose blocks and slots they shall hold.
        num_pages: as many block records as fit (per shard), the null page not counted.
        device: whose host memory; default: the default device.
        sharding: instead of `device`: as one leaf of `cache_sharding`, one of blocks. The leading axis is multiplied by
            the number of shards, each holding records of its own, null page included.

    Raises:
        LayoutError: `layout` is none.
        CapacityError: an impossible count, or the memory is not available; says how much was asked for.
    """
    check_layout(layout)
    num_pages = check_integer("num_pages", num_pages, 1, error=CapacityError)
    placement: Sharding
    shards = 1
    if sharding is not None:
        placement = sharding.with_memory_kind("pinned_host")
        shards = (1 << 40) // placement.shard_shape((1 << 40, 1))[0]
    else:
        placement = SingleDeviceSharding(device or jax.devices()[0], memory_kind="pinned_host")
    return HostCache(_allocate(shards * (1 + num_pages), page_bytes(layout), placement), layout)


def _allocate(pages: int, width: int, placement: Any) -> jax.Array:
    # NumPy's zeros take no memory until they are written, and unlike jnp's they take none of the device's. A CPU
    # device makes an array that begins at a multiple of 64 bytes its own, never to be updated in place: not this one.
    try:
        zeros = np.zeros(pages * width + 128, np.uint8)
    except (MemoryError, ValueError) as error:  # the latter: more than any array has
        raise CapacityError(f"{pages} host pages of {width} bytes: {pages * width} bytes are not available") from error
    start = -zeros.ctypes.data % 64 + 16
    zeros = zeros[start : start + pages * width].reshape(pages, width)
    try:
        return jax.block_until_ready(jax.device_put(zeros, placement))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise CapacityError(
            f"{pages} host pages of {width} bytes: {pages * width} bytes of page-locked memory are not available "
            "(a GPU process may lock 64 GiB unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise)"
        ) from error
