"""The cache on the device: a pytree of flat arrays. A step of it, and its layers, are in `step.py`."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .checks import shown
from .errors import LayoutError, PlanError, StepError
from .layout import MAX_LEAVES, CacheLayout, CacheSize, check_layout
from .ops.append import Rows, exists
from .ops.copy import copy_units
from .ops.pool_axis import ONE_RANK, PoolAxis
from .ops.registry import Choice, frozen
from .ops.scatter import set_existing
from .plan import CacheFacts, PackedPlan, StepPlan, register_pytrees
from .serialization import layout_from_json, layout_to_json, serialized_as
from .step import CacheStep, LayerWrites

__all__ = ["CHECKED", "KVCache", "cache_partition", "init_cache", "mesh_of"]

# Of a checked cache, beside the layout's leaves, [slots, 1] int32 each: the tokens that the slot's steps have computed,
# and one more than those at which the first step began that should not have, 0 without one.
LENGTH, WRONG = "checked.length", "checked.wrong"
CHECKED = frozenset((LENGTH, WRONG))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """All cache bytes of one model instance. A pytree: jit it, donate it, shard it, export a step of it (`jax.export`).

    Caches are equal if they are the same object; `dsv4_jax.testing` compares bytes. One that was donated raises
    `StepError` where it is used again: by `begin`, or as an argument of any jitted function. So does a checked
    one raise `StepError` (see `init_cache`), whose steps are waited for there.

    Attributes:
        arrays: leaf name -> array, in the order and shapes of `layout.leaves`; of a checked cache `CHECKED`, too.
        layout: static.
        pool_axis: of the mesh, the one whose devices share each request's blocks, if any; static.
    """

    arrays: dict[str, jax.Array]
    layout: CacheLayout
    pool_axis: PoolAxis = ONE_RANK

    def __repr__(self) -> str:
        leaves = [x for x in self.arrays.values() if hasattr(x, "shape") and hasattr(x, "dtype")]
        size = sum(x.size * x.dtype.itemsize for x in leaves)
        what = f"{size:,} bytes in {len(leaves)} arrays" if leaves else f"{len(self.arrays)} leaves"
        return f"KVCache({'donated' if _donated(self.arrays) else what}, {self.layout})"

    def pool(self, name: str) -> Rows:
        """Returns the parts of a pool ("swa", "csa", "hca", "index", "csa_state", ...)."""
        return tuple(self.arrays[leaf.name] for leaf in self.layout.leaves if leaf.pool == name)

    def with_pool(self, name: str, parts: Rows) -> KVCache:
        """Returns this cache with a pool replaced."""
        names = [leaf.name for leaf in self.layout.leaves if leaf.pool == name]
        return dataclasses.replace(self, arrays=self.arrays | dict(zip(names, parts, strict=True)))

    @property
    def block_table(self) -> jax.Array:
        """[slots, max_blocks_per_request] int32; along a pool axis the ids are those of all ranks."""
        return self.arrays["block_table.ids"]

    @property
    def slot_units(self) -> int:
        """Slots of this (possibly per-shard) cache, the null slot included."""
        return self.block_table.shape[0]

    @property
    def block_units(self) -> int:
        """Blocks of this (possibly per-shard, per-rank) cache, the null block included."""
        for leaf in self.layout.leaves:
            if leaf.scope == "block":
                return self.arrays[leaf.name].shape[0] // (leaf.layers * leaf.rows)
        return 1

    @property
    def facts(self) -> CacheFacts:
        """What a plan of this cache knows of it."""
        paged = any(leaf.scope == "block" for leaf in self.layout.leaves)
        blocks = (self.block_units - 1) * self.pool_axis.size + 1 if paged else None
        return CacheFacts(self.layout.fingerprint, self.slot_units, blocks, self.block_table.shape[1])

    @property
    def checked(self) -> bool:
        """Whether it was made with `init_cache(..., checked=True)`."""
        return LENGTH in self.arrays

    def check_order(self) -> None:
        """Waits for the steps so far. Of a cache that is not checked, or while it is traced, nothing is asked.

        Raises:
            StepError: one of them began elsewhere than the one before it ended.
        """
        wrong = self.arrays.get(WRONG)
        if not isinstance(wrong, jax.Array) or isinstance(wrong, jax.core.Tracer):
            return
        pairs = zip(wrong.addressable_shards, self.arrays[LENGTH].addressable_shards, strict=True)
        for starts, lengths in (jax.device_get((wrong.data, length.data)) for wrong, length in pairs):
            if len(slots := np.flatnonzero(starts)):
                slot = int(slots[0])
                raise StepError(
                    None,
                    f"a step began at token {int(starts[slot, 0]) - 1} of slot {slot}, which has "
                    f"{int(lengths[slot, 0])} tokens: a plan ran twice, was left out or ran out of order, a loop ran "
                    "other steps than the manager knows of, or a row that it counts was fed -1",
                )

    def stepped(self, plan: StepPlan) -> KVCache:
        """Returns the cache after a step of this plan: a checked cache compares its starts with the slots' lengths,
        which go on."""
        if not self.checked:
            return self
        start, most = plan.seq_start[:, None], self._checked(LENGTH, plan.seq_slot)
        # As many tokens as a step with drafts may have, the manager may take back, be they of one step or of several.
        least = most - np.int32(1 + self.layout.draft_tokens if self.layout.draft_tokens else 0)
        begins = start == 0  # and owes nothing to the request before
        right = begins | ((least <= start) & (start <= most))
        before = self._checked(WRONG, plan.seq_slot)
        wrong = jnp.where(right | (before > 0), before, start + np.int32(1))
        length = jnp.where(wrong == 0, start + plan.seq_count[:, None], most)
        return self._with_checked(plan.seq_slot, {LENGTH: length, WRONG: wrong})

    def standing(self, slots: jax.Array, num_tokens: jax.Array) -> KVCache:
        """Returns the cache as it stands once states of so many tokens are restored to these slots, [N] int32 both.

        Slots that do not exist are left out.
        """
        return self._with_checked(slots, {LENGTH: jnp.maximum(num_tokens, 0)[:, None]}) if self.checked else self

    def _checked(self, name: str, slots: jax.Array) -> jax.Array:
        return self.arrays[name].at[slots].get(mode="clip", wrap_negative_indices=False)

    def _with_checked(self, slots: jax.Array, rows: dict[str, jax.Array]) -> KVCache:
        # A leaf for each number: XLA may compute a row of several while it writes over it (seen on a CPU).
        real = jnp.where(exists(slots, self.slot_units), slots, np.int32(self.slot_units))
        changed = {name: set_existing(self.arrays[name], real, row) for name, row in rows.items()}
        return dataclasses.replace(self, arrays=self.arrays | changed)

    def begin(self, plan: StepPlan | PackedPlan, implementation: Choice = None) -> CacheStep[KVCache]:
        """Returns the step that a plan describes, with the plan's copies and block-table entries carried out.

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
            implementation: of the ops the step's layers call (see `dsv4_jax.ops`): a name that every op called must
                have, names by op, or None. Whatever it is, queries for rows kept in float32 are the reference's, as
                kernels give bfloat16.

        Raises:
            PlanError: the plan was made for another layout or size.
            PlanError: it is no plan of a step.
            StepError: the cache was donated to another step.
            LayoutError: an array is not the leaf that the layout has under its name, or of another size than the others
                (of a cache that was put together otherwise than by `init_cache`).
        """
        if _donated(self.arrays):
            raise _donated_error()
        self._check_arrays()
        if not isinstance(plan, StepPlan | PackedPlan):
            raise PlanError(f"a step begins with a StepPlan or a PackedPlan, got {type(plan).__name__}")
        if plan.facts is not None:
            plan.facts.check(self.facts)
        unpacked: StepPlan = jax.tree.map(jnp.asarray, plan.unpack())  # NumPy arrays take no traced indices
        nothing = (LayerWrites(0),) * len(self.layout.schedule)
        return CacheStep(self._prepared(unpacked), unpacked, frozen(implementation), nothing)

    def _check_arrays(self) -> None:
        if odd := sorted(self.arrays.keys() - CHECKED ^ {leaf.name for leaf in self.layout.leaves}):
            raise LayoutError(f"the arrays of a cache are the leaves of its layout; not both have {', '.join(odd)}")
        units = {"table": self.slot_units, "slot": self.slot_units, "block": self.block_units}
        for leaf in self.layout.leaves:
            array, rows = self.arrays[leaf.name], leaf.layers * units[leaf.scope] * leaf.rows
            width = self.block_table.shape[1] if leaf.scope == "table" else leaf.width
            if (array.shape, array.dtype) != ((rows, width), leaf.dtype):
                found = f"{array.dtype}{list(array.shape)}"
                raise LayoutError(f"leaf {leaf.name} is {found}, in this cache it is {leaf.dtype}{[rows, width]}")
        for name in CHECKED & self.arrays.keys():
            found, want = [*self.arrays[name].shape], [self.slot_units, 1]
            if found != want or not self.arrays.keys() >= CHECKED:
                raise LayoutError(f"{name} is {found}: of {self.slot_units} slots both have {want}")

    def _prepared(self, plan: StepPlan) -> KVCache:
        arrays, own = dict(self.arrays), self.pool_axis.own_blocks
        for leaf in self.layout.leaves:
            if leaf.scope == "table":
                continue
            block = leaf.scope == "block"
            arrays[leaf.name] = copy_units(
                arrays[leaf.name],
                own(plan.copy_block_src) if block else plan.copy_slot_src,
                own(plan.copy_block_dst) if block else plan.copy_slot_dst,
                layers=leaf.layers,
                units=self.block_units if block else self.slot_units,
                rows=leaf.rows,
            )
        for name in CHECKED & arrays.keys():
            arrays[name] = copy_units(
                arrays[name], plan.copy_slot_src, plan.copy_slot_dst, layers=1, units=self.slot_units, rows=1
            )
        if plan.table_slot.shape[0]:
            table = arrays["block_table.ids"]
            entries = (plan.table_slot, plan.table_index)
            arrays["block_table.ids"] = set_existing(table, entries, jnp.asarray(plan.table_block))
        return dataclasses.replace(self, arrays=arrays)


def _donated(arrays: dict[str, Any]) -> bool:
    """Whether a cache's arrays are gone. One is as good as all: a cache is donated whole."""
    array = arrays.get("block_table.ids")
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted()


