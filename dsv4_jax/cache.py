"""The cache on the device: a pytree of flat arrays. A step of it, and its layers, are in `step.py`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .errors import PlanError
from .layout import CacheLayout, CacheSize, LeafSpec
from .ops.append import Rows
from .ops.copy import copy_units
from .ops.registry import Choice, frozen
from .plan import CacheFacts, PackedPlan, StepPlan, register_pytrees
from .step import CacheStep, LayerWrites

__all__ = ["KVCache", "init_cache"]


@dataclasses.dataclass(frozen=True)
class KVCache:
    """All cache bytes of one model instance. A pytree: jit it, donate it, shard it.

    Attributes:
        arrays: leaf name -> array, in the order and shapes of `layout.leaves`.
        layout: static.
    """

    arrays: dict[str, jax.Array]
    layout: CacheLayout

    def pool(self, name: str) -> Rows:
        """The parts of a pool ("swa", "csa", "hca", "index", "csa_state", ...)."""
        return tuple(self.arrays[leaf.name] for leaf in self.layout.leaves if leaf.pool == name)

    def with_pool(self, name: str, parts: Rows) -> KVCache:
        """This cache with a pool replaced."""
        names = [leaf.name for leaf in self.layout.leaves if leaf.pool == name]
        return dataclasses.replace(self, arrays=self.arrays | dict(zip(names, parts, strict=True)))

    @property
    def block_table(self) -> jax.Array:
        """[slots, max_blocks_per_request] int32."""
        return self.arrays["block_table.ids"]

    @property
    def slot_units(self) -> int:
        """Slots of this (possibly per-shard) cache, the null slot included."""
        return self.block_table.shape[0]

    @property
    def block_units(self) -> int:
        """Blocks of this (possibly per-shard) cache, the null block included."""
        for leaf in self.layout.leaves:
            if leaf.scope == "block":
                return self.arrays[leaf.name].shape[0] // (leaf.layers * leaf.rows)
        return 1

    @property
    def facts(self) -> CacheFacts:
        """What a plan of this cache knows of it."""
        paged = any(leaf.scope == "block" for leaf in self.layout.leaves)
        blocks = self.block_units if paged else None
        return CacheFacts(self.layout.fingerprint, self.slot_units, blocks, self.block_table.shape[1])

    def begin(self, plan: StepPlan | PackedPlan, implementation: Choice = None) -> CacheStep[KVCache]:
        """The step that a plan describes, with the plan's copies and block-table entries carried out.

        There is no other way to a layer, and `finish` gives the cache back:

            step = cache.begin(plan)
            for i in range(num_layers):
                layer = step.layer(i).append(kv)    # functional: every write returns a new view
                out, _ = layer.attend(queries, sink)
                step = layer.step
            cache = step.finish()

        Begin every step of a loop: that of `plan.advance()` has nothing to carry out.

        Args:
            plan: plain or packed, on the host or traced.
            implementation: of the ops the step's layers call (see `dsv4_jax.ops`).

        Raises:
            ForeignPlanError: the plan was made for another layout or size.
            PlanError: it is no plan of a step.
        """
        if not isinstance(plan, StepPlan | PackedPlan):
            raise PlanError(f"a step begins with a StepPlan or a PackedPlan, got {type(plan).__name__}")
        if plan.facts is not None:
            plan.facts.check(self.facts)
        unpacked: StepPlan = jax.tree.map(jnp.asarray, plan.unpack())  # NumPy arrays take no traced indices
        nothing = (LayerWrites(0),) * len(self.layout.schedule)
        return CacheStep(self._prepared(unpacked), unpacked, frozen(implementation), nothing)

    def _prepared(self, plan: StepPlan) -> KVCache:
        arrays = dict(self.arrays)
        for leaf in self.layout.leaves:
            if leaf.scope == "table":
                continue
            block = leaf.scope == "block"
            arrays[leaf.name] = copy_units(
                arrays[leaf.name],
                plan.copy_block_src if block else plan.copy_slot_src,
                plan.copy_block_dst if block else plan.copy_slot_dst,
                layers=leaf.layers,
                units=self.block_units if block else self.slot_units,
                rows=leaf.rows,
            )
        if plan.table_slot.shape[0]:
            table = arrays["block_table.ids"]
            arrays["block_table.ids"] = table.at[plan.table_slot, plan.table_index].set(
                jnp.asarray(plan.table_block), mode="drop", wrap_negative_indices=False
            )
        return dataclasses.replace(self, arrays=arrays)


jax.tree_util.register_dataclass(KVCache, data_fields=["arrays"], meta_fields=["layout"])
register_pytrees()


def init_cache(layout: CacheLayout, size: CacheSize, *, sharding: Any = None) -> KVCache:
    """An empty cache, all zeros.

    Args:
        layout: what to hold.
        size: how much of it (per shard, when sharded along a data axis).
        sharding: None for the default device, or the `KVCache` of shardings that
            `cache_sharding` returns: the leading axis of every leaf is then multiplied by its
            number of data shards, each holding a self-contained cache with its own unit ids.

    Raises:
        LayoutError: more rows than int32 has numbers (see `CacheLayout.check_size`); nothing was allocated.
    """
    layout.check_size(size)

    # Committed to its device, as what `swap_in` returns is: or a step would compile again after the first of those.
    device = None
    if sharding is None and not isinstance(zero := jnp.zeros(()), jax.core.Tracer):
        (device,) = zero.devices()

    def allocate(leaf: LeafSpec) -> jax.Array:
        rows, width = layout.leaf_shape(leaf, size)
        if sharding is None:
            return jnp.zeros((rows, width), leaf.dtype, device=device)
        placement = sharding.arrays[leaf.name]
        local = placement.shard_shape((1 << 40, width))[0]
        shape = (rows * ((1 << 40) // local), width)
        return jax.jit(functools.partial(jnp.zeros, shape, leaf.dtype), out_shardings=placement)()

    return KVCache({leaf.name: allocate(leaf) for leaf in layout.leaves}, layout)
