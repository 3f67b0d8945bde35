"""append on a GPU in Pallas-Triton: norm, RoPE, quantisation and the scatter in one launch, a program per row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import RowFormat
from ..ops.append import Rows
from ..ops.append import _append as _append_reference
from ..ops.append import _encode as _encode_reference
from ..ops.columns import Values, dense
from ..ops.epilogue import Epilogue
from .emit import Arithmetic, EpilogueRefs, RowTile, emit, epilogue_operands, unsupported_rows
from .tiles import addressable, interpreted, whole

__all__: list[str] = []

WARPS = 4


def _append(
    pool: Rows,
    values: Values,
    row_ids: jax.Array,
    position: jax.Array | None,
    epilogue: Epilogue | None,
    fmt: RowFormat,
    interpret: bool | None = None,
) -> Rows:
    """As `ops.append._append`. `interpret` defaults to whether the default backend is the CPU."""
    if unsupported_rows(fmt) or not addressable(*pool):
        return _append_reference(pool, values, row_ids, position, epilogue, fmt)
    return _call(pool, values, row_ids, position, epilogue, fmt, interpreted(interpret))


def _encode(
    values: Values, position: jax.Array | None, epilogue: Epilogue | None, fmt: RowFormat, interpret: bool | None = None
) -> Rows:
    """As `ops.append._encode`."""
    parts = tuple(jax.ShapeDtypeStruct((values.shape[0], p.width), jnp.dtype(p.dtype)) for p in fmt.parts)
    if unsupported_rows(fmt) or not addressable(*parts):
        return _encode_reference(values, position, epilogue, fmt)
    return _call(parts, values, None, position, epilogue, fmt, interpreted(interpret))


def _call(parts, values, row_ids, position, epilogue, fmt, interpret) -> Rows:
    """Writes every row: to `row_ids` of the arrays `parts`, or in order to new arrays like `parts`."""
    operands, meta = [dense(values)], None
    if epilogue is not None:
        operands += [jnp.asarray(position), *epilogue_operands(epilogue)]
        meta = (float(epilogue.eps), epilogue.hadamard)
    aliases = {}
    if row_ids is not None:
        operands.append(jnp.asarray(row_ids))
        aliases = {len(operands) + i: i for i in range(len(parts))}
        operands += parts
    out_shape = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts)
    return pl.pallas_call(
        functools.partial(_kernel, fmt=fmt, epilogue=meta, scatter=row_ids is not None, interpret=interpret),
        grid=(values.shape[0],),
        in_specs=[whole(x) for x in operands],
        out_specs=tuple(whole(x) for x in out_shape),
        out_shape=out_shape,
        input_output_aliases=aliases,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="append",
    )(*operands)


def _kernel(*refs, fmt, epilogue, scatter, interpret):
    pool, refs = refs[-len(fmt.parts) :], list(refs)
    token = pl.program_id(0)
    values, position, epilogue_refs = refs.pop(0), None, None
    if epilogue is not None:
        position = refs.pop(0)[token]
        epilogue_refs = EpilogueRefs(refs.pop(0), refs.pop(0), *epilogue)
    row = refs.pop(0)[token] if scatter else token
    # Loaded whether the row is stored or not: so that no load waits for another.
    tile = RowTile(fmt.dim)
    loaded = epilogue_refs.load(tile) if epilogue_refs else None
    x = tile.load(values, token).astype(jnp.float32)

    @pl.when((row >= 0) & (row < pool[0].shape[0]))
    def _():
        emit(x, fmt, loaded, position, pool, row, Arithmetic(interpret))
