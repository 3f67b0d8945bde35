"""index_scores in the project's own CUDA for Hopper (`csrc/index_scores_kernel.cuh`), called through XLA FFI.

Keys go from the paged pool to registers, are decoded there and multiplied by wgmma; nothing is gathered and only the
keys below each token's count are read. V4's index keys (`widths.INDEX_ROWS`); everything else takes the reference.

With fp4 keys, a token whose queries are all e4m3 numbers times one power of two per head, as those rounded to FP4 are,
takes FP8 products (`csrc/index_scores_fp8.cuh`): 1e-7 of the score is lost as with bf16 ones, but up to 2e-4 where the
scales of a key's groups lie far apart. The choice hangs on the token's queries alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..ffi import cuda_target
from ..formats import RowFormat
from ..ops.append import Rows
from ..ops.columns import Values
from ..ops.index_scores import _index_scores as _reference
from .columns import float_columns
from .widths import INDEX_ROWS, WIDTHS, unsupported_rows

__all__ = ["has_kernel"]

GROUP = 16  # keys one warp takes; they must lie in one block
MAX_TOKENS = 65535  # second grid dimension


def has_kernel(fmt: RowFormat, heads: int, rows_per_block: int) -> bool:
    """Whether the kernel takes keys of this format, this many heads and blocks of this size."""
    return unsupported_rows(fmt, *INDEX_ROWS) is None and heads <= WIDTHS.index_heads and rows_per_block % GROUP == 0


def _index_scores(
    pool: Rows,
    queries: jax.Array,
    weights: Values,
    table: jax.Array,
    count: jax.Array,
    base: int,
    rows_per_block: int,
    fmt: RowFormat,
    scale: float = 1.0,
) -> jax.Array:
    """As `ops.index_scores._index_scores`, with the queries rounded to bf16.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    tokens, heads, _ = queries.shape
    if not has_kernel(fmt, heads, rows_per_block) or tokens > MAX_TOKENS:
        return _reference(pool, queries, weights, table, count, base, rows_per_block, fmt, scale)
    call = jax.ffi.ffi_call(
        cuda_target("dsv4_index_scores"),
        jax.ShapeDtypeStruct((tokens, table.shape[1] * rows_per_block), jnp.float32),
    )
    codes, key_scale = pool
    matrix, start = float_columns(weights, multiple=1)
    return call(
        codes, key_scale, queries.astype(jnp.bfloat16), matrix, table, count, base=np.int32(base),
        rows_per_block=np.int32(rows_per_block), first_weight=np.int32(start), weight_scale=np.float32(scale),
    )  # fmt: skip
