"""How a model's parameters are split over devices, and what a layer has to exchange for it.

The parameters of a layer say how they are split (`split_of`), so that a step inside `shard_map` needs to be told
nothing. Along `data` every device has tokens of its own, along `tensor` all have the same ones and a share of the
heads. The experts are split over both, so that bits depend on neither: a device computes its experts for all tokens,
and what it sums up is a branch of the tree by which one device would add them (`ops.moe.ExpertSums`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from .. import ops
from ..errors import LayoutError

__all__ = ["ALONE", "DATA", "TENSOR", "RowShare", "Split", "split_of"]

DATA, TENSOR = "data", "tensor"  # axes of a mesh


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Split:
    """Over how many devices. Static: a part of the parameters' structure.

    Attributes:
        data: devices with tokens of their own.
        tensor: devices with the same tokens, among which heads are divided.
    """

    data: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """A mesh with automatic axes "data" and "tensor", of the first devices there are or of those given.

        Raises:
            LayoutError: there are not so many.
        """
        found = jax.devices() if devices is None else devices
        if len(found) < self.devices:
            raise LayoutError(f"{self.devices} devices are wanted, there are {len(found)}")
        sizes, kinds = (self.data, self.tensor), (AxisType.Auto,) * 2
        return jax.make_mesh(sizes, (DATA, TENSOR), kinds, devices=found[: self.devices])

    def first(self, here: int) -> int | jax.Array:
        """The number of the first of a device's `here` experts; devices of one tensor index hold neighbours."""
        at = 0
        for axis, size in ((TENSOR, self.tensor), (DATA, self.data)):
            if size > 1:
                at = at * np.int32(size) + lax.axis_index(axis)
        return at * np.int32(here) if isinstance(at, jax.Array) else 0

    def all_tokens(self, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """[T, n] each -> [data * T, n], the rows of all data shards."""
        return rows if self.data == 1 else ops.all_gather(rows, DATA)

    def own_sums(self, sums: jax.Array) -> jax.Array:
        """[data * T, n] float32, of this device's experts -> [T, n], of all experts, for this shard's tokens."""
        if self.data > 1:
            sums = ops.sum_to_owner(sums, DATA)
        return ops.sum_to_all(sums, TENSOR) if self.tensor > 1 else sums

    def all_columns(self, x: jax.Array, channel: int = 0) -> jax.Array:
        """[T, n] of this device's heads, or of its words -> [T, tensor * n] of all. `channel`: of the exchange."""
        return x if self.tensor == 1 else ops.all_gather((x,), TENSOR, dimension=1, channel=channel)[0]


ALONE = Split()


@dataclasses.dataclass(frozen=True)
class RowShare:
    """A matrix [out, in] of which each device along `tensor` has a run of rows: the head's, of words. A pytree.

    Attributes:
        rows: [out / tensor, in] within `jax.shard_map`.
        tensor: static.
    """

    rows: jax.Array
    tensor: int

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return ((TENSOR, self.tensor),)

    @property
    def partition(self) -> PartitionSpec:
        return PartitionSpec(TENSOR)


jax.tree_util.register_dataclass(RowShare, data_fields=["rows"], meta_fields=["tensor"])


def split_of(p: dict[str, Any]) -> Split:
    """That of a layer's "attn" or "ffn" parameters."""
    return p.get("split", ALONE)
