"""dense_e4m3 in the project's own CUDA for Hopper: one launch rounds the rows, if they are not yet, one multiplies.

Up to 128 rows `csrc/dense/e4m3_few.cuh` streams the weights once, above `csrc/dense/e4m3_many.cuh` takes tiles of rows
and weights. All shapes in which they are compiled give the same bits: those of `tests/oracle/matrix_unit.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..formats.activations import ROW_BLOCK
from ..ops.dense_fp8 import DenseFp8Arguments
from ..ops.rounded_rows import RoundedRows
from .calls import declare, launch
from .dense_fp8 import supports

__all__ = ["IMPLEMENTATION", "call"]


ROUNDED_ROWS = 512  # from which on the kernel has tiles enough that a block has all of K, and then rounds its own


def call(arguments: DenseFp8Arguments) -> jax.Array | RoundedRows:
    """Computes what `ops.dense_e4m3.reference` does, and rounds it to e4m3 where it may and has many rows.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    x = arguments.x
    if isinstance(x, RoundedRows):
        codes, scales = x.codes, x.scales
    else:
        codes, scales = launch("dense_e4m3", "dsv4_round_rows", RoundedRows.shapes(*x.shape), x.astype(jnp.bfloat16))
    rows, columns = x.shape[0], arguments.weight_rows
    rounds = arguments.rounds and rows >= ROUNDED_ROWS and columns % (arguments.groups * ROW_BLOCK) == 0
    rounded, row_scales = RoundedRows.shapes(rows, columns)
    if rounds:
        results = rounded, row_scales
    else:
        results = (
            jax.ShapeDtypeStruct((rows, columns), arguments.dtype),
            jax.ShapeDtypeStruct((0, row_scales.shape[1]), row_scales.dtype),
        )
    settings = dict(groups=arguments.groups, whole_rows=arguments.whole_rows, shape=0)
    operands = codes, scales, arguments.codes, arguments.scales
    made = launch("dense_e4m3", "dsv4_dense_e4m3", results, *operands, **settings)
    return RoundedRows(*made) if rounds else made[0]


IMPLEMENTATION = declare("dense_e4m3", call, supports, "dsv4_round_rows", "dsv4_dense_e4m3", early=("dsv4_dense_e4m3",))
