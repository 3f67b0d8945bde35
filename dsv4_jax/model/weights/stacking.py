"""Matrices that multiply the same vector, one above the other: one product instead of several.

Seven small matrices multiply a CSA layer's input and two its query latent. Apart they are too many
small products for a decode step; and XLA, which would merge them, concatenates the weights anew in
every step. `stack_projections` does it once, when the parameters are loaded; matrices of a group that
are stored differently (FP8 and bfloat16) make a stack each. The products stay columns of one matrix:
cutting them costs a kernel each, and most kernels they go to can do without (`projections.products`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...errors import ShapeError
from ...ops.hyper_connection import VECTOR_MULTIPLE
from .deferred import join, lengthened
from .names import MTP
from .params import Params
from .quantised import Matrix, Quantised

__all__ = ["GROUPS", "SITES", "Stacked", "matrices_of", "stack_projections"]

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
# Of a layer: hyper-connection -> the norm that follows it.
SITES = {"hc_attn": "attn_norm", "hc_ffn": "ffn_norm"}


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


jax.tree_util.register_dataclass(Stacked, data_fields=["weight"], meta_fields=["names", "widths"])


def stack_projections(params: Params) -> Params:
    """Returns the same parameters with the matrices of each group stacked (a copy): what to decode with.

    `save_hf` and `forward_uncached` take the parameters as they were. How a sum over a row is cut depends on the
    matrix, so that the last bits of products may differ from those of the parameters as they were, in the released
    numerics, too.

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
        stacked = _stack_connections(p) | {"attn": attention(p["attn"])}
        if "shared" in p.get("ffn", {}):
            stacked["ffn"] = p["ffn"] | {"shared": _stacked(p["ffn"]["shared"], ("of_token",))}
        return stacked

    return params | {name: tuple(map(layer, params[name])) for name in ("layers", MTP) if name in params}


def _stack_connections(layer: Params) -> Params:
    """The same layer with what `hyper_connection` takes as one vector in one: "vector" beside "fn"."""
    sites = {site: norm for site, norm in SITES.items() if site in layer}
    stacked = {}
    for site, norm in sites.items():
        # As `connection_vector`, also of deferred arrays.
        vector = join([layer[norm], layer[site]["base"], layer[site]["scale"]])
        stacked[site] = {"fn": layer[site]["fn"], "vector": lengthened(vector, -vector.size % VECTOR_MULTIPLE)}
    return {name: p for name, p in layer.items() if name not in sites.values()} | stacked


def _stacked(p: Params, groups: tuple[str, ...]) -> Params:
    """Returns the same parameters, with the matrices of these groups in stacks."""
    stacks = {}
    for group in groups:
        alike: dict[Any, list[tuple[str, Matrix]]] = {}
        for name, weight in matrices_of(p, group):
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


def matrices_of(p: Params, group: str) -> Iterator[tuple[str, Matrix]]:
    """The matrices of a group that a layer has, in their order, each with its name."""
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
