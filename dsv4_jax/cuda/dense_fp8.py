"""dense_fp8 in the project's own CUDA for Hopper, in one launch.

`csrc/dense/stream_kernel.cuh` reads each weight once for a few rows, `csrc/dense/fp8_many.cuh` takes more than 128.
Bits depend on a row of x and on the weights alone: not on the other rows or their number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.dense_fp8 import DenseFp8Arguments
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "MAX_ROWS", "call", "supports"]

MAX_ROWS = 1 << 16


def supports(arguments: DenseFp8Arguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    rows = arguments.x.shape[0]
    return f"it takes up to {MAX_ROWS} rows, not {rows}" if rows > MAX_ROWS else None


def call(arguments: DenseFp8Arguments) -> jax.Array:
    """Computes what `ops.dense_fp8.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    assert isinstance(arguments.x, jax.Array)
    result = jax.ShapeDtypeStruct((arguments.x.shape[0], arguments.weight_rows), arguments.dtype)
    operands = arguments.x.astype(jnp.bfloat16), arguments.codes, arguments.scales
    settings = dict(groups=arguments.groups, whole_rows=arguments.whole_rows)
    return launch("dense_fp8", "dsv4_dense_fp8", result, *operands, **settings)


IMPLEMENTATION = declare("dense_fp8", call, supports, "dsv4_dense_fp8", early=("dsv4_dense_fp8",))
