"""dense_e4m3 in the project's own CUDA for Hopper: one launch rounds the rows, if they are not yet, one multiplies.

Up to 128 rows `csrc/dense/e4m3_few.cuh` streams the weights once, above `csrc/dense/e4m3_many.cuh` takes tiles of rows
and weights. All shapes in which they are compiled give the same bits: those of `tests/oracle/matrix_unit.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.dense_fp8 import DenseFp8Arguments
from ..ops.rounded_rows import RoundedRows
from .calls import declare, launch
from .dense_fp8 import supports

__all__ = ["IMPLEMENTATION", "call"]


def call(arguments: DenseFp8Arguments) -> jax.Array:
    """Computes what `ops.dense_e4m3.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    x = arguments.x
    if isinstance(x, RoundedRows):
        codes, scales = x.codes, x.scales
    else:
        codes, scales = launch("dense_e4m3", "dsv4_round_rows", RoundedRows.shapes(*x.shape), x.astype(jnp.bfloat16))
    result = jax.ShapeDtypeStruct((x.shape[0], arguments.weight_rows), arguments.dtype)
    settings = dict(groups=arguments.groups, whole_rows=arguments.whole_rows, shape=0)
    operands = codes, scales, arguments.codes, arguments.scales
    return launch("dense_e4m3", "dsv4_dense_e4m3", result, *operands, **settings)


IMPLEMENTATION = declare("dense_e4m3", call, supports, "dsv4_round_rows", "dsv4_dense_e4m3", early=("dsv4_dense_e4m3",))
