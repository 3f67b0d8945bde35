"""The few array functions every part of the model uses.

Activations are float32. Products with float32 weights are computed in full float32; products with
bfloat16 weights, and with those that stay as released, round the activations to bfloat16 and accumulate in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .. import ops
from ..ops.numerics import unit_rms
from .quantised import Matrix, Quantised, product

__all__ = ["linear", "matmul", "rms_norm"]


def linear(x: jax.Array, weight: Matrix) -> jax.Array:
    """x @ weight.T: [T, in] float32, [out, in] of any float dtype or fp8 as released -> [T, out] float32."""
    if isinstance(weight, Quantised):
        return product(x, weight)
    if weight.dtype == jnp.bfloat16:
        return ops.dense_bf16(x, weight)
    return matmul("ti,oi->to", x, weight)


def matmul(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Einsum in float32. HIGHEST, because GPUs would otherwise round float32 factors to TF32."""
    return jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps), times `weight` [n] if given, over the last axis."""
    x = unit_rms(x, eps)
    return x if weight is None else x * lax.expand_dims(weight, range(x.ndim - 1))
