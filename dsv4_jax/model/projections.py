"""The products of one vector with several matrices of a layer, one product where they are stacked."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.attend import CHUNK
from ..ops.columns import Columns, Product, Values
from .numerics import linear, product
from .weights.params import Params
from .weights.quantised import Matrix, Quantised, rounds_rows
from .weights.stacking import GROUPS, Stacked, matrices_of

__all__ = ["products"]

# First matrices of stacks, or of parts of them, whose products' readers take bfloat16 as it is.
TAKEN_ROUNDED = ("wq_a", "gate", *GROUPS["of_q_latent"])


def products(p: Params, group: str, x: jax.Array, only: Collection[str] | None = None) -> dict[str, Values]:
    """x [T, in] times every matrix of a group the layer has: name -> [T, out] float32, `Columns` of stacked ones (of
    what takes bfloat16 that, where products are rounded to it). `only`: of these matrices, which follow one another
    where they are stacked; None: of all.

    Of `CHUNK` tokens or more the stacked queries are a `Product` that is still to be made. Beside matrices whose
    products round rows, as the released model's do, all products are alike (`linear`).
    """
    if group in p:
        alike = any(rounds_rows(stack.weight) for stack in p[group])
        stacks = p[group] if only is None else [part for stack in p[group] for part in _part(stack, only)]
        return {name: columns for stack in stacks for name, columns in _columns(stack, x, alike).items()}
    matrices = dict(matrices_of(p, group))
    alike = any(map(rounds_rows, matrices.values()))
    return {name: linear(x, weight, alike=alike) for name, weight in matrices.items() if only is None or name in only}


def _part(stack: Stacked, only: Collection[str]) -> list[Stacked]:
    """Returns the stack of those of a stack's matrices that have these names, if there are any."""
    names = tuple(name for name in stack.names if name in only)
    if len(names) in (0, len(stack.names)):
        return [stack] if names else []
    first = stack.names.index(names[0])
    widths, weight = stack.widths[first : first + len(names)], stack.weight
    rows, start = weight.shape[0], sum(stack.widths[:first])
    stop = start + sum(widths)
    if isinstance(weight, Quantised):
        # Scales are of several rows, tiles too; bits are those of the whole stack.
        parts = tuple(part[start * len(part) // rows : stop * len(part) // rows] for part in weight.parts)
        return [Stacked(Quantised(parts, weight.format, weight.whole_rows or rows), names, widths)]
    return [Stacked(weight[start:stop], names, widths)]


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