_ARRAYS = jax.tree_util.GetAttrKey("arrays")


_Static = tuple[CacheLayout, PoolAxis]


def _donated_error() -> StepError:
    return StepError(
        None,
        "this cache was donated to a jitted step, which updated its arrays in place: go on with the cache that the "
        "step returned (logits, cache = step(params, cache, plan, tokens))",
    )


def _flatten(cache: KVCache) -> tuple[tuple[dict[str, jax.Array]], _Static]:
    if _donated(cache.arrays):
        raise _donated_error()  # before jax says that some int32[17,64] has been deleted
    cache.check_order()
    return (cache.arrays,), (cache.layout, cache.pool_axis)


def _flatten_with_keys(cache: KVCache) -> tuple[tuple[tuple[Any, dict[str, jax.Array]]], _Static]:
    (arrays,), static = _flatten(cache)
    return ((_ARRAYS, arrays),), static


def _unflatten(static: _Static, children: Iterable[Any]) -> KVCache:
    (arrays,) = children
    return KVCache(arrays, *static)


def _to_json(static: _Static) -> str:
    layout, axis = static
    return json.dumps([layout_to_json(layout), dataclasses.asdict(axis)])


def _from_json(text: str) -> _Static:
    layout, axis = json.loads(text)
    return layout_from_json(layout), PoolAxis(**axis)


