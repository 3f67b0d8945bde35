"""KVPool: K and V rows by token slot, for any attention with its own K and V (MHA, GQA, MQA, MLA).

A pytree of two leaves (four with fp8), whatever the depth: row = layer * rows + slot. Methods are
pure and traceable; jit the step around them with the pool donated and every write is in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ops.arguments import Check
from ..ops.registry import Choice, Implementation, run
from .carriers import as_rows, decode, encode, safe_ids, safe_layer
from .spec import KVSpec

__all__ = ["IMPLEMENTATION", "KVPool", "KVStoreArguments", "reference", "store_kv"]

Parts = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class KVStoreArguments:
    """What an implementation of `store_kv` is given; as in its arguments."""

    k_pool: Parts
    v_pool: Parts
    k: jax.Array
    v: jax.Array
    rows: jax.Array
    storage: str

    @property
    def empty(self) -> bool:
        return self.rows.shape[0] == 0


def store_kv(
    k_pool: Parts,
    v_pool: Parts,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    *,
    storage: str,
    implementation: Choice = None,
) -> tuple[Parts, Parts]:
    """Encodes K and V rows and stores them.

    Args:
        k_pool, v_pool: parts of the stored rows, each [pool rows, width].
        k, v: [n, width] float.
        rows: [n] int32, no two equal among the valid ones; rows >= pool rows are not written.
        storage: see `KVSpec`.
        implementation: "xla" (the reference), "pallas", "cuda" (bf16 rows into fp8; the same bytes), or None: the
            default, as of every op.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("kv_store")
    k, v = check.array("k", k, "float", "n", "k width"), check.array("v", v, "float", "n", "v width")
    rows = check.array("rows", rows, "int32", "n")
    k_pool, v_pool = (tuple(map(jnp.asarray, parts)) for parts in (k_pool, v_pool))
    return run("kv_store", KVStoreArguments(k_pool, v_pool, k, v, rows, storage), implementation)


def reference(arguments: KVStoreArguments) -> tuple[Parts, Parts]:
    """Returns the reference of `store_kv`, in `jnp`."""

    def scatter(pool: Parts, values: jax.Array) -> Parts:
        return tuple(
            part.at[arguments.rows].set(new, mode="drop", wrap_negative_indices=False)
            for part, new in zip(pool, encode(values, arguments.storage), strict=True)
        )

    return scatter(arguments.k_pool, arguments.k), scatter(arguments.v_pool, arguments.v)


IMPLEMENTATION = Implementation("kv_store", "xla", reference)


