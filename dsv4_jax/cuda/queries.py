"""finish_queries in the project's own CUDA (`csrc/queries_kernel.cuh`): one launch in place of a dozen fusions.

Takes heads of V4's KV rows, and of its index keys for the indexer (`widths`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.numerics import rope_tables
from ..ops.queries import QueriesArguments
from ..ops.registry import Implementation
from .columns import float_columns
from .widths import WIDTHS

__all__ = ["IMPLEMENTATION", "call", "supports"]


def supports(arguments: QueriesArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    dim, pairs = arguments.queries.shape[-1], arguments.inv_freq.shape[0]
    if pairs != WIDTHS.rope_pairs or dim not in (WIDTHS.index_dim, WIDTHS.dim):
        return (
            f"it takes heads of {WIDTHS.index_dim} or {WIDTHS.dim} dims with {WIDTHS.rope_pairs} RoPE pairs, not of "
            f"{dim} with {pairs}"
        )
    if dim == WIDTHS.dim and (arguments.rotate or arguments.round_fp4):
        return f"it rotates and rounds heads of {WIDTHS.index_dim} dims only, not of {dim}"
    return None


def call(arguments: QueriesArguments) -> jax.Array:
    """As `ops.queries.reference`, rounded to bf16.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    matrix, start = float_columns(arguments.queries)
    result = jax.ShapeDtypeStruct(arguments.queries.shape, jnp.bfloat16)
    kernel = jax.ffi.ffi_call(ffi.cuda_target("queries", "dsv4_finish_queries"), result)
    return kernel(
        matrix, *rope_tables(arguments.position, arguments.inv_freq), start=np.int32(start),
        eps=np.float32(-1 if arguments.eps is None else arguments.eps), hadamard=arguments.rotate,
        round_fp4=arguments.round_fp4,
    )  # fmt: skip


IMPLEMENTATION = Implementation(
    "queries", "cuda", call, supports, lambda: ffi.cuda_problem("queries"), ("dsv4_finish_queries",)
)
