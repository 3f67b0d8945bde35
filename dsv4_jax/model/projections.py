"""The products of one vector with several matrices, as one product where the matrices are stacked.

Seven small matrices multiply a CSA layer's input and two its query latent. Apart they are too many
small products for a decode step; and XLA, which would merge them, concatenates the weights anew in
every step. `stack_projections` does it once, when the parameters are loaded; matrices of a group that
are stored differently (FP8 and bfloat16) make a stack each. The products stay columns of one matrix:
cutting them costs a kernel each, and most kernels they go to can do without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShapeError
from ..ops.attend import CHUNK
from ..ops.columns import Columns, Product, Values
from .deferred import join
from .hyper_connections import stack_connections
from .names import MTP
from .numerics import linear
from .params import Params
from .quantised import Matrix, Quantised

__all__ = ["Stacked", "products", "stack_projections"]

# What is multiplied with what, by parameter name within a layer's "attn" (the first two) and its shared expert.
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
    "of_token": ("gate", "up"),
}
_OF_ATTENTION = ("of_input", "of_q_latent")
_QUERIES = "wq_b"  # first of the queries' group


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Matrices [out, in] of one group that are stored alike, one above the other. A pytree.

    Attributes:
        weight: [sum of widths, in].
        names, widths: whose rows they are, and how many each has; static.
    """

    weight: Matrix
    names: tuple[str, ...]
    widths: tuple[int, ...]

    def __call__(self, x: jax.Array) -> dict[str, Values]:
        starts = np.cumsum((0, *self.widths[:-1])).tolist()
        parts = list(zip(self.names, starts, self.widths, strict=True))
        if self.names[0] == _QUERIES and x.shape[0] >= CHUNK and _is_bf16(self.weight):
            # A long chunk's are multiplied by the kernel that finishes them.
            x, weight = x.astype(self.weight.dtype), self.weight
            return {name: Product(x, weight[start : start + width], (width,)) for name, start, width in parts}
        product = linear(x, self.weight)
        return {name: Columns(product, start, (width,)) for name, start, width in parts}


jax.tree_util.register_dataclass(Stacked, data_fields=["weight"], meta_fields=["names", "widths"])


def products(p: Params, group: str, x: jax.Array) -> Mapping[str, Values]:
    """x [T, in] times every matrix of a group the layer has: name -> [T, out] float32, `Columns` of stacked ones.

    Of `CHUNK` tokens or more the stacked queries are a `Product` that is still to be made.
    """
    if group in p:
        return {name: columns for stack in p[group] for name, columns in stack(x).items()}
    return {name: linear(x, weight) for name, weight in _matrices(p, group)}


def _is_bf16(weight: Matrix) -> TypeGuard[jax.Array]:
    return not isinstance(weight, Quantised) and weight.dtype == jnp.bfloat16


def stack_projections(params: Params) -> Params:
    """The same parameters with the matrices of each group stacked (a copy): what to decode with.

    `save_hf` and `forward_uncached` take the parameters as they were.

    Raises:
        ShapeError: FP8 matrices do not lie one above the other, for their scales span 128 rows.
    """

    def attention(p: Params) -> Params:
        stacked = _stacked(p, _OF_ATTENTION)
        if not isinstance(p["wo_a"], Quantised):
            # [groups, rank, in], as it is multiplied: XLA would copy a packed layer's rows to cut them into groups.
            groups = p["wq_b"].shape[0] // p["wo_a"].shape[-1]
            stacked["wo_a"] = p["wo_a"].reshape(groups, -1, p["wo_a"].shape[-1])
        return stacked

    def layer(p: Params) -> Params:
        stacked = stack_connections(p) | {"attn": attention(p["attn"])}
        if "shared" in p.get("ffn", {}):
            stacked["ffn"] = p["ffn"] | {"shared": _stacked(p["ffn"]["shared"], ("of_token",))}
        return stacked

    return params | {name: tuple(map(layer, params[name])) for name in ("layers", MTP) if name in params}


def _stacked(p: Params, groups: tuple[str, ...]) -> Params:
    """The same parameters, with the matrices of these groups in stacks."""
    stacks = {}
    for group in groups:
        alike: dict[Any, list[tuple[str, Matrix]]] = {}
        for name, weight in _matrices(p, group):
            stored = weight.format if isinstance(weight, Quantised) else np.dtype(weight.dtype)
            alike.setdefault(stored, []).append((name, weight))
        stacks[group] = tuple(_stack(*zip(*same, strict=True)) for same in alike.values())
    return _without(p, {name for group in groups for name in GROUPS[group]}) | stacks


def _stack(names: tuple[str, ...], weights: tuple[Matrix, ...]) -> Stacked:
    widths, first = tuple(w.shape[0] for w in weights), weights[0]
    if not isinstance(first, Quantised):
        return Stacked(join(weights), names, widths)
    rows = first.format.block[0]
    odd = next((i for i, width in enumerate(widths[:-1]) if width % rows), None)
    if odd is not None:
        raise ShapeError(f"{names[odd]} has {widths[odd]} rows: below it {names[odd + 1]} needs them in {rows}s")
    parts = zip(*(w.parts for w in weights if isinstance(w, Quantised)), strict=True)
    whole = None
    if any(w.whole_rows for w in weights if isinstance(w, Quantised)):
        whole = sum(w.whole_rows or w.shape[0] for w in weights if isinstance(w, Quantised))
    return Stacked(Quantised(tuple(map(join, parts)), first.format, whole), names, widths)


def _matrices(p: Params, group: str) -> Iterator[tuple[str, Matrix]]:
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
