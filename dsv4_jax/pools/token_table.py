"""TokenTable: the device's copy of `ReqToTokenPool`, and the index vectors attention kernels want."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShapeError
from .request_table import KVIndices, ReqToTokenPool, TableUpdate

__all__ = ["TokenTable"]


@dataclasses.dataclass(frozen=True)
class TokenTable:
    """Token ids by request slot and position. Cells past a row's length are stale and never shown.

    Attributes:
        ids: [max_requests + 1, max_context] int32. Row 0 is the padding slot's and stays empty.
        lengths: [max_requests + 1] int32.
    """

    ids: jax.Array
    lengths: jax.Array

    @classmethod
    def init(cls, pool: ReqToTokenPool) -> TokenTable:
        """Returns an empty table for a pool. Apply every `pool.drain()` from the pool's beginning on."""
        rows = pool.max_requests + 1
        return cls(jnp.zeros((rows, pool.max_context), jnp.int32), jnp.zeros(rows, jnp.int32))

    def apply(self, update: TableUpdate) -> TokenTable:
        """Returns the table after an update; in place when donated. Raises `ShapeError`: it is of a pool of another
        size."""
        if np.shape(update.lengths) != self.lengths.shape:
            theirs, ours = (shape[0] - 1 if shape else 0 for shape in (np.shape(update.lengths), self.lengths.shape))
            raise ShapeError(f"an update of a pool of {theirs} requests for a table of {ours}")
        slots = jnp.asarray(update.slots)
        row = jnp.where(slots > 0, slots, np.int32(self.ids.shape[0]))
        ids = self.ids.at[row, update.positions].set(update.ids, mode="drop", wrap_negative_indices=False)
        return TokenTable(ids, jnp.asarray(update.lengths))

    def extend(self, slots: jax.Array, ids: jax.Array) -> TokenTable:
        """Appends one token to each of some requests: a decode step that needs nothing from the host.

        Args:
            slots: [n] int32, no two equal but for 0, which is padding.
            ids: [n] int32 token ids, reserved by the host, which writes them to its pool as well.
        """
        row = jnp.where(slots > 0, slots, np.int32(self.ids.shape[0]))
        at = self.lengths.at[slots].get(mode="clip", wrap_negative_indices=False)
        table = self.ids.at[row, at].set(ids, mode="drop", wrap_negative_indices=False)
        return TokenTable(table, self.lengths.at[row].add(np.int32(1), mode="drop", wrap_negative_indices=False))

    def rows(self, slots: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first `width` positions of some requests: (ids [n, width] int32, 0 past the length; lengths
        [n])."""
        lengths = self.lengths[slots]
        visible = jnp.arange(width, dtype=jnp.int32)[None] < lengths[:, None]
        return jnp.where(visible, self.ids[slots, :width], 0), lengths

    def kv_indices(
        self,
        slots: jax.Array,
        lengths: jax.Array | None = None,
        starts: jax.Array | None = None,
        *,
        capacity: int,
        fill: int = 0,
    ) -> KVIndices:
        """Returns the token ids of several requests in one vector, in the form of paged-attention kernels.

        Args:
            slots: [n] int32 request slots in range; 0 gives an empty row.
            lengths: [n] int32 tokens of each; None for all behind its start. Never more than are there.
            starts: [n] int32 first positions; None for 0.
            capacity: static size of the result. Ids beyond it are cut off: offsets[-1] > capacity tells.
            fill: what stands behind the last id.
        """
        starts = jnp.zeros_like(slots) if starts is None else jnp.maximum(starts, 0)
        behind = jnp.maximum(self.lengths[slots] - starts, 0)
        counts = behind if lengths is None else jnp.clip(lengths, 0, behind)
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        if slots.shape[0] == 0:
            return KVIndices(jnp.full(capacity, fill, jnp.int32), offsets)
        place = jnp.arange(capacity, dtype=jnp.int32)
        row = jnp.searchsorted(offsets[1:], place, side="right").astype(jnp.int32)
        row = jnp.minimum(row, np.int32(slots.shape[0] - 1))
        column = starts[row] + place - offsets[row]
        ids = self.ids.at[slots[row], column].get(mode="clip", wrap_negative_indices=False)
        return KVIndices(jnp.where(place < offsets[-1], ids, np.int32(fill)), offsets)


jax.tree_util.register_dataclass(TokenTable, data_fields=["ids", "lengths"], meta_fields=[])
