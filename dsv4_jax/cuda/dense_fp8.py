"""dense_fp8 in the project's own CUDA for Hopper, in one launch: `csrc/dense/stream_kernel.cuh` reads each weight once for
a few rows, `csrc/dense/fp8_many.cuh` takes more than 128.

Bits depend on a row of x and on the weights alone: not on the other rows or their number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.dense_fp8 import DenseFp8Arguments
from ..ops.registry import Implementation

__all__ = ["IMPLEMENTATION", "MOST_ROWS", "call", "supports"]

MOST_ROWS = 1 << 16


def supports(arguments: DenseFp8Arguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    rows = arguments.x.shape[0]
    return f"it takes up to {MOST_ROWS} rows, not {rows}" if rows > MOST_ROWS else None


def call(arguments: DenseFp8Arguments) -> jax.Array:
    """As `ops.dense_fp8.reference`.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    result = jax.ShapeDtypeStruct((arguments.x.shape[0], arguments.weight_rows), arguments.dtype)
    kernel = jax.ffi.ffi_call(ffi.cuda_target("dense_fp8", "dsv4_dense_fp8"), result)
    x = arguments.x.astype(jnp.bfloat16)
    settings = {"groups": np.int32(arguments.groups), "whole_rows": np.int32(arguments.whole_rows)}
    return kernel(x, arguments.codes, arguments.scales, **settings)


IMPLEMENTATION = Implementation(
    "dense_fp8", "cuda", call, supports, lambda: ffi.cuda_problem("dense_fp8"), ("dsv4_dense_fp8",)
)
