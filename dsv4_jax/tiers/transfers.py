"""`run_transfers`: what a manager wants moved before a step, in its order; `stack_transfers`: of several as one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..cache import KVCache
from ..errors import LayoutError
from ..manager import TransferStage
from ..manager.transfers import Transfers
from .async_swap import restore_async, snapshot_async, swap_in_async, swap_out_async
from .host_cache import HostCache
from .record_copy import SwapImplementation

__all__ = ["StackedTransfers", "run_transfers", "stack_transfers"]


def run_transfers(
    cache: KVCache, host: HostCache, stages: Iterable[TransferStage], *, implementation: SwapImplementation = None
) -> tuple[KVCache, HostCache]:
    """Runs `KVCacheManager.take_transfers()`: before the step they were taken for, on what the step before returned.

    Nothing is waited for. Every copy is a computation of its own, with what it writes donated; steps that
    are given the results come after them.

    Args:
        cache, host: of one device, or both over one mesh.
        stages: over a mesh those of `stack_transfers`.

    Raises as `swap_out` and `snapshot`, and:
        SwapPlanError: the host cache has fewer pages than the manager's `HostSize`; of that copy nothing has run.
        LayoutError: the transfers of a manager, or of several, are not those of as many data shards as there are.
    """
    if isinstance(stages, Transfers | StackedTransfers):
        own = host.pages.sharding.shard_shape(host.pages.shape)[0]
        managers, shards = getattr(stages, "managers", 1), host.pages.shape[0] // own // cache.pool_axis.size
        if managers != shards:
            raise LayoutError(f"transfers of {managers} managers for {shards} data shards (see stack_transfers)")
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


@dataclasses.dataclass(frozen=True)
class StackedTransfers:
    """Stages of a cache over a mesh, to be gone through once.

    Attributes:
        managers: how many they are of.
    """

    managers: int
    stages: Iterator[TransferStage]

    def __iter__(self) -> Iterator[TransferStage]:
        return self.stages


def stack_transfers(transfers: Sequence[Iterable[TransferStage]]) -> StackedTransfers:
    """What the managers of all data shards want moved, as the stages of one cache over a mesh.

    Args:
        transfers: `take_transfers()` of each, in their order. They count as gone through when the stages have been.
    """
    transfers = [*transfers]
    return StackedTransfers(len(transfers), _stages(transfers))


def _stages(transfers: Sequence[Iterable[TransferStage]]) -> Iterator[TransferStage]:
    nothing = TransferStage(None, None, None, None)
    for stages in itertools.zip_longest(*transfers, fillvalue=nothing):
        yield TransferStage(*(_stacked(plans) for plans in zip(*stages, strict=True)))


def _stacked(plans: Sequence[Any]) -> Any:
    """The plans of all shards one after the other, null ids where one has fewer pairs or pages; None if all are."""
    there = [plan for plan in plans if plan is not None]
    if not there:
        return None
    fields = []
    for i, arrays in enumerate(zip(*there, strict=True)):
        shape = np.max([array.shape for array in arrays], axis=0)
        whole = np.zeros((len(plans), *shape), np.int32)
        for part, plan in zip(whole, plans, strict=True):
            if plan is not None:
                part[tuple(map(slice, plan[i].shape))] = plan[i]
        fields.append(whole.reshape(-1, *shape[1:]))
    return type(there[0])(*fields)
