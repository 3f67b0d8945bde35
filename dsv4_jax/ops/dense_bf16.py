"""dense_bf16: products with a bf16 matrix."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from .arguments import Check
from .numerics import pad_rows
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "DenseBf16Arguments", "dense_bf16", "reference"]


@dataclasses.dataclass(frozen=True)
class DenseBf16Arguments:
    """Holds what an implementation of `dense_bf16` is given, as in its arguments."""

    x: jax.Array
    weights: jax.Array
    groups: int
    dtype: jnp.dtype
    alike: bool

    @property
    def empty(self) -> bool:
        return self.x.size == 0 or self.weights.size == 0


def dense_bf16(
    x: jax.Array,
    weights: jax.Array,
    *,
    groups: int = 1,
    dtype: jnp.dtype = jnp.float32,
    alike: bool = False,
    implementation: Choice = None,
) -> jax.Array:
    """Multiplies x @ weights.T with float32 sums: [T, N] of `dtype`.

    With g groups the weights are g matrices [N / g, K] one after the other, and each multiplies its own K of x's g * K
    columns: what V4's `wo_a` does to its groups of heads.

    Args:
        x: [T, groups * K] float, taken in bf16.
        weights: [N, K] bfloat16.
        groups: of the weights' rows.
        dtype: of the result, float32 or bfloat16.
        alike: a row is to have the same bits among any number of rows. What has kernels for it runs them also where a
            library is faster, which chooses the order of a sum by the number of rows.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("dense_bf16")
    x = check.array("x", x, "float", "T", "columns")
    weights = check.array("weights", weights, "bfloat16", "N", "K")
    rows, columns = weights.shape
    if groups < 1 or rows % groups or x.shape[1] != groups * columns:
        raise ShapeError(
            f"dense_bf16: x has {x.shape[1]} columns, {groups} groups of weights [{rows}, {columns}] take "
            f"{groups * columns}"
        )
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ShapeError(f"dense_bf16: dtype is {jnp.dtype(dtype).name}, expected float32 or bfloat16")
    return run("dense_bf16", DenseBf16Arguments(x, weights, groups, jnp.dtype(dtype), alike), implementation)


def reference(arguments: DenseBf16Arguments) -> jax.Array:
    """Computes `dense_bf16` in `jnp`."""
    weights, groups, dtype = arguments.weights, arguments.groups, arguments.dtype
    x = pad_rows(arguments.x.astype(jnp.bfloat16), weights.dtype)
    if groups == 1:
        out = jnp.einsum("ti,oi->to", x, weights, preferred_element_type=dtype)
    else:
        x = x.reshape(x.shape[0], groups, -1)
        weights = weights.reshape(groups, -1, weights.shape[1])
        out = jnp.einsum("tgi,goi->tgo", x, weights, preferred_element_type=dtype).reshape(x.shape[0], -1)
    return out[: arguments.x.shape[0]]


IMPLEMENTATION = Implementation("dense_bf16", "xla", reference)
