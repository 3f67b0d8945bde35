"""The products of one vector with several matrices, as one product where the matrices are stacked.

Seven small matrices multiply a CSA layer's input and two its query latent. Apart they are too many
small products for a decode step; and XLA, which would merge them, concatenates the weights anew in
every step. `stack_projections` does it once, when the parameters are loaded. The products stay
columns of one matrix: cutting them costs a kernel each, and most kernels they go to can do without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.columns import Columns, Values
from .numerics import linear
from .params import Params

__all__ = ["Stacked", "products", "stack_projections"]

# What is multiplied with what, by parameter name within a layer's "attn".
GROUPS = {
    "of_input": (
        "wq_a",
        "wkv",
        "compressor.wkv",
        "compressor.wgate",
        "indexer.compressor.wkv",
        "indexer.compressor.wgate",
        "indexer.weights_proj",
    ),
    "of_q_latent": ("wq_b", "indexer.wq_b"),
}


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Matrices [out, in] of one group, one above the other. A pytree with one leaf.

    Attributes:
        weight: [sum of widths, in].
        names, widths: whose rows they are, and how many each has; static.
    """

    weight: jax.Array
    names: tuple[str, ...]
    widths: tuple[int, ...]

    def __call__(self, x: jax.Array) -> dict[str, Columns]:
        product, starts = linear(x, self.weight), np.cumsum((0, *self.widths[:-1])).tolist()
        columns = (Columns(product, start, (width,)) for start, width in zip(starts, self.widths, strict=True))
        return dict(zip(self.names, columns, strict=True))


jax.tree_util.register_dataclass(Stacked, data_fields=["weight"], meta_fields=["names", "widths"])


def products(p: Params, group: str, x: jax.Array) -> Mapping[str, Values]:
    """x [T, in] times every matrix of a group the layer has: name -> [T, out] float32, `Columns` of stacked ones."""
    if group in p:
        return p[group](x)
    return {name: linear(x, weight) for name, weight in _matrices(p, group)}


def stack_projections(params: Params) -> Params:
    """The same parameters with the matrices of each group stacked (a copy): what to decode with.

    `save_hf` and `forward_uncached` take the parameters as they were.
    """

    def attention(p: Params) -> Params:
        stacked = {}
        for group in GROUPS:
            names, weights = zip(*_matrices(p, group), strict=True)
            stacked[group] = Stacked(jnp.concatenate(weights), names, tuple(w.shape[0] for w in weights))
        # [groups, rank, in], as it is multiplied: XLA would copy a packed layer's rows to cut them into groups.
        groups = p["wq_b"].shape[0] // p["wo_a"].shape[-1]
        stacked["wo_a"] = p["wo_a"].reshape(groups, -1, p["wo_a"].shape[-1])
        return _without(p, {name for names in GROUPS.values() for name in names}) | stacked

    layers = tuple(layer | {"attn": attention(layer["attn"])} for layer in params["layers"])
    return params | {"layers": layers}


def _matrices(p: Params, group: str) -> Iterator[tuple[str, jax.Array]]:
    for name in GROUPS[group]:
        node: Any = p
        for key in name.split("."):
            node = node.get(key)
            if node is None:
                break
        else:
            yield name, node


def _without(p: Params, names: set[str], prefix: str = "") -> Params:
    """A copy of nested dicts lacking the leaves of these dotted names."""
    return {
        key: _without(value, names, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in p.items()
        if prefix + key not in names
    }