@dataclasses.dataclass(frozen=True)
class KVPool:
    """The K and V rows of all layers.

    Attributes:
        arrays: leaves by name: "k", "v", with fp8 also "k_scale", "v_scale" (see `KVSpec.leaves`).
        spec: the geometry.
    """

    arrays: dict[str, jax.Array]
    spec: KVSpec

    @classmethod
    def init(cls, spec: KVSpec, *, sharding: Any = None) -> KVPool:
        """Returns an empty pool, all zeros. `sharding`: of every leaf, None for the default device."""
        leaves = spec.leaves.items()
        return cls({name: jnp.zeros(shape, dtype, device=sharding) for name, (shape, dtype) in leaves}, spec)

    def set_kv_buffer(
        self, layer: int | jax.Array, indices: Any, k: jax.Array, v: jax.Array, *, implementation: Choice = None
    ) -> KVPool:
        """Stores K and V rows of one layer. Rows for slot 0 change nothing.

        Args:
            layer: 0..layers-1; may be traced (a `scan` over layers). In a traced one that is out of range
                nothing is stored, and all reads as zeros.
            indices: token slots, integers of any shape; no two equal but for 0. Host arrays are checked,
                device arrays cannot be: there ids out of range count as 0.
            k, v: float [..., heads, dim] or [..., heads * dim], one row per index.
            implementation: see `store_kv`.

        Raises:
            PoolError: the layer or a host index is out of range, or a host index is named twice.
            ShapeError: k, v or the indices have the wrong shape or dtype.
        """
        ids = safe_ids("indices", indices, self.spec.last, unique=True).reshape(-1)
        k, v = (as_rows(n, x, ids.size, *self.spec.heads(n)) for n, x in (("k", k), ("v", v)))
        no_row = self.spec.layers * self.spec.rows
        rows = jnp.where(ids > 0, self._rows(layer, ids, no_row), np.int32(no_row))
        if ids.size == 0:
            return self
        stored = store_kv(
            self._parts("k"), self._parts("v"), k, v, rows, storage=self.spec.storage, implementation=implementation
        )
        arrays = {
            name: part for which, parts in zip("kv", stored, strict=True) for name, part in self._named(which, parts)
        }
        return dataclasses.replace(self, arrays=arrays)

    def get_key_buffer(self, layer: int | jax.Array, dtype: Any = None) -> jax.Array:
        """Returns all K rows of a layer, [rows, k_heads, k_dim] in `dtype` (default: as stored; bf16 for fp8).

        A new array, for kernels that want the whole buffer and for tests; a step that needs some rows and
        then writes should `gather_kv` them.
        """
        return self._buffer("k", layer, dtype)

    def get_value_buffer(self, layer: int | jax.Array, dtype: Any = None) -> jax.Array:
        """Returns all V rows of a layer, [rows, v_heads, v_dim]."""
        return self._buffer("v", layer, dtype)

    def get_kv_buffer(self, layer: int | jax.Array, dtype: Any = None) -> tuple[jax.Array, jax.Array]:
        """Returns both buffers: (`get_key_buffer`, `get_value_buffer`)."""
        return self._buffer("k", layer, dtype), self._buffer("v", layer, dtype)

    def gather_kv(self, layer: int | jax.Array, indices: Any, dtype: Any = None) -> tuple[jax.Array, jax.Array, KVPool]:
        """Returns the K and V rows of some slots, and the pool to go on with.

        Args:
            indices: [...] token slots; 0 for padding, which reads as zeros.

        Returns:
            (k [..., k_heads, k_dim], v [..., v_heads, v_dim], pool). Write to the returned pool: it is the same
            one, ordered after this read. Without that order XLA may delay the read past the next write
            and keep a copy of the whole pool for it.
        """
        rows = self._rows(layer, safe_ids("indices", indices, self.spec.last), 0)
        taken = {n: a.at[rows].get(mode="clip", wrap_negative_indices=False) for n, a in self.arrays.items()}
        taken, arrays = lax.optimization_barrier((taken, self.arrays))
        k, v = (
            decode(self._parts(part, taken), self.spec.storage, dtype).reshape(*rows.shape, *self.spec.heads(part))
            for part in "kv"
        )
        return k, v, dataclasses.replace(self, arrays=arrays)

    @property
    def mem_bytes(self) -> int:
        return self.spec.total_bytes

    def _rows(self, layer: int | jax.Array, ids: jax.Array, no_row: int) -> jax.Array:
        """Returns the rows of safe ids in a layer, int32; `no_row` for a layer out of range."""
        at = safe_layer(layer, self.spec.layers)
        if isinstance(at, int):
            return np.int32(at * self.spec.rows) + ids
        rows = at * np.int32(self.spec.rows) + ids
        return jnp.where(at < self.spec.layers, rows, np.int32(no_row))

    def _buffer(self, part: str, layer: int | jax.Array, dtype: Any) -> jax.Array:
        at = safe_layer(layer, self.spec.layers)
        first = at * np.int32(self.spec.rows)
        parts = tuple(lax.dynamic_slice_in_dim(a, first, self.spec.rows) for a in self._parts(part))
        if not isinstance(at, int):
            parts = tuple(jnp.where(at < self.spec.layers, p, jnp.zeros_like(p)) for p in parts)
        return decode(parts, self.spec.storage, dtype).reshape(self.spec.rows, *self.spec.heads(part))

    def _parts(self, part: str, arrays: dict[str, jax.Array] | None = None) -> Parts:
        arrays = self.arrays if arrays is None else arrays
        return tuple(arrays[name] for name in (part, f"{part}_scale") if name in arrays)

    @staticmethod
    def _named(part: str, parts: Parts) -> list[tuple[str, jax.Array]]:
        return list(zip((part, f"{part}_scale"), parts, strict=False))


jax.tree_util.register_dataclass(KVPool, data_fields=["arrays"], meta_fields=["spec"])
