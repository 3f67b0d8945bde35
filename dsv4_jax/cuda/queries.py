"""finish_queries in the project's own CUDA (`csrc/queries_kernel.cuh`): one launch in place of a dozen fusions.

Heads of V4's KV rows, and of its index keys for the indexer (`widths`); everything else takes the reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..ffi import cuda_target
from ..ops.columns import Values
from ..ops.numerics import rope_tables
from ..ops.queries import _finish_queries as _reference
from .columns import float_columns
from .widths import WIDTHS

__all__ = ["has_kernel"]


def has_kernel(dim: int, pairs: int, rotate: bool, round_fp4: bool) -> bool:
    """Whether the kernel takes heads of `dim` dims of which the last 2 * `pairs` rotate."""
    of_index = dim == WIDTHS.index_dim
    return pairs == WIDTHS.rope_pairs and (of_index or (dim == WIDTHS.dim and not rotate and not round_fp4))


def _finish_queries(
    queries: Values, position: jax.Array, inv_freq: jax.Array, eps: float | None, rotate: bool, round_fp4: bool
) -> jax.Array:
    """As `ops.queries._finish_queries`, rounded to bf16.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    if not has_kernel(queries.shape[-1], inv_freq.shape[0], rotate, round_fp4):
        return _reference(queries, position, inv_freq, eps, rotate, round_fp4)
    matrix, start = float_columns(queries)
    call = jax.ffi.ffi_call(cuda_target("dsv4_finish_queries"), jax.ShapeDtypeStruct(queries.shape, jnp.bfloat16))
    return call(
        matrix, *rope_tables(position, inv_freq), start=np.int32(start),
        eps=np.float32(-1 if eps is None else eps), hadamard=rotate, round_fp4=round_fp4,
    )  # fmt: skip
