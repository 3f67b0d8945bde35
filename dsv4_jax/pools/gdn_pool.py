"""GDNPool: the state of linear-attention layers (gated delta net and its kin), one slot per request.

A head's recurrent state is stored [v_dim, k_dim], **value dim first**: with S so shaped, out = S @ q and the
update adds outer(v, k). Slots: 0 is padding (always zeros; writes to it change nothing), 1..max_requests are the
requests' own (those of `ReqToTokenPool`), the rest are track slots, where `copy_states` keeps snapshots.

A freed slot keeps its state. Its next owner starts from zeros, since a step gives `get_states` the positions (of the
`TokenTable`): at position 0 a state is empty. Kernels that read the leaves themselves need `reset_states` when a
request is admitted; one that starts from a snapshot needs `copy_states`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShapeError
from .carriers import check_array, decode, safe_ids, safe_layer, to_carrier
from .spec import GDNSpec

__all__ = ["GDNPool", "copy_states", "reset_states"]


@dataclasses.dataclass(frozen=True)
class GDNPool:
    """Recurrent and convolution state of all layers. Methods are pure and traceable.

    Attributes:
        recurrent: [layers, slots, heads, v_dim, k_dim] float32.
        conv: [layers, slots, conv_dim, conv_kernel - 1], the latest input last; the carrier of `conv_storage`.
        spec: the geometry.
    """

    recurrent: jax.Array
    conv: jax.Array
    spec: GDNSpec

    @classmethod
    def init(cls, spec: GDNSpec, *, sharding: Any = None) -> GDNPool:
        """A pool whose slots are all zeros."""
        leaves = {name: jnp.zeros(shape, dtype, device=sharding) for name, (shape, dtype) in spec.leaves.items()}
        return cls(**leaves, spec=spec)

    def get_layer_state(self, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a layer's states: (recurrent [slots, heads, v_dim, k_dim] float32, conv [slots, conv_dim, kernel -
        1]).

        As stored: until its new owner's first step has written it, a slot has what its last owner left there.
        """
        at = safe_layer(layer, self.spec.layers)
        leaves = self.recurrent, self.conv
        recurrent, conv = (a.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False) for a in leaves)
        return recurrent, decode((conv,), self.spec.conv_storage)

    def get_states(self, layer: int | jax.Array, slots: Any, positions: Any) -> tuple[jax.Array, jax.Array, GDNPool]:
        """The states of some slots, and the pool to go on with (the same one, ordered after this read).

        Args:
            layer: 0..layers-1; may be traced. One that is out of range then reads as zeros and stores nothing.
            slots: [n]; 0 for padding, which reads as zeros.
            positions: [n], of each request's first token in this step. At 0 the state reads as zeros, whatever
                the slot's last owner left there; a request that starts from a snapshot begins behind 0.

        Returns:
            (recurrent [n, heads, v_dim, k_dim] float32, conv [n, conv_dim, kernel - 1], pool).

        Raises:
            PoolError: the layer or a slot of a host array is out of range.
            ShapeError: slots or positions are no integers, or not as many.
        """
        ids = safe_ids("slots", slots, self.spec.slots - 1).reshape(-1)
        empty = _at_the_beginning(positions, ids.size)
        at = safe_layer(layer, self.spec.layers)
        if not isinstance(at, int):  # out of range: the states of slot 0
            ids = jnp.where(at < self.spec.layers, ids, jnp.zeros_like(ids))
        (recurrent, conv), pool = self._gather(at, ids)
        recurrent, conv = (
            jnp.where(jnp.expand_dims(empty, range(1, x.ndim)), jnp.zeros_like(x), x) for x in (recurrent, conv)
        )
        return recurrent, decode((conv,), self.spec.conv_storage), pool

    def set_states(self, layer: int | jax.Array, slots: Any, recurrent: jax.Array, conv: jax.Array) -> GDNPool:
        """Stores the states of some slots, shaped as `get_states` returns them. Slot 0 is not written.

        Args:
            slots: [n], no two equal but for 0. Host arrays are checked, device arrays cannot be.

        Raises:
            PoolError: the layer or a slot of a host array is out of range, or a slot is named twice.
            ShapeError: a state is no array of floats, or has the wrong shape.
        """
        ids = safe_ids("slots", slots, self.spec.slots - 1, unique=True).reshape(-1)
        for name, x, leaf in (("recurrent", recurrent, self.recurrent), ("conv", conv, self.conv)):
            check_array(name, x)
            if x.shape != (ids.size, *leaf.shape[2:]):
                raise ShapeError(f"{name} has shape {x.shape}, expected {(ids.size, *leaf.shape[2:])}")
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise ShapeError(f"{name} must be floating point, got {x.dtype}")
        layer = safe_layer(layer, self.spec.layers)
        return self._scatter(layer, ids, (recurrent.astype(jnp.float32), to_carrier(conv, self.spec.conv_storage)))

    def copy_states(self, src: Any, dst: Any) -> GDNPool:
        """Copies slot src[i] to dst[i] in every layer; all are read before any is written.

        Args:
            src, dst: [n] slots of either kind; pairs with dst 0 are skipped, src 0 is the empty state.
        """
        source = safe_ids("src", src, self.spec.slots - 1).reshape(-1)
        target = safe_ids("dst", dst, self.spec.slots - 1, unique=True).reshape(-1)
        if source.shape != target.shape:
            raise ShapeError(f"src has {source.size} slots, dst {target.size}")
        if source.size == 0:
            return self
        layers = self._all_layers()
        moved, pool = self._gather(layers, source)
        return pool._scatter(layers, target, moved)

    def reset_states(self, slots: Any) -> GDNPool:
        """Empties slots: zeros in every layer. Slot 0 and no slots at all are welcome."""
        ids = safe_ids("slots", slots, self.spec.slots - 1).reshape(-1)
        if ids.size == 0:
            return self
        return self._scatter(self._all_layers(), ids, (0, 0))

    @property
    def mem_bytes(self) -> int:
        return self.spec.total_bytes

    def _all_layers(self) -> jax.Array:
        """[layers, 1] int32: together with [n] slots, all layers of each."""
        return jnp.arange(self.spec.layers, dtype=jnp.int32)[:, None]

    def _gather(self, layers: int | jax.Array, ids: jax.Array) -> tuple[tuple[jax.Array, ...], GDNPool]:
        """The stored states of slots, and the pool ordered after the read: see `KVPool.gather_kv`."""
        # Indexed as they are: a reshape to rows and back would become a copy between two layers.
        leaves = self.recurrent, self.conv
        taken = tuple(leaf.at[layers, ids].get(mode="clip", wrap_negative_indices=False) for leaf in leaves)
        taken, (recurrent, conv) = lax.optimization_barrier((taken, leaves))
        return taken, GDNPool(recurrent, conv, self.spec)

    def _scatter(self, layers: int | jax.Array, ids: jax.Array, values: tuple[Any, ...]) -> GDNPool:
        """Stores states, those of slot 0 excepted."""
        ids = jnp.where(ids > 0, ids, np.int32(self.spec.slots))
        recurrent, conv = (
            leaf.at[layers, ids].set(x, mode="drop", wrap_negative_indices=False)
            for leaf, x in zip((self.recurrent, self.conv), values, strict=True)
        )
        return GDNPool(recurrent, conv, self.spec)


