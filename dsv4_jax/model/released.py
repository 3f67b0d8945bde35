"""The released model's numerics, which a model has whose matrices are held for it; off by default.

`load_hf(weights="released", numerics="released")`, `Engine.load(numerics=)` and `--numerics released` make it so, and
`as_released` of parameters that are loaded already. The cache's layout has to say the same (`CacheLayout(numerics=)`).

Its products with FP8 and FP4 weights take rows rounded to e4m3 (`formats.activations`) and give bfloat16; an expert's
share is in its rows before the second product; residual streams and what blocks write into them are bfloat16. Norms are
float32 inside, queries are normalised and attention reads as ever.

Within one executable logits and cache bytes depend neither on chunks nor on neighbours, prefix hits or preemption. On a
Hopper GPU all sums over a row have CUDA kernels, whose bits depend on no number of rows, products with bfloat16
matrices among them: on no executable either, on one kind of GPU. That was seen on an H200, between steps of 300, 64 and
1 rows; it leaves out layers that draft.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..formats.weights import WEIGHT_FORMATS
from ..formats.weights.fp4_e4m3 import spans, warn_of_spans
from .weights.packing import PackedLayers
from .weights.params import RELEASED, Params, is_leaf
from .weights.quantised import Quantised, rounds_rows

__all__ = ["as_released", "form_of", "is_released", "stream_dtype"]


def as_released(params: Params) -> Params:
    """Returns the same parameters with FP8 and FP4 matrices in the forms whose products round rows to e4m3 (a copy).

    Args:
        params: as `load_hf(weights="released")` gives them, neither stacked nor packed.

    Warns:
        PerformanceWarning: the FP4 scales of a matrix are too far apart to be widened without loss. It is multiplied
            exactly all the same, in more time; the message names the widest place of the tensor.
    """

    def laid(path: Any, leaf: jax.Array | Quantised) -> jax.Array | Quantised:
        if not isinstance(leaf, Quantised) or rounds_rows(leaf):
            return leaf
        form, of_fp4 = WEIGHT_FORMATS[f"{leaf.format.name}_e4m3"], leaf.format.name == "fp4"

        @jax.jit
        def packed(*parts: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
            given = leaf.format.codec.unpack(*parts)
            return form.codec.pack(*given), spans(*given) if of_fp4 else None

        parts, apart = packed(*leaf.parts)
        if apart is not None:
            warn_of_spans(jax.tree_util.keystr(path), apart)
        return Quantised(parts, form, leaf.whole_rows)

    return jax.tree_util.tree_map_with_path(laid, params, is_leaf=is_leaf)


def is_released(params: Params) -> bool:
    """Whether matrices are held in these forms, and so whether the model has these numerics."""
    return any(map(rounds_rows, _nodes(params)))


def form_of(params: Params) -> str:
    """The form that `load_hf` was told of: "released", or the dtype of matrices. They may be packed, and of a mesh."""
    return RELEASED if any(map(is_leaf, _nodes(params))) else params["embed"].dtype.name


def _nodes(params: Params) -> list[Any]:
    """Parameters of the first layer, or the places of arrays."""
    layers = params["layers"]
    first = layers.structure(0) if isinstance(layers, PackedLayers) else layers[0]
    return jax.tree.leaves(first, is_leaf=is_leaf)


def stream_dtype(params: Params) -> jnp.dtype:
    """What residual streams are."""
    return jnp.dtype(jnp.bfloat16 if is_released(params) else jnp.float32)
