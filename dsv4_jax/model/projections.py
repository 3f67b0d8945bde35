"""The products of one vector with several matrices of a layer, one product where they are stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.attend import CHUNK
from ..ops.columns import Columns, Product, Values
from .numerics import linear, product
from .weights.params import Params
from .weights.quantised import Matrix, Quantised, rounds_rows
from .weights.stacking import Stacked, matrices_of

__all__ = ["products"]

TAKEN_ROUNDED = ("wq_a", "wq_b", "gate")  # first matrices of stacks whose products' readers take bfloat16 as it is


def products(p: Params, group: str, x: jax.Array) -> Mapping[str, Values]:
    """x [T, in] times every matrix of a group the layer has: name -> [T, out] float32, `Columns` of stacked ones (of
    what takes bfloat16 that, where products are rounded to it).

    Of `CHUNK` tokens or more the stacked queries are a `Product` that is still to be made. Beside matrices whose
    products round rows, as the released model's do, all products are alike (`linear`).
    """
    if group in p:
        alike = any(rounds_rows(stack.weight) for stack in p[group])
        return {name: columns for stack in p[group] for name, columns in _columns(stack, x, alike).items()}
    matrices = dict(matrices_of(p, group))
    alike = any(map(rounds_rows, matrices.values()))
    return {name: linear(x, weight, alike=alike) for name, weight in matrices.items()}


def _columns(stack: Stacked, x: jax.Array, alike: bool) -> dict[str, Values]:
    starts = np.cumsum((0, *stack.widths[:-1])).tolist()
    parts = list(zip(stack.names, starts, stack.widths, strict=True))
    if stack.names[0] == "wq_b" and x.shape[0] >= CHUNK and _is_bf16(stack.weight):
        # A long chunk's queries are multiplied by the kernel that finishes them.
        x, weight = x.astype(stack.weight.dtype), stack.weight
        return {name: Product(x, weight[start : start + width], (width,)) for name, start, width in parts}
    if stack.names[0] in TAKEN_ROUNDED and rounds_rows(stack.weight):
        made = product(x, stack.weight, dtype=jnp.bfloat16)  # as which it is made: they need no wider copy of it
    else:
        made = linear(x, stack.weight, alike=alike)
    return {name: Columns(made, start, (width,)) for name, start, width in parts}


def _is_bf16(weight: Matrix) -> TypeGuard[jax.Array]:
    return not isinstance(weight, Quantised) and weight.dtype == jnp.bfloat16
