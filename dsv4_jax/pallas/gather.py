"""gather on a GPU in Pallas-Triton: a program reads, decodes and writes ROWS rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import Codes, RowFormat, Scales
from ..formats.scaling import e4m3_values, power_of_two
from ..ops.gather import GatherArguments
from ..ops.registry import Implementation
from .tiles import e2m1_codes, interpreted, outer, pieces, problem, read, too_large, whole

__all__ = ["IMPLEMENTATION", "call", "supports", "unsupported_rows"]

ROWS = 4  # rows of one program; one warp reads them, which on an H200 beats more of either


def supports(arguments: GatherArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    return unsupported_rows(arguments.fmt) or too_large(*arguments.pool)


def call(arguments: GatherArguments, interpret: bool | None = None) -> jax.Array:
    """Computes what `ops.gather.reference` does, bit for bit.

    `interpret` defaults to whether the default backend is the CPU.
    """
    pool, row_ids, fmt = arguments.pool, arguments.row_ids, arguments.fmt
    ids = row_ids.reshape(-1)
    out_shape = jax.ShapeDtypeStruct((ids.size, fmt.dim), arguments.dtype)
    dense = pl.pallas_call(
        functools.partial(_gather_kernel, fmt=fmt),
        grid=(-(-ids.size // ROWS),),
        in_specs=[whole(x) for x in (ids, *pool)],
        out_specs=whole(out_shape),
        out_shape=out_shape,
        interpret=interpreted(interpret),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        name="gather",
    )(ids, *pool)
    return dense.reshape(*row_ids.shape, fmt.dim)


IMPLEMENTATION = Implementation("gather", "pallas", call, supports, problem)


def _gather_kernel(ids, *refs, fmt):
    *pool, out = refs
    place = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    rows = jnp.clip(read(ids, (place,), place < ids.shape[0]), 0, pool[0].shape[0] - 1)
    reader = _reader(fmt)
    assert reader is not None, unsupported_rows(fmt)
    for column, values in reader(pool, rows, fmt, out.dtype):
        index = (jnp.broadcast_to(place[:, None, None], values.shape), jnp.broadcast_to(column, values.shape))
        mask = jnp.broadcast_to((place < ids.shape[0])[:, None, None], values.shape)
        pltriton.store(out.at[index], values, mask=mask)


def unsupported_rows(fmt: RowFormat) -> str | None:
    """Why rows of a format are not read here, or None."""
    return None if _reader(fmt) else f"it does not read rows of {fmt.contents}"


def _reader(fmt: RowFormat) -> Callable[..., Iterator[tuple[jax.Array, jax.Array]]] | None:
    """What reads rows of such parts, if anything here does: (pool, rows, fmt, dtype) -> tiles.

    A tile is (columns [1, groups, lanes], values [ROWS, groups, lanes] of `dtype`).
    """
    match fmt.holds:
        case (Codes("f32" | "bf16"),):
            return _read_plain
        case Codes("e4m3"), Codes("bf16"), Scales("ue8m0", group) if _is_power_of_two(group):
            return _read_groups
        case Codes("e4m3", dims), Codes("bf16"), Scales("absmax", group) if group >= dims:
            return _read_absmax
        case Codes("e4m3", dims), Scales("power_of_two", group) if group >= dims:
            return _read_power_of_two
        case Codes("e2m1"), Scales("ue8m0", group) if _is_power_of_two(group):
            return _read_e2m1
    return None


def _read_plain(pool, rows, fmt: RowFormat, dtype):
    return _plain(pool[0], rows, 0, dtype)


def _read_groups(pool, rows, fmt: RowFormat, dtype):
    (scales,) = fmt.scales
    nope, rope, scale = pool
    for group, column, codes in _tiles(nope, rows, scales.group):
        yield column, (e4m3_values(codes) * _ue8m0(scale, rows, group)).astype(dtype)
    yield from _plain(rope, rows, nope.shape[1], dtype)


def _read_absmax(pool, rows, fmt: RowFormat, dtype):
    nope, rope, factor = pool
    yield from _one_scale(nope, factor, rows, dtype)
    yield from _plain(rope, rows, nope.shape[1], dtype)


def _read_power_of_two(pool, rows, fmt: RowFormat, dtype):
    return _one_scale(pool[0], pool[1], rows, dtype)


def _read_e2m1(pool, rows, fmt: RowFormat, dtype):
    (scales,) = fmt.scales
    packed, scale = pool
    for piece in pieces(fmt.dim, scales.group):
        group, column = _columns(*piece, scales.group)
        codes = _gathered(packed, rows, column // 2) >> ((column % 2) * 4).astype(jnp.uint8)
        factor = _ue8m0(scale, rows, group)
        factor = jnp.where(jnp.isinf(factor), np.float32(np.nan), factor)  # code 0xFF
        values = e4m3_values(e2m1_codes(codes)) * np.float32(2**6)
        yield column, (values * factor).astype(dtype)


def _plain(part, rows, first: int, dtype):
    for _, column, bits in _tiles(part, rows, None):
        values = bits if part.dtype == jnp.float32 else lax.bitcast_convert_type(bits, jnp.bfloat16)
        yield first + column, values.astype(dtype)


def _one_scale(codes, factor, rows, dtype):
    factor = pltriton.load(factor.at[rows, jnp.zeros_like(rows)])[:, None, None]
    for _, column, tile in _tiles(codes, rows, None):
        yield column, (e4m3_values(tile) * factor).astype(dtype)


def _tiles(part, rows, group: int | None):
    """A part of the rows as tiles: (groups [groups], columns [1, groups, lanes], elements)."""
    for piece in pieces(part.shape[1], group):
        of_group, column = _columns(*piece, group)
        yield of_group, column, _gathered(part, rows, column)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _columns(first: int, groups: int, lanes: int, group: int | None):
    of_group = jnp.arange(groups, dtype=jnp.int32)
    column = first + of_group[:, None] * lanes + jnp.arange(lanes, dtype=jnp.int32)[None, :]
    return of_group + (first // group if group else 0), column[None]


def _gathered(part, rows, column):
    shape = (rows.shape[0], *column.shape[1:])
    return pltriton.load(part.at[jnp.broadcast_to(rows[:, None, None], shape), jnp.broadcast_to(column, shape)])


def _ue8m0(scale, rows, group):
    """The factors [ROWS, groups, 1] of scale groups."""
    code = pltriton.load(scale.at[outer(rows, group)])
    return power_of_two(code.astype(jnp.int32) - np.int32(127))[:, :, None]