jax.tree_util.register_dataclass(GDNPool, data_fields=["recurrent", "conv"], meta_fields=["spec"])

_copy_states = jax.jit(GDNPool.copy_states, donate_argnums=0)
_reset_states = jax.jit(GDNPool.reset_states, donate_argnums=0)


def copy_states(pool: GDNPool, src: Any, dst: Any) -> GDNPool:
    """Does `GDNPool.copy_states` by itself, jitted: the pool is donated. Host slots, checked; one compile per power of
    two.

    Raises:
        PoolError: a slot is out of range, or a destination is named twice.
        ShapeError: src and dst differ in number.
    """
    source, target = _padded("src", src, pool), _padded("dst", dst, pool, unique=True)
    if np.size(src) != np.size(dst):
        raise ShapeError(f"src has {np.size(src)} slots, dst {np.size(dst)}")
    return _copy_states(pool, source, target) if np.size(src) else pool


def reset_states(pool: GDNPool, slots: Any) -> GDNPool:
    """Does `GDNPool.reset_states` by itself, jitted: the pool is donated. Errors as of `copy_states`."""
    ids = _padded("slots", slots, pool)
    return _reset_states(pool, ids) if np.size(slots) else pool


def _at_the_beginning(positions: Any, count: int) -> jax.Array:
    """Which requests are at position 0, bool [count]."""
    positions = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ShapeError(f"positions must be integers, got {positions.dtype}")
    if positions.size != count:
        raise ShapeError(f"{positions.size} positions of {count} slots")
    return jnp.asarray(positions.reshape(-1) <= 0)


def _padded(name: str, slots: Any, pool: GDNPool, *, unique: bool = False) -> jax.Array:
    try:
        slots = np.asarray(slots).reshape(-1)
    except ValueError:  # ragged
        raise ShapeError(f"{name} must be integers, got {slots!r}") from None
    padding = (1 << max(slots.size - 1, 0).bit_length()) - slots.size
    slots = slots.astype(np.int64) if slots.size == 0 else slots
    return safe_ids(name, np.pad(slots, (0, padding)), pool.spec.slots - 1, unique=unique)
