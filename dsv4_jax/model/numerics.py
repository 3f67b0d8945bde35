"""The few array functions every part of the model uses.

Activations are float32. Products with float32 weights are computed in full float32; products with
bfloat16 weights, and with those that stay as released, round the activations to bfloat16 and accumulate in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import ops
from ..errors import ShapeError
from ..ops.batches import in_tiles
from ..ops.numerics import unit_rms
from ..ops.rounded_rows import RoundedRows
from .weights.params import Params
from .weights.quantised import FP8, Matrix, Quantised, rounds_rows

__all__ = ["activations", "linear", "matmul", "product", "rms_norm"]

MAX_ROWS = 1 << 16  # of a product with FP8 weights: what the CUDA kernel takes


def activations(params: Params) -> jnp.dtype:
    """What blocks take their inputs in: float32 if the matrices are, else bfloat16, to which products would round."""
    return jnp.dtype(jnp.float32 if params["embed"].dtype == jnp.float32 else jnp.bfloat16)


def linear(x: jax.Array, weight: Matrix, *, alike: bool = False) -> jax.Array:
    """Multiplies x @ weight.T: [T, in] float32, [out, in] of any float dtype or fp8 as released -> [T, out] float32.

    `alike`: with bfloat16 weights as of `ops.dense_bf16`. All else is alike, or float32.
    """
    if isinstance(weight, Quantised):
        return product(x, weight)
    if weight.dtype == jnp.bfloat16:
        return ops.dense_bf16(x, weight, alike=alike)
    return matmul("ti,oi->to", x, weight)


def product(
    x: jax.Array | RoundedRows, weight: Quantised, *, groups: int = 1, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Does `ops.dense_fp8` for any number of rows: [T, groups * in] -> [T, out] of `dtype`.

    With weights that are held for rows of e4m3 `ops.dense_e4m3`, rounded to bfloat16 (`model/released.py`): those alone
    take rows that are rounded already, up to `MAX_ROWS` of them.

    Where the CUDA kernels run a row's bits depend on no other row: in a prefill they are those of a decode step,
    whatever is scheduled beside it. What that costs against a cuBLAS product is in docs/kernels.md.

    Raises:
        ShapeError: the weights are not fp8, or x does not fit them.
    """
    if weight.format.code != FP8.code:
        raise ShapeError(f"a dense product with {weight.format.name} weights: only {FP8.name} ones have it")
    settings: dict[str, Any] = {"groups": groups, "dtype": jnp.dtype(dtype), "whole_rows": weight.whole_rows}
    if rounds_rows(weight):  # as released results are bfloat16, whatever they are widened to
        settings["dtype"] = jnp.dtype(jnp.bfloat16)
        if isinstance(x, RoundedRows):
            return ops.dense_e4m3(x, *weight.parts, **settings).astype(dtype)
        return in_tiles(lambda x: ops.dense_e4m3(x, *weight.parts, **settings), MAX_ROWS, x).astype(dtype)
    if isinstance(x, RoundedRows):
        raise ShapeError("a product with these weights takes rows as they are")
    return in_tiles(lambda x: ops.dense_fp8(x, *weight.parts, **settings), MAX_ROWS, x)


def matmul(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Does an einsum in float32. HIGHEST, because GPUs would otherwise round float32 factors to TF32."""
    return jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps), times `weight` [n] if given, over the last axis."""
    x = unit_rms(x, eps)
    return x if weight is None else x * lax.expand_dims(weight, range(x.ndim - 1))
