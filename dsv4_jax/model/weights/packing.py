"""The parameters of all layers in a few large arrays, so that calling a step costs little host time.

A jitted call takes about a microsecond of host time for each array it is given, and the layers of V4-Flash
have hundreds. Within the step a layer's parameters are slices of the large arrays: of whole rows, so XLA
gives a product or a custom call the address of the first and copies nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .deferred import join, lengthened
from .names import MTP
from .params import Params

__all__ = ["ALIGNMENT", "PackedLayers", "pack_layers"]

MAX_ELEMENTS = 2**30  # of an array: XLA's GPU kernels count elements of less than 2^31 faster, and some only those
SMALL = 2**16  # elements below which a parameter goes to the vectors
# Bytes. XLA gives a custom call the address of a slice wherever it begins, and kernels load 16 bytes at a time.
ALIGNMENT = 128


class _LeafPlace(NamedTuple):
    """Where a parameter is: so many rows (or, of a vector, elements) from `start` of `arrays[array]`, and its shape."""

    array: int
    start: int
    rows: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PackedLayers:
    """Per-layer parameters, to be iterated over or indexed as the tuple they were. A pytree.

    Attributes:
        arrays: [sum of rows, ...] matrices, and a vector of all small parameters of a dtype.
        trees, places: the structure of each layer, and where its leaves are; static.
        axes: (name, size) of those of a mesh, over whose devices the arrays' first axes are split; each device has
            layers of its own, in equal places. Static.
    """

    arrays: tuple[jax.Array, ...]
    trees: tuple[jax.tree_util.PyTreeDef, ...]
    places: tuple[tuple[_LeafPlace, ...], ...]
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def partition(self) -> jax.sharding.PartitionSpec:
        """The `PartitionSpec` of each array."""
        return jax.sharding.PartitionSpec(tuple(name for name, _ in self.axes) or None)

    def __len__(self) -> int:
        return len(self.trees)

    def __iter__(self) -> Iterator[Params]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, layer: int) -> Params:
        """Returns the parameters of a layer. Raises `IndexError` if there is no such layer."""
        return jax.tree.unflatten(self.trees[layer], [self._leaf(place) for place in self.places[layer]])

    def structure(self, layer: int) -> Params:
        """Returns the parameters of a layer with places where its arrays are: what is known of it without them."""
        return jax.tree.unflatten(self.trees[layer], self.places[layer])

    def _leaf(self, place: _LeafPlace) -> jax.Array:
        array, stop = self.arrays[place.array], place.start + place.rows
        return jax.lax.slice_in_dim(array, place.start, stop).reshape(place.shape)


jax.tree_util.register_dataclass(PackedLayers, data_fields=["arrays"], meta_fields=["trees", "places", "axes"])


def pack_layers(params: Params) -> Params:
    """Returns the same parameters with those of all layers in a few arrays (a copy): what to decode with.

    Layers that draft have arrays of their own. Pack what `stack_projections` returns. `save_hf` takes the parameters as
    they were.
    """
    return params | {name: _packed(params[name]) for name in ("layers", MTP) if name in params}


def _packed(layers: Sequence[Params]) -> PackedLayers:
    packs: list[list[Any]] = []
    sizes: list[int] = []  # rows or elements so far
    open_packs: dict[Any, int] = {}  # what an array can hold -> the one that is being filled
    trees, places = [], []
    for layer in layers:
        leaves, tree = jax.tree.flatten(layer)
        layer_places = []
        for leaf in leaves:
            flat = leaf.ndim < 2 or leaf.size < SMALL
            rows = leaf.size if flat else leaf.shape[0]
            key = (np.dtype(leaf.dtype), flat, () if flat else leaf.shape[1:])
            width = 1 if flat else leaf.size // rows
            pack = open_packs.get(key)
            if pack is None or (sizes[pack] + rows) * width > MAX_ELEMENTS:
                pack = open_packs[key] = len(packs)
                packs.append([])
                sizes.append(0)
            layer_places.append(_LeafPlace(pack, sizes[pack], rows, tuple(leaf.shape)))
            step = ALIGNMENT // math.gcd(ALIGNMENT, width * np.dtype(leaf.dtype).itemsize)
            packs[pack].append(lengthened(leaf.reshape(-1) if flat else leaf, -rows % step))
            sizes[pack] += rows + -rows % step
        trees.append(tree)
        places.append(tuple(layer_places))
    return PackedLayers(tuple(map(join, packs)), tuple(trees), tuple(places))
