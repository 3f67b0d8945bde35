"""append in the project's own CUDA (`csrc/rows/append.cu`): norm, RoPE, quantisation and the scatter, one block a row.

Takes V4's KV row (`widths.KV_ROW`).
"""

from __future__ import annotations

import jax.numpy as jnp

from ..formats import RowFormat
from ..ops.append import AppendArguments, Rows
from ..ops.epilogue import Epilogue
from ..ops.numerics import rope_tables
from .calls import declare, float_columns, launch
from .widths import KV_ROW, unsupported_pairs, unsupported_rows

__all__ = ["IMPLEMENTATION", "call", "stores", "supports"]


def stores(fmt: RowFormat, epilogue: Epilogue | None) -> str | None:
    """Why rows of this format, finished like this, cannot be stored; None if they can."""
    if reason := unsupported_rows(fmt, KV_ROW):
        return reason
    if epilogue is not None and (reason := unsupported_pairs(epilogue.inv_freq)):
        return reason
    if epilogue is not None and epilogue.hadamard:
        return "it has no Hadamard rotation"
    return None


def supports(arguments: AppendArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    return stores(arguments.fmt, arguments.epilogue)


def call(arguments: AppendArguments) -> Rows:
    """Computes what `ops.append.reference` does. Raises `ImplementationError`: the CUDA library is not there."""
    epilogue, pool, results = arguments.epilogue, arguments.pool, arguments.results
    matrix, start = float_columns(arguments.values, rounded=True)
    operands, aliases = [matrix], {}
    if epilogue is not None:
        assert arguments.position is not None
        tables = rope_tables(arguments.position, epilogue.inv_freq.astype(jnp.float32))
        operands += [epilogue.norm.astype(jnp.float32), *tables]
    if pool is not None:
        operands += [arguments.row_ids, *pool]
        aliases = {len(operands) - len(results) + i: i for i in range(len(results))}
    stored = launch(
        "append",
        "dsv4_append",
        results,
        *operands,
        aliases=aliases,
        start=start,
        eps=float(0 if epilogue is None else epilogue.eps),
        epilogue=epilogue is not None,
        scatter=pool is not None,
    )
    return tuple(stored)


IMPLEMENTATION = declare("append", call, supports, "dsv4_append")
