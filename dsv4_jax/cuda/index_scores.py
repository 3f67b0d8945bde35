"""index_scores in the project's own CUDA for Hopper (`csrc/index/scores_kernel.cuh`), called through XLA FFI.

Keys go from the paged pool to shared memory by bulk copies, are decoded in registers and multiplied by wgmma; nothing
is gathered and only the keys below each token's count are read. From 512 tokens on, four neighbours that name the same
blocks, as those of one request's prefill do, share the copies and the decoding. Takes V4's index keys
(`widths.INDEX_ROWS`).

A token whose queries are all e4m3 numbers times one power of two per head, as those rounded to FP4 are, takes FP8
products (`csrc/index/scores_fp8.cuh`): with fp4 keys 1e-7 of the score is lost as with bf16 products, but up to 2e-4
where the scales of a key's groups lie far apart; with fp8 keys 2e-4. The choice depends on the token's queries alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.index_scores import IndexScoresArguments
from .calls import declare, float_columns, launch
from .widths import INDEX_ROWS, WIDTHS, unsupported_rows

__all__ = ["IMPLEMENTATION", "call", "supports"]

GROUP = 16  # keys one warp takes; they must lie in one block
ALIGNED = 4  # rows: scales are copied in units of 16 bytes
MAX_TOKENS = 65535  # second grid dimension


def supports(arguments: IndexScoresArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    tokens, heads, _ = arguments.queries.shape
    if reason := unsupported_rows(arguments.fmt, *INDEX_ROWS):
        return reason
    if heads > WIDTHS.index_heads:
        return f"it has room for {WIDTHS.index_heads} heads, not {heads}"
    if arguments.rows_per_block % GROUP:
        return f"it takes blocks of a multiple of {GROUP} keys, not {arguments.rows_per_block}"
    if arguments.base % ALIGNED:
        return f"it takes a base that is a multiple of {ALIGNED}, not {arguments.base}"
    return f"it takes at most {MAX_TOKENS} tokens, not {tokens}" if tokens > MAX_TOKENS else None


def call(arguments: IndexScoresArguments) -> jax.Array:
    """Computes what `ops.index_scores.reference` does, with the queries rounded to bf16.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    queries, table, rows_per_block = arguments.queries, arguments.table, arguments.rows_per_block
    result = jax.ShapeDtypeStruct((queries.shape[0], table.shape[1] * rows_per_block), jnp.float32)
    codes, key_scale = arguments.pool
    matrix, start = float_columns(arguments.weights, multiple=1)
    operands = codes, key_scale, queries.astype(jnp.bfloat16), matrix, table, arguments.count
    numbers = dict(base=arguments.base, rows_per_block=rows_per_block, first_weight=start)
    weight_scale = float(arguments.scale)
    return launch("index_scores", "dsv4_index_scores", result, *operands, **numbers, weight_scale=weight_scale)


IMPLEMENTATION = declare("index_scores", call, supports, "dsv4_index_scores")
