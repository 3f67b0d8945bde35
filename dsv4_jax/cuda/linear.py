"""linear in the project's own CUDA for Hopper (`csrc/linear_kernel.cuh`), called through XLA FFI.

One launch reads the weights once and writes every part of the result to an array of its own. bfloat16 weights and 1 to
256 tokens; everything else takes the reference. The bits of a token's results depend on it and the weights alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..ffi import cuda_target
from ..ops.linear import _linear_parts as _reference

__all__ = ["has_kernel"]

MAX_TOKENS = 256
MAX_PARTS = 8
STAGE = 64  # columns the kernel loads at once
ROWS = 8  # what it stores at once


def has_kernel(x: jax.Array, weight: jax.Array, widths: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether the kernel computes this product."""
    return (
        weight.dtype == jnp.bfloat16
        and dtype in (jnp.float32, jnp.bfloat16)
        and x.ndim == 2
        and 0 < x.shape[0] <= MAX_TOKENS
        and weight.shape[-1] % STAGE == 0
        and len(widths) <= MAX_PARTS
        and all(n % ROWS == 0 for n in (*widths, weight.shape[-2]))
    )


def _linear_parts(x: jax.Array, weight: jax.Array, widths: tuple[int, ...], dtype: np.dtype) -> tuple[jax.Array, ...]:
    """As `ops.linear._linear_parts`.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    if not has_kernel(x, weight, widths, dtype):
        return _reference(x, weight, widths, dtype)
    results = tuple(jax.ShapeDtypeStruct((x.shape[0], n), dtype) for n in widths)
    call = jax.ffi.ffi_call(cuda_target("dsv4_linear"), results)
    return tuple(call(x.astype(jnp.bfloat16), weight))
