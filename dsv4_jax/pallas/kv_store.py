"""The store of `pools.KVPool` on a GPU in Pallas-Triton: encode and scatter K and V in one launch, some rows a program.

A program reads its rows of K and V, neither waiting for the row ids, and writes them where the ids say. Tiles are
[rows, columns] whose index arrays run along the columns and whose masks depend on the row alone, so that a thread
moves 16 bytes at a time. A row's bytes do not depend on how many rows its program has.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats.scaling import (
    AMAX_FLOOR,
    E4M3_MAX,
    absmax,
    e4m3_codes,
    flush_subnormals,
    power_of_two,
    ue8m0_scale_exponent,
)
from ..ops.registry import Implementation
from ..pools.carriers import to_carrier
from ..pools.kv_pool import KVStoreArguments, Parts
from .tiles import interpreted, pieces, problem, read, too_large, whole

__all__ = ["IMPLEMENTATION", "call", "rows_per_program", "supports"]

WARPS = 4  # of a program
# Of K and V that a program reads: 128 bytes a thread, and 8 programs on an SM have 128 KB on their way.
PROGRAM_BYTES = 16 << 10
_MAX_BITS = 0x7F7FFFFF  # of the greatest float32
PROGRAMS = 512  # at least so many (a few on each SM), or one for every row


def supports(arguments: KVStoreArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    return too_large(*arguments.k_pool, *arguments.v_pool, arguments.k, arguments.v)


def call(
    arguments: KVStoreArguments, per_program: int | None = None, warps: int = WARPS, interpret: bool | None = None
) -> tuple[Parts, Parts]:
    """Computes what `pools.kv_pool.reference` does, bit for bit, for at least one row.

    Args:
        per_program: rows of a program, a power of two; None chooses by the number and size of the rows.
        warps: of a program.
        interpret: defaults to whether the default backend is the CPU.
    """
    k, v, rows = arguments.k, arguments.v, arguments.rows
    pool = (*arguments.k_pool, *arguments.v_pool)
    if per_program is None:
        per_program = rows_per_program(k, v)
    operands = (rows, k, v, *pool)
    out_shape = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pool)
    out = pl.pallas_call(
        functools.partial(_kernel, storage=arguments.storage, per_program=per_program),
        grid=(-(-rows.shape[0] // per_program),),
        in_specs=[whole(x) for x in operands],
        out_specs=tuple(whole(x) for x in out_shape),
        out_shape=out_shape,
        input_output_aliases={3 + i: i for i in range(len(pool))},
        interpret=interpreted(interpret),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        name="kv_store",
    )(*operands)
    half = len(arguments.k_pool)
    return tuple(out[:half]), tuple(out[half:])


IMPLEMENTATION = Implementation("kv_store", "pallas", call, supports, problem)


def rows_per_program(k: jax.Array, v: jax.Array) -> int:
    """Returns a power of two: as many rows as make `PROGRAM_BYTES`, fewer if that leaves fewer than `PROGRAMS`
    programs."""
    row_bytes = sum(x.shape[1] * x.dtype.itemsize for x in (k, v))
    most = max(1, min(PROGRAM_BYTES // row_bytes, k.shape[0] // PROGRAMS))
    return 1 << (most.bit_length() - 1)


def _kernel(ids, k, v, *refs, storage, per_program):
    pool = refs[len(refs) // 2 :]  # the outputs: the pool's parts again, in place
    half = len(pool) // 2
    place = pl.program_id(0) * per_program + jnp.arange(per_program, dtype=jnp.int32)
    inside = place < np.int32(ids.shape[0])
    # Loaded whether the rows are stored or not: so that no load waits for another.
    row = read(ids, (place,), inside)
    loaded = [
        [(column, read(x, _index(place, column), _rowwise(inside, column))) for column in _columns(x.shape[1])]
        for x in (k, v)
    ]
    stored = inside & (row >= 0) & (row < np.int32(pool[0].shape[0]))
    # The interpreter writes old values back where the mask is false: past the end, where they meet no live row.
    row = jnp.where(stored, row, np.int32(pool[0].shape[0]))
    for tiles, (part, *scale) in zip(loaded, (pool[:half], pool[half:]), strict=True):
        if storage == "fp8":
            tiles, factor = _fp8(tiles)
            pltriton.store(scale[0].at[row, jnp.zeros_like(row)], factor, mask=stored)
        for column, values in tiles:
            bits = values if storage == "fp8" else to_carrier(values, storage)
            pltriton.store(part.at[_index(row, column)], bits, mask=_rowwise(stored, column))


def _fp8(tiles):
    """`formats.index_fp8.encode` of rows in pieces: (the tiles as e4m3 codes, float32 scales [rows]).

    Conversion binds, not memory, unless an element takes few instructions. Where all are finite the greatest magnitude
    is that of the bits, nothing is clipped, and subnormals, which are below every scale's least code, need no care.
    """
    columns = [column for column, _ in tiles]
    values = [x.astype(jnp.float32) for _, x in tiles]
    bits = [lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF) for x in values]
    most = functools.reduce(jnp.maximum, (x.max(1) for x in bits))

    def finite():
        exponent = ue8m0_scale_exponent(jnp.maximum(lax.bitcast_convert_type(most, jnp.float32), AMAX_FLOOR), E4M3_MAX)
        factor = power_of_two(-exponent)[:, None]
        codes = [lax.bitcast_convert_type((x * factor).astype(jnp.float8_e4m3fn), jnp.uint8) for x in values]
        return (*codes, power_of_two(exponent))

    def any_values():
        amax = functools.reduce(jnp.maximum, (absmax(x, AMAX_FLOOR) for x in values))
        exponent = ue8m0_scale_exponent(amax, E4M3_MAX)
        factor = power_of_two(-exponent)[:, None]
        return (*(e4m3_codes(flush_subnormals(x) * factor) for x in values), power_of_two(exponent))

    *codes, scale = lax.cond(most.max() <= np.int32(_MAX_BITS), finite, any_values)
    return list(zip(columns, codes, strict=True)), scale


def _columns(width: int):
    """The columns of a row in powers of two, which need no mask: int32 index vectors."""
    return [np.int32(first) + jnp.arange(lanes, dtype=jnp.int32) for first, _, lanes in pieces(width)]


def _index(row, column):
    """As `tiles.outer`, by adding axes instead of reshaping: what the 16-byte accesses were seen with."""
    shape = (row.shape[0], column.shape[0])
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)


def _rowwise(mask, column):
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], column.shape[0]))