jax.tree_util.register_pytree_with_keys(KVCache, _flatten_with_keys, _unflatten, _flatten)
serialized_as(KVCache, _to_json, _from_json)
register_pytrees()


def mesh_of(placed: Sharding) -> Mesh | None:
    """The mesh of several devices that an array lies over; None: it is on one."""
    if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh) and placed.mesh.size > 1:
        return placed.mesh
    return None


def cache_partition(
    layout: CacheLayout, pool_axis: PoolAxis, data: str | tuple[str, ...] | None, *, checked: bool = False
) -> KVCache:
    """Over which axes of a mesh the leading axis of each leaf is split: a `KVCache` of `PartitionSpec`s.

    Args:
        data: the axes that split all leaves; those of blocks are split over the pool axis, too.
        checked: of a checked cache.
    """
    axes = () if data is None else (data,) if isinstance(data, str) else data
    ours = PartitionSpec(axes or None)
    blocks = ours if pool_axis.name is None else PartitionSpec((*axes, pool_axis.name))
    specs: dict[str, Any] = {leaf.name: blocks if leaf.scope == "block" else ours for leaf in layout.leaves}
    if checked:
        specs |= dict.fromkeys(CHECKED, ours)
    return KVCache(specs, layout, pool_axis)


def init_cache(
    layout: CacheLayout,
    size: CacheSize,
    *,
    sharding: KVCache | Sharding | jax.Device | None = None,
    checked: bool = False,
) -> KVCache:
    """Returns an empty cache, all zeros.

    Args:
        layout: what to hold.
        size: how much of it (per shard, when sharded along a data axis; its blocks per rank, along a pool axis).
        sharding: where. None: on the default device; a device; a sharding for every leaf, such as
            `NamedSharding(mesh, PartitionSpec("data"))`; or the `KVCache` of shardings that
            `cache_sharding` returns. The leading axis of every leaf is multiplied by the
            number of shards it is split into, each holding a self-contained cache with its own unit ids.
        checked: each slot knows how many tokens its steps have computed, and a step that begins elsewhere raises
            `StepError`: a plan that ran twice, was left out or ran out of order. Without `jit` that step raises
            itself; with it the next use of the cache does, or `KVCache.check_order`. Every use waits for the step
            before: this is to look for mistakes with. A plan that starts a request is always right, and with drafts
            so is one that ran twice: it writes what it has written before.

    Raises:
        LayoutError: more rows than int32 has numbers (see `CacheLayout.check_size`), a sharding that splits more than
            the leading axis, or one of another layout or of other pool ranks, or arguments of another kind; nothing
            was allocated.
    """
    check_layout(layout)
    layout.check_size(size)
    if not isinstance(checked, bool) or (checked and len(layout.leaves) + len(CHECKED) > MAX_LEAVES):
        why = (
            f"with its row formats' {len(layout.leaves)} arrays there would be more than {MAX_LEAVES}"
            if checked is True
            else f"got {shown(checked)}"
        )
        raise LayoutError(f"checked is True or False: {why}")
    placements = _placements(layout, sharding)
    pool_axis = sharding.pool_axis if isinstance(sharding, KVCache) else ONE_RANK
    if pool_axis.size != size.pool_ranks:
        raise LayoutError(f"the size is of {size.pool_ranks} pool ranks, the sharding of {pool_axis.size}")

    # Committed to its device, as what `swap_in` returns is: or a step would compile again after the first of those.
    traced = isinstance(zero := jnp.zeros(()), jax.core.Tracer)
    default = None if traced else zero.sharding

    def allocate(name: str, rows: int, width: int, dtype: str) -> jax.Array:
        if placements is None:
            return _zeros((rows, width), dtype, default)
        placement = placements[name]
        return _zeros((rows * _shards(placement), width), dtype, placement, traced=traced)

    arrays = {leaf.name: allocate(leaf.name, *layout.leaf_shape(leaf, size), leaf.dtype) for leaf in layout.leaves}
    if checked:
        arrays |= {name: allocate("block_table.ids", size.slot_units, 1, "int32") for name in sorted(CHECKED)}
    return KVCache(arrays, layout, pool_axis)


