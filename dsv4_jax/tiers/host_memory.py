"""The host pool's memory itself, for what is no computation: transports that read it and write to it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LayoutError, TransferError

if TYPE_CHECKING:
    from .host_cache import HostCache

__all__ = ["host_memories", "host_memory", "host_places"]


def host_memory(host: HostCache) -> np.ndarray:
    """Returns `host_memories` of a pool on one device. Raises `LayoutError` if it is on several."""
    memories = host_memories(host)
    if len(memories) > 1:
        raise LayoutError(f"the host pool lies in {len(memories)} memories, see host_memories")
    return memories[0]


def host_memories(host: HostCache) -> list[np.ndarray]:
    """The pages [1 + n, page_bytes(layout)] uint8 of a host pool where they are, of each pool rank. Waits for them.

    They keep nothing alive: they are good while the pool is, which donation hands on in place. Whoever writes a page
    does so only while no computation reads or writes it: the runtime knows nothing of it.

    Raises:
        LayoutError: some pages are in several memories (over an axis of the mesh that is not the pool axis).
    """
    host.pages.block_until_ready()
    shards = _shards(host)
    if len({shard.index[0].start for shard in shards}) < len(shards):
        raise LayoutError(f"host pages are in several memories each: {host.pages.sharding}")
    memories = []
    for shard in shards:
        memory = (ctypes.c_uint8 * shard.data.nbytes).from_address(shard.data.unsafe_buffer_pointer())
        memories.append(np.ctypeslib.as_array(memory).reshape(shard.data.shape))
    return memories


def host_places(host: HostCache) -> list[tuple[int, tuple[int, ...]]]:
    """Returns address and shape of each of `host_memories`, without waiting for what computes them.

    Raises:
        TransferError: the pool was donated: it is nowhere any more.
    """
    if host.pages.is_deleted():
        raise TransferError("this host pool was donated: give what it was donated for (see run_transfers)")
    return [(shard.data.unsafe_buffer_pointer(), shard.data.shape) for shard in _shards(host)]


def _shards(host: HostCache) -> list[Any]:
    """Returns the shards of the pages, in the order of their rows."""
    return sorted(host.pages.addressable_shards, key=lambda shard: shard.index[0].start or 0)
