"""dense_bf16 in the project's own CUDA: one launch.

Of a matrix of few rows, such as the router's gate, `csrc/dense/bf16.cu`, whatever the batch. Of others
`csrc/dense/stream.cu`: beyond `MAX_ROWS` rows of x, where the products are no longer a stream of weights, only if they
are to be alike. A row's bits depend on that row and the weights alone as long as the same kernel runs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import ffi
from ..ops.dense_bf16 import DenseBf16Arguments
from .calls import declare, launch

__all__ = ["GATE_ROWS", "IMPLEMENTATION", "MAX_ROWS", "call", "supports"]

GATE_ROWS, ROWS, COLUMNS, MIN_COLUMNS, MAX_COLUMNS = 512, 8, 1024, 2048, 8192  # of weights of few rows
MAX_ROWS, TILE_ROWS, TILE_COLUMNS = 16, 64, 128  # of x; of others' weights


def supports(arguments: DenseBf16Arguments) -> str | None:
    """Says why no kernel can take these arguments; None if one can."""
    if _of_few_rows(arguments):
        return None
    (rows, columns), tokens, groups = arguments.weights.shape, arguments.x.shape[0], arguments.groups
    few = arguments.alike or tokens <= MAX_ROWS
    if not few or rows % (groups * TILE_ROWS) or columns % TILE_COLUMNS:
        return (
            f"it takes up to {MAX_ROWS} rows of x, or any that are to be alike, and weights of {TILE_ROWS}s of rows a "
            f"group and {TILE_COLUMNS}s of columns; or, of one group and in float32, weights of up to {GATE_ROWS} rows "
            f"in {ROWS}s and {MIN_COLUMNS} to {MAX_COLUMNS} columns in {COLUMNS}s, not {tokens} rows of x and {groups} "
            f"groups of weights {rows} x {columns}"
        )
    return ffi.cuda_problem("dense_stream")


def call(arguments: DenseBf16Arguments) -> jax.Array:
    """Computes what `ops.dense_bf16.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    x, weights = arguments.x.astype(jnp.bfloat16), arguments.weights
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[0]), arguments.dtype)
    if _of_few_rows(arguments):
        return launch("dense_bf16", "dsv4_dense_bf16", result, x, weights)
    return launch("dense_stream", "dsv4_dense_stream", result, x, weights, groups=arguments.groups)


def _of_few_rows(arguments: DenseBf16Arguments) -> bool:
    rows, columns = arguments.weights.shape
    plain = arguments.groups == 1 and arguments.dtype == jnp.float32
    fits = MIN_COLUMNS <= columns <= MAX_COLUMNS and not columns % COLUMNS
    return plain and fits and rows <= GATE_ROWS and not rows % ROWS


TARGETS = "dsv4_dense_bf16", "dsv4_dense_stream"
IMPLEMENTATION = declare("dense_bf16", call, supports, *TARGETS, early=TARGETS)
