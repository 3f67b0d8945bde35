"""append on a GPU in Pallas-Triton: norm, RoPE, quantisation and the scatter in one launch, a program per row."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..ops.append import AppendArguments, Rows
from ..ops.columns import dense
from ..ops.registry import Implementation
from .emit import Arithmetic, EpilogueRefs, RowTile, emit, epilogue_operands, unsupported_rows
from .tiles import interpreted, problem, too_large, whole

__all__ = ["IMPLEMENTATION", "call", "supports"]

WARPS = 4


def supports(arguments: AppendArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    return unsupported_rows(arguments.fmt) or too_large(*arguments.results)


def call(arguments: AppendArguments, interpret: bool | None = None) -> Rows:
    """Computes what `ops.append.reference` does. `interpret` defaults to whether the default backend is the CPU."""
    values, epilogue, pool, results = arguments.values, arguments.epilogue, arguments.pool, arguments.results
    interpret = interpreted(interpret)
    operands: list[Any] = [dense(values)]
    meta = None
    if epilogue is not None:
        operands += [jnp.asarray(arguments.position), *epilogue_operands(epilogue)]
        meta = (float(epilogue.eps), epilogue.hadamard)
    aliases = {}
    if pool is not None:
        operands.append(jnp.asarray(arguments.row_ids))
        aliases = {len(operands) + i: i for i in range(len(pool))}
        operands += pool
    return pl.pallas_call(
        functools.partial(_kernel, fmt=arguments.fmt, epilogue=meta, scatter=pool is not None, interpret=interpret),
        grid=(values.shape[0],),
        in_specs=[whole(x) for x in operands],
        out_specs=tuple(whole(x) for x in results),
        out_shape=results,
        input_output_aliases=aliases,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="append",
    )(*operands)


IMPLEMENTATION = Implementation("append", "pallas", call, supports, problem)


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