def _zeros(shape: tuple[int, int], dtype: str, where: Sharding | None, *, traced: bool = False) -> jax.Array:
    if where is None:
        return jnp.zeros(shape, dtype)
    on_host = where.is_fully_addressable and all(device.platform == "cpu" for device in where.device_set)
    if on_host and not traced:  # nothing to compile, which would take longer than all else
        return jax.device_put(np.zeros(shape, dtype), where, may_alias=False)
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=where)()


def _placements(layout: CacheLayout, sharding: Any) -> dict[str, Sharding] | None:
    """Returns a sharding for every leaf. Raises `LayoutError`."""
    if sharding is None:
        return None
    if isinstance(sharding, jax.Device):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    if isinstance(sharding, KVCache):
        if sharding.layout != layout:
            raise LayoutError(f"the sharding is of {sharding.layout}, the cache of {layout}")
        placements: dict[str, Any] = dict(sharding.arrays)
    else:
        placements = dict.fromkeys((leaf.name for leaf in layout.leaves), sharding)
    for name, placement in placements.items():
        if not isinstance(placement, Sharding):
            raise LayoutError(
                f"the sharding of a cache is a device, a jax Sharding or the KVCache of `cache_sharding`, got "
                f"{type(placement).__name__}{'' if placement is sharding else f' for {name}'}"
            )
        if isinstance(placement, NamedSharding) and any(axes is not None for axes in placement.spec[1:]):
            raise LayoutError(f"{placement.spec}: a cache is split along its leading axis only")
    return placements


def _shards(placement: Sharding) -> int:
    """Returns how many parts a sharding splits the leading axis into."""
    whole = 1 << 40
    return whole // placement.shard_shape((whole, 1))[0]
