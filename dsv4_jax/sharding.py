"""The cache over several devices: requests along a data axis, query heads along a tensor axis, one request's blocks
along a pool axis.

Along the data axis every shard is a cache of its own: its own unit ids, its own null units, its own
manager. So a step under `jax.shard_map` is the single-device step, and no collective touches the
cache. DeepSeek-V4 has one latent KV head, shared by all query heads: along a tensor axis there is
there is nothing to split, every device of it holds the same rows and attends with its share of the heads.
Along a pool axis (which may be the tensor axis) each device holds its share of every request's blocks, all of them the
windows and compressor state: the same requests, of n times the tokens. Plans are those of one manager, whose
`CacheSize.pool_ranks` is n.


    mesh  = jax.make_mesh((4,), ("data",))
    cache = dsv4.init_cache(layout, size, sharding=dsv4.cache_sharding(layout, mesh))   # size: of one shard
    step  = dsv4.shard_step(dsv4.model.decode_step, mesh)
    shape = managers[0].pinned_shape(sequences)                                         # one manager per shard
    plans = [m.plan_step(scheduled[i], shape=shape) for i, m in enumerate(managers)]
    logits, cache = step(params, cache, dsv4.stack_plans(plans), tokens)                # tokens: shards concatenated
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .cache import KVCache, cache_partition
from .checks import check_integer, shown
from .errors import LayoutError, PlanError
from .layout import CacheLayout, check_layout
from .ops.attend_parts import PARTS
from .ops.exchange import Peers, using
from .ops.pool_axis import ONE_RANK, PoolAxis
from .plan import PackedPlan, StepPlan

__all__ = ["cache_sharding", "shard_step", "stack_plans"]


def cache_sharding(
    layout: CacheLayout,
    mesh: Mesh,
    *,
    data_axis: str | None = "data",
    tensor_axis: str | None = None,
    pool_axis: str | None = None,
) -> KVCache:
    """Where the leaves of a cache go: a `KVCache` whose arrays are `NamedSharding`s, for `init_cache`.

    The leading axis of every leaf is split over the data axis, that of blocks' leaves over the pool axis too; over all
    other axes leaves are replicated.

    Args:
        layout: of one shard's cache (it is the same for all).
        mesh: of the devices.
        data_axis: the axis that splits requests and blocks; None if there is none.
        tensor_axis: the axis that splits query heads, if any. Checked only: the cache does not
            depend on it.
        pool_axis: the axis that splits each request's blocks, if any: the tensor axis, or one of its own.

    Raises:
        LayoutError: the mesh has no such axis, the heads do not divide by the tensor axis, the pool axis is the data
            axis, or its size is not 1, 2, 4 or 8; or the arguments are of another kind.
    """
    check_layout(layout)
    _require_axes(mesh, data_axis, tensor_axis, pool_axis)
    heads = layout.cfg.num_attention_heads
    if tensor_axis is not None and heads % mesh.shape[tensor_axis]:
        raise LayoutError(f"{heads} query heads do not divide by axis {tensor_axis!r} of {mesh.shape[tensor_axis]}")
    pool = ONE_RANK
    if pool_axis is not None:
        pool = PoolAxis(pool_axis, mesh.shape[pool_axis])
        if pool_axis == data_axis or PARTS % pool.size:
            problem = "splits requests" if pool_axis == data_axis else f"has {pool.size} devices, not 1, 2, 4 or 8"
            raise LayoutError(f"axis {pool_axis!r} cannot split a request's blocks: it {problem}")
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), cache_partition(layout, pool, data_axis))


def stack_plans(plans: Sequence[StepPlan]) -> PackedPlan:
    """Returns the plans of all data shards, in their order, as the one argument of a sharded step.

    A shard with nothing to do takes part with a plan of padding (`plan_step([], shape=shape)`).

    Returns:
        A packed plan whose vector holds the shards' plans one after the other: split over the data
        axis, each shard unpacks its own.

    Raises:
        PlanError: no plans or something else, plans of different shapes (pin one shape for all) or for different
            caches.
    """
    plans = [*plans]
    if not plans:
        raise PlanError("a sharded step needs one plan per data shard, got none")
    if others := [plan for plan in plans if not isinstance(plan, StepPlan)]:
        raise PlanError(f"a sharded step needs one plan per data shard, got {shown(others[0])}")
    packed = [plan.pack() for plan in plans]
    for i, plan in enumerate(packed):
        if plan.facts != packed[0].facts:
            raise PlanError(f"shard {i} has a plan for {plan.facts}, shard 0 for {packed[0].facts}: not of one cache")
        for name, first, shape in zip(StepPlan._fields, packed[0].shapes, plan.shapes, strict=False):
            if shape != first:
                raise PlanError(f"shard {i} has {name} {shape}, shard 0 has {first}: plan all shards with one shape")
    return dataclasses.replace(packed[0], vector=np.concatenate([plan.vector for plan in packed]))


def shard_step(
    step: Callable[..., tuple[Any, ...]],
    mesh: Mesh,
    *,
    data_axis: str | None = "data",
    param_specs: Any = None,
    out_axis: Any = 0,
    donated: Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    peers: Sequence[Peers] = (),
    **options: Any,
) -> Callable[..., tuple[Any, ...]]:
    """Returns a step of every data shard, jitted, the cache donated.

    Args:
        step: `(params, cache, plan, *arrays, **options) -> (*results, cache)`, such as `model.decode_step`,
            `model.prefill`, `model.forward`, `model.decode_loop` or `model.draft_step`; its first array is the tokens.
        mesh: of the devices.
        data_axis: splits the cache, the plans of `stack_plans`, and the first axis of each of the arrays; None
            if there is none: one shard.
        param_specs: `PartitionSpec`s of the parameters (a prefix of their tree); default: those of
            `model.shard_params` as they are, others replicated.
        out_axis: of the results, the one that data shards split: 1 of the tokens that `model.decode_loop` samples. Or a
            tuple of these, one for each result: of a pytree one for all of it, or a prefix of it. Loops with counts of
            penalties have `(Sampled(1, 1, 1, 1, 1, counts=0),)`.
        donated: which of the arrays are donated as the cache is, counted from 0, the tokens: such as counts.
        compiler_options: of `jax.jit`, such as `model.GPU_DECODE_OPTIONS`.
        peers: `ops.Exchange.peers` of the mesh's axes, for exchanges in the project's own CUDA; without them
            XLA's collectives serve.
        options: passed on to `step`; they are static.

    Returns:
        A function of (params, cache, plan, *arrays), with tokens [shards * T] and, of `model.decode_step`, logits
        [shards * B, vocab].

    Raises:
        LayoutError: the mesh has no such axis, or `out_axis` is none; when it is traced: the parameters, or the cache's
            blocks, are split over a mesh of other sizes.
    """
    _require_axes(mesh, data_axis)
    split = PartitionSpec(data_axis)

    def of_results(axis: Any) -> PartitionSpec:
        return PartitionSpec(*[None] * check_integer("out_axis", axis, error=LayoutError), data_axis)

    results = jax.tree.map(of_results, out_axis) if isinstance(out_axis, tuple) else of_results(out_axis)
    explicit = AxisType.Explicit in mesh.axis_types

    def local(params: Any, cache: KVCache, plan: PackedPlan, *arrays: jax.Array) -> tuple[tuple[Any, ...], KVCache]:
        with using(*peers):
            *made, cache = step(params, cache, plan, *arrays, **options)
        return tuple(made), cache

    def placed(params: Any, cache: KVCache, plan: PackedPlan, *arrays: jax.Array) -> tuple[Any, ...]:
        if explicit:
            # Host arrays come in replicated, and explicit axes want to be told what becomes of them.
            plan, arrays = jax.reshard((plan, arrays), NamedSharding(mesh, split))
        of_params = _partition(params, mesh) if param_specs is None else param_specs
        pool = cache.pool_axis
        if pool.name is not None and mesh.shape.get(pool.name) != pool.size:
            raise LayoutError(
                f"blocks are split over {pool.size} devices of {pool.name!r}, this mesh is {dict(mesh.shape)}"
            )
        of_cache = cache_partition(cache.layout, pool, data_axis, checked=cache.checked)
        # check_vma: kernels written in Pallas do not say how their outputs vary over the mesh.
        sharded = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(of_params, of_cache, split, *[split] * len(arrays)),
            out_specs=(results, of_cache),
            check_vma=False,
        )
        made, cache = sharded(params, cache, plan, *arrays)
        return (*made, cache)

    return jax.jit(placed, donate_argnums=(1, *(3 + i for i in donated)), compiler_options=dict(compiler_options or {}))


@runtime_checkable
class _Placed(Protocol):
    """A part of the parameters that knows how its arrays are split, and over which axes, by name and size."""

    @property
    def axes(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def partition(self) -> PartitionSpec: ...


def _partition(params: Any, mesh: Mesh) -> Any:
    """Returns a prefix of the parameters' tree."""

    def of_node(node: Any) -> PartitionSpec:
        if not isinstance(node, _Placed):
            return PartitionSpec()
        if any(mesh.shape.get(axis) != size for axis, size in node.axes):
            raise LayoutError(f"parameters are split over a mesh of {dict(node.axes)}, this one is {dict(mesh.shape)}")
        return node.partition

    return jax.tree.map(of_node, params, is_leaf=lambda node: isinstance(node, _Placed))


def _require_axes(mesh: Mesh, *axes: str | None) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise LayoutError(f"expected a jax.sharding.Mesh, got {shown(mesh)}")
    for axis in axes:
        if axis is not None and axis not in mesh.shape:
            raise LayoutError(f"the mesh has no axis {axis!r}, it has {', '.join(map(repr, mesh.axis_names))}")
