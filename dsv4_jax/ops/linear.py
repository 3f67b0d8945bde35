"""linear: the product of a few tokens with a big matrix, in the parts it was stacked of."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .dispatch import Implementation, implementation_for

__all__ = ["linear_parts", "matmul"]


def linear_parts(
    x: jax.Array,
    weight: jax.Array,
    widths: tuple[int, ...] | None = None,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Implementation = None,
) -> tuple[jax.Array, ...]:
    """x @ weight.T, cut into consecutive columns; rounding and precision as `matmul`.

    Args:
        x: [..., in] float, or [..., groups * in].
        weight: [out, in] of any float dtype, or [groups, out / groups, in]: each multiplies its part of x.
        widths: columns of each result; they add up to `out`. None: one result.
        dtype: what the float32 results are rounded to.

    Returns:
        [..., width] `dtype` for each of `widths`.
    """
    widths = (math.prod(weight.shape[:-1]),) if widths is None else widths
    function = implementation_for("linear", _linear_parts, implementation, empty=x.size == 0)
    return function(x, weight, widths, jnp.dtype(dtype))


def matmul(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Einsum of activations x and weights y, float32 result.

    bfloat16 weights: x is rounded to bfloat16, sums are float32. Others: full float32; HIGHEST, because
    GPUs would otherwise round float32 factors to TF32.
    """
    if y.dtype == jnp.bfloat16:
        return jnp.einsum(spec, x.astype(jnp.bfloat16), y, preferred_element_type=jnp.float32)
    return jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _linear_parts(x: jax.Array, weight: jax.Array, widths: tuple[int, ...], dtype: np.dtype) -> tuple[jax.Array, ...]:
    if weight.ndim == 2:
        y = matmul("...i,oi->...o", x, weight)
    else:
        y = matmul("...gi,goi->...go", x.reshape(*x.shape[:-1], weight.shape[0], -1), weight)
        y = y.reshape(*x.shape[:-1], -1)
    return tuple(jnp.split(y.astype(dtype), np.cumsum(widths)[:-1].tolist(), axis=-1))
