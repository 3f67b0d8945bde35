"""append in the project's own CUDA (`csrc/append.cu`): norm, RoPE, quantisation and the scatter, one block a row.

V4's KV row (`widths.KV_ROW`); everything else takes the Pallas kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..ffi import cuda_target
from ..formats import RowFormat
from ..ops.append import Rows
from ..ops.columns import Values
from ..ops.epilogue import Epilogue
from ..ops.numerics import rope_tables
from ..pallas import append as pallas
from .columns import float_columns
from .widths import KV_ROW, WIDTHS, unsupported_rows

__all__ = ["has_kernel"]


def has_kernel(fmt: RowFormat, epilogue: Epilogue | None) -> bool:
    """Whether the kernel stores rows of this format, finished like this."""
    pairs = WIDTHS.rope_pairs if epilogue is None else epilogue.inv_freq.shape[0]
    hadamard = epilogue is not None and epilogue.hadamard
    return unsupported_rows(fmt, KV_ROW) is None and pairs == WIDTHS.rope_pairs and not hadamard


def _append(
    pool: Rows,
    values: Values,
    row_ids: jax.Array,
    position: jax.Array | None,
    epilogue: Epilogue | None,
    fmt: RowFormat,
) -> Rows:
    """As `ops.append._append`. Raises `ImplementationError`: the CUDA library is not there."""
    if not has_kernel(fmt, epilogue):
        return pallas._append(pool, values, row_ids, position, epilogue, fmt)
    results = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pool)
    return _call(values, position, epilogue, [row_ids, *pool], results)


def _encode(values: Values, position: jax.Array | None, epilogue: Epilogue | None, fmt: RowFormat) -> Rows:
    """As `ops.append._encode`. Raises `ImplementationError`: the CUDA library is not there."""
    if not has_kernel(fmt, epilogue):
        return pallas._encode(values, position, epilogue, fmt)
    results = tuple(jax.ShapeDtypeStruct((values.shape[0], p.width), jnp.dtype(p.dtype)) for p in fmt.parts)
    return _call(values, position, epilogue, [], results)


def _call(
    values: Values,
    position: jax.Array | None,
    epilogue: Epilogue | None,
    scattered: list[jax.Array],
    results: tuple[jax.ShapeDtypeStruct, ...],
) -> Rows:
    """`scattered`: the row ids and the pool that becomes the results; empty: the results are new arrays."""
    matrix, start = float_columns(values)
    operands = [matrix]
    if epilogue is not None:
        assert position is not None
        tables = rope_tables(position, epilogue.inv_freq.astype(jnp.float32))
        operands += [epilogue.norm.astype(jnp.float32), *tables]
    operands += scattered
    aliases = {len(operands) - len(results) + i: i for i in range(len(results))} if scattered else {}
    call = jax.ffi.ffi_call(cuda_target("dsv4_append"), results, input_output_aliases=aliases)
    eps = np.float32(0 if epilogue is None else epilogue.eps)
    return tuple(call(*operands, start=np.int32(start), eps=eps, finish=epilogue is not None, scatter=bool(scattered)))
