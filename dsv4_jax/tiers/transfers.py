"""`run_transfers`: runs what the manager wants moved before a step, in its order."""

from __future__ import annotations

from collections.abc import Iterable

from ..cache import KVCache
from ..manager import TransferStage
from .async_swap import restore_async, snapshot_async, swap_in_async, swap_out_async
from .host_cache import HostCache
from .record_copy import SwapImplementation

__all__ = ["run_transfers"]


def run_transfers(
    cache: KVCache, host: HostCache, stages: Iterable[TransferStage], *, implementation: SwapImplementation = None
) -> tuple[KVCache, HostCache]:
    """Runs `KVCacheManager.take_transfers()`: before the step they were taken for, on what the step before returned.

    Nothing is waited for. Every copy is a computation of its own, with what it writes donated; steps that
    are given the results come after them.

    Raises as `swap_out` and `snapshot`.
    """
    for stage in stages:
        if stage.swap_out is not None:
            host, _ = swap_out_async(cache, host, stage.swap_out, implementation=implementation)
        if stage.snapshot is not None:
            host, _ = snapshot_async(cache, host, stage.snapshot, implementation=implementation)
        if stage.swap_in is not None:
            cache, _ = swap_in_async(cache, host, stage.swap_in, implementation=implementation)
        if stage.restore is not None:
            cache, _ = restore_async(cache, host, stage.restore, implementation=implementation)
    return cache, host
