"""How a model's parameters are split over devices, and what a layer has to exchange for it.

The parameters of a layer say how they are split (`split_of`), so that a step inside `shard_map` needs to be told
nothing. Along `data` every device has tokens of its own, along `tensor` all have the same ones and a share of the
heads. The experts are split over both, so that bits depend on neither: a device computes its experts for all tokens,
and what it sums up is a branch of the tree by which one device would add them (`ops.moe.ExpertSums`).

In a step of many tokens the devices along `tensor` also share these out: what is computed of each token by itself, and
by matrices that are whole on each of them, each computes of its own share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from ... import ops
from ...checks import shown
from ...config import DSV4Config
from ...errors import LayoutError
from ...ops.moe import PARTS
from ...ops.registry import Choice

__all__ = [
    "ALONE",
    "BLOCKS",
    "DATA",
    "HEAD",
    "ORDER",
    "TENSOR",
    "RowShare",
    "Split",
    "check_split",
    "in_blocks",
    "parts_of",
    "split_of",
    "split_over",
]

DATA, TENSOR = "data", "tensor"  # axes of a mesh
ORDER = (TENSOR, DATA)  # of the devices by their experts
OF_HEADS, HEAD = ("wq_b", "wo_a", "attn_sink"), "head"  # parameters that are divided along `tensor`
BLOCKS = 8  # of words, into which the head's product is cut: as many as there can be devices
# Of a step whose tokens are shared out: of fewer, the exchanges that it takes more cost what the shares save.
MIN_SHARED_TOKENS = 512
# Of experts' sums that a device sends another one: of more XLA's collectives leave SMs for the shared expert beside
# them, where the project's own takes all.
LONG_BYTES = 8 << 20
# Of a block, at most, where the matrix stays whole: smaller products of the same rows XLA merges into one again.
WHOLE_BYTES = 2**25


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

    def shares_tokens(self, tokens: int) -> bool:
        """Whether devices along `tensor` share out so many tokens of a step, if products do not depend on how many."""
        return self.tensor > 1 and tokens >= MIN_SHARED_TOKENS and not tokens % self.tensor

    def own_share(self, rows: jax.Array) -> jax.Array:
        """Returns this device's share [T / tensor, ...] of the rows [T, ...] of all tokens."""
        count = rows.shape[0] // self.tensor
        return lax.dynamic_slice_in_dim(rows, lax.axis_index(TENSOR) * np.int32(count), count)

    def all_shares(self, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """Gathers [T / tensor, ...] each of this device's share to [T, ...]."""
        return ops.all_gather(rows, TENSOR)

    def all_tokens(self, *rows: jax.Array, shared: bool = False) -> tuple[jax.Array, ...]:
        """Gathers [T, n] each to [data * T, n], the rows of all data shards. `shared`: given those of a share."""
        rows = self.all_shares(*rows) if shared else rows
        return rows if self.data == 1 else ops.all_gather(rows, DATA)

    def own_sums(self, sums: jax.Array, *, shared: bool = False) -> jax.Array:
        """Sums [data * T, n] float32 of this device's experts to [T, n] of all experts, for this shard's tokens;
        `shared`: to [T / tensor, n] for this device's share of them."""
        if self.data > 1:
            sums = ops.sum_to_owner(sums, DATA, implementation=_beside(sums.nbytes // self.data))
        if shared:
            return ops.sum_to_owner(sums, TENSOR, implementation=_beside(sums.nbytes // self.tensor))
        return ops.sum_to_all(sums, TENSOR) if self.tensor > 1 else sums

    def all_columns(self, x: jax.Array, channel: int = 0) -> jax.Array:
        """Gathers [T, n] of this device's heads, or of its words, to [T, tensor * n] of all. `channel`: of the
        exchange."""
        return x if self.tensor == 1 else ops.all_gather((x,), TENSOR, dimension=1, channel=channel)[0]

    def own_share_of_columns(self, x: jax.Array) -> jax.Array:
        """Sends [T, n] of this device's heads to where the tokens are: [T / tensor, tensor * n] of this one's share."""
        return ops.all_to_all(x, TENSOR)


def _beside(message: int) -> Choice:
    """Returns the implementation of an exchange that the shared expert runs beside."""
    return "xla" if message > LONG_BYTES else None


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
    """Returns the split of a layer's "attn" or "ffn" parameters."""
    return p.get("split", ALONE)


def split_over(cfg: DSV4Config, mesh: Mesh) -> Split:
    """Returns the split of a model over a mesh.

    Raises:
        LayoutError: no mesh of devices, one with other axes than "data" and "tensor", or the model does not divide by
            them: as `check_split`.
    """
    if not isinstance(mesh, Mesh) or not mesh.size:
        raise LayoutError(f"expected a jax.sharding.Mesh of devices, got {shown(mesh)}")
    if others := [axis for axis in mesh.axis_names if axis not in ORDER]:
        raise LayoutError(f"the mesh has an axis {others[0]!r}: parameters are split over {DATA!r} and {TENSOR!r} only")
    return check_split(cfg, Split(mesh.shape.get(DATA, 1), mesh.shape.get(TENSOR, 1)))


def check_split(cfg: DSV4Config, split: Split) -> Split:
    """Returns the split if a model of this config can be divided so.

    Raises:
        LayoutError: experts, query heads or their groups do not divide by the devices, or there are other than 1, 2,
            4 or 8 devices.
    """
    if min(split.data, split.tensor) < 1:
        raise LayoutError(f"{split}: a model is split over at least one device along each axis")
    if PARTS % split.devices:
        raise LayoutError(f"{split.devices} devices: the sum over experts can be divided among 1, 2, 4 or 8")
    for what, count, devices in (
        ("experts", cfg.n_routed_experts, split.devices),
        ("query heads", cfg.num_attention_heads, split.tensor),
        ("groups of query heads", cfg.o_groups, split.tensor),
    ):
        if count % devices:
            raise LayoutError(f"{count} {what} do not divide by {devices} devices")
    return split


def parts_of(path: tuple[Any, ...], split: Split) -> int:
    """Into how many runs of rows, in the order of the devices, the parameter at this path of the tree is split."""
    keys = [key.key for key in path if hasattr(key, "key")]
    if "experts" in keys:
        return split.devices
    return split.tensor if keys[-2:-1] == ["attn"] and keys[-1] in OF_HEADS else 1


def in_blocks(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> bool:
    """Whether a matrix [words, hidden] is multiplied in blocks, and may be shared out."""
    words, hidden = shape
    return words % BLOCKS == 0 and words // BLOCKS * hidden * np.dtype(dtype).itemsize > WHOLE_BYTES
