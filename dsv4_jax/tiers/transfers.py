"""`run_transfers`: what a manager wants moved before a step, in its order; `stack_transfers`: of several as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ..cache import KVCache
from ..errors import LayoutError
from ..manager.transfers import Transfers, TransferStage
from .async_swap import start_swap
from .host_cache import HostCache
from .record_copy import SwapImplementation

__all__ = ["StackedTransfers", "run_transfers", "stack_transfers"]

AnyHost = TypeVar("AnyHost", HostCache, None)


def run_transfers(
    cache: KVCache,
    host: AnyHost,
    stages: Iterable[TransferStage] | StackedTransfers,
    *,
    implementation: SwapImplementation = None,
) -> tuple[KVCache, AnyHost]:
    """Runs `KVCacheManager.take_transfers()`: before the step they were taken for, on what the step before returned.

    Nothing is waited for. Every copy is a computation of its own, with what it writes donated; steps that
    are given the results come after them. If one raises, nothing of the transfers is lost: those that did not run come
    with the next `take_transfers`. (Arrays that the copies before it have donated are gone, though: if there were any,
    only new ones and `KVCacheManager.reset` are left.)

    Args:
        cache, host: of one device, or both over one mesh. Without a host tier there is no host: None.
        stages: over a mesh those of `stack_transfers`.

    Raises as the operations of `dsv4_jax.tiers.swap`, and:
        PlanError: the host cache has fewer pages than the manager's `HostSize`; of that copy nothing has run.
        LayoutError: the transfers of a manager, or of several, are not those of as many data shards as there are.
        PlanError: they have run already, or the manager was reset since they were taken.
    """
    if isinstance(stages, Transfers | StackedTransfers):
        # Tables are on all ranks of a pool axis, pages are not.
        split, ranks = cache.block_table, 1
        if host is not None:
            split, ranks = cast("HostCache", host).pages, cache.pool_axis.size
        own = split.sharding.shard_shape(split.shape)[0]
        managers, shards = getattr(stages, "managers", 1), split.shape[0] // own // ranks
        if managers != shards:
            raise LayoutError(f"transfers of {managers} managers for {shards} data shards (see stack_transfers)")
    for name, plan in _calls(stages):
        if plan is None:
            continue
        written, _ = start_swap(name, cache, host, plan, implementation=implementation)
        if isinstance(written, HostCache):
            host = cast("AnyHost", written)
        else:
            cache = written
    return cache, host


def _calls(stages: Iterable[TransferStage] | StackedTransfers) -> Iterator[tuple[Any, Any]]:
    """The calls of stages one by one: of a manager's transfers each counts as run when the next one is asked for."""
    if isinstance(stages, Transfers | StackedTransfers):
        return iter(stages.calls())
    return ((name, getattr(stage, name)) for stage in stages for name in TransferStage._fields)


@dataclasses.dataclass(frozen=True)
class StackedTransfers:
    """What the managers of all data shards want moved, for `run_transfers` on one cache over a mesh. They run once.

    Attributes:
        transfers: of each manager.
    """

    transfers: tuple[Iterable[TransferStage], ...]

    @property
    def managers(self) -> int:
        """The number of managers whose transfers they are."""
        return len(self.transfers)

    def calls(self) -> Iterator[tuple[str, Any]]:
        """The calls of the stages, as those of `Transfers`. Those of shards that have run less far catch up alone."""
        shards = [*map(_calls, self.transfers)]
        calls = [next(shard, None) for shard in shards]
        while names := {call[0] for call in calls if call is not None}:
            name = min(names, key=TransferStage._fields.index)
            mine = [i for i, call in enumerate(calls) if call is not None and call[0] == name]
            yield name, _stacked([call[1] if call is not None and i in mine else None for i, call in enumerate(calls)])
            for i in mine:
                calls[i] = next(shards[i], None)


def stack_transfers(transfers: Sequence[Iterable[TransferStage]]) -> StackedTransfers:
    """Returns what the managers of all data shards want moved, for `run_transfers` on one cache over a mesh.

    Args:
        transfers: `take_transfers()` of each, in their order. They count as run when these have.
    """
    return StackedTransfers(tuple(transfers))


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
