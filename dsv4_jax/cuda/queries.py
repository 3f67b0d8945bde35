"""finish_queries in the project's own CUDA (`csrc/attend/queries_kernel.cuh`): one launch in place of a dozen fusions.

Of a `Product` (a long chunk's) the kernel multiplies too (`csrc/attend/query_product_kernel.cuh`): its sums stay on the
chip.

Takes heads of V4's KV rows, and of its index keys for the indexer (`widths`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import ffi
from ..ops.columns import Product
from ..ops.numerics import rope_tables
from ..ops.queries import QueriesArguments
from .calls import declare, float_columns, launch
from .widths import WIDTHS

__all__ = ["IMPLEMENTATION", "call", "supports"]

COLUMNS, STEP = 512, 64  # at least, of a product, and in these steps


def supports(arguments: QueriesArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
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
    """Computes what `ops.queries.reference` does, rounded to bf16.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    queries, tables = arguments.queries, rope_tables(arguments.position, arguments.inv_freq)
    result = jax.ShapeDtypeStruct(queries.shape, jnp.bfloat16)
    eps = float(-1 if arguments.eps is None else arguments.eps)
    steps = dict(eps=eps, hadamard=arguments.rotate, round_fp4=arguments.round_fp4)
    if isinstance(queries, Product) and _multiplies(queries, arguments.eps):
        operands = queries.x, queries.weights, *tables
        return launch("query_product", "dsv4_query_product", result, *operands, **steps)
    matrix, start = float_columns(queries, rounded=True)
    return launch("queries", "dsv4_finish_queries", result, matrix, *tables, start=start, **steps)


def _multiplies(queries: Product, eps: float | None) -> bool:
    """Whether the kernel makes this product. Each of its sums is one chain, so a token's bits depend on no other."""
    columns, (heads, dim) = queries.x.shape[1], queries.tail
    fits = columns >= COLUMNS and columns % STEP == 0 and heads * dim % WIDTHS.dim == 0
    return fits and (eps is not None) == (dim == WIDTHS.dim) and ffi.cuda_problem("query_product") is None


IMPLEMENTATION = declare(
    "queries", call, supports, "dsv4_finish_queries", "dsv4_query_product", early=("dsv4_finish_queries",)
)
