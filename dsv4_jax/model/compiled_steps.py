"""Where a cache lies, one device or a mesh, and steps compiled for there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..cache import KVCache, mesh_of
from ..ops.exchange import Peers
from ..plan import PackedPlan, StepPlan
from ..sharding import shard_step, stack_plans
from .weights.split import DATA

__all__ = ["CompiledSteps", "stacked"]


class CompiledSteps:
    """One device, or a mesh.

    Attributes:
        shards: how many data shards the cache has.
        rows: where arrays go whose first axis the data shards share.
        whole: where arrays go that each device has all of.
    """

    def __init__(self, cache: KVCache, peers: Sequence[Peers] = ()):
        placed: Sharding = next(iter(cache.arrays.values())).sharding
        self._mesh, self._peers, self.shards, self.rows = mesh_of(placed), tuple(peers), 1, placed
        if self._mesh is None:
            self.whole: Sharding = SingleDeviceSharding(*placed.device_set)
        else:
            self.shards = self._mesh.shape.get(DATA, 1)
            self.rows = NamedSharding(self._mesh, PartitionSpec(_data_axis(self._mesh)))
            self.whole = NamedSharding(self._mesh, PartitionSpec())

    def compiled(
        self,
        step: Callable[..., Any],
        xla: Mapping[str, Any] | None = None,
        *,
        donated: tuple[int, ...] = (),
        **options: Any,
    ) -> Any:
        """Returns `step` for here, jitted, the cache donated: the same one for the same options.

        Args:
            step: as of `shard_step`.
            xla: compiler options.
            donated: as of `shard_step`.
            options: of the step, hashable.
        """
        return _compiled(step, self._mesh, self._peers, tuple((xla or {}).items()), donated, **options)


def stacked(plans: Sequence[StepPlan]) -> PackedPlan:
    """Returns one plan for all data shards."""
    return plans[0].pack() if len(plans) == 1 else stack_plans(plans)


@functools.lru_cache(maxsize=64)
def _compiled(
    step: Callable[..., Any],
    mesh: Mesh | None,
    peers: tuple[Peers, ...],
    xla: tuple[tuple[str, Any], ...],
    donated: tuple[int, ...],
    **options: Any,
) -> Any:
    if mesh is None:
        whole = functools.partial(step, **options)
        return jax.jit(whole, donate_argnums=(1, *(3 + i for i in donated)), compiler_options=dict(xla))
    how: dict[str, Any] = dict(data_axis=_data_axis(mesh), compiler_options=dict(xla), peers=peers, donated=donated)
    sharded = shard_step(step, mesh, **how, **options)
    if AxisType.Explicit not in mesh.axis_types:
        return sharded

    def within(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return sharded(*args)

    return within


def _data_axis(mesh: Mesh) -> str | None:
    return DATA if DATA in mesh.shape else None
