"""How the CUDA kernels are told where rows of values lie."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ..ops.columns import Columns, Values, dense

__all__ = ["float_columns"]


def float_columns(values: Values, multiple: int = 4) -> tuple[jax.Array, int]:
    """A float32 matrix [T, total] and the first of its columns that hold `values`.

    Columns are left in place where both are multiples of `multiple`, by default what loads of 16 bytes ask for.
    """
    if isinstance(values, Columns) and values.dtype == jnp.float32:
        total = values.matrix.shape[1]
        if values.start % multiple == total % multiple == 0:
            return values.matrix, values.start
    values = dense(values).astype(jnp.float32)
    return values.reshape(values.shape[0], math.prod(values.shape[1:])), 0
