"""index_scores on a GPU in Pallas-Triton: paged keys, decoded in registers, straight into the tensor cores.

A program takes one token and TILES tiles of TILE keys. The keys are the left operand of the product
with the queries, so that they are decoded where the product wants them, in registers. Only visible
keys are read. Queries are rounded to bf16 for all formats but f32.

Keys of fp8 and fp4 enter the product as float16, which costs half the conversions of bf16: fp8 codes
without their scale, fp4 values relative to the largest scale of their key (exact unless two scales of
a key are more than 2^20 apart). Queries join them over a power of two per head, their largest element's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import Codes, RowFormat, Scales
from ..formats.scaling import UE8M0_NAN, power_of_two
from ..ops.index_scores import IndexScoresArguments, scaled
from ..ops.registry import Implementation
from .tiles import e2m1_codes, interpreted, outer, problem, read, too_large, whole

__all__ = ["IMPLEMENTATION", "call", "supports", "unsupported_rows"]

TILE = 64  # keys of one product
TILES = 8  # products of one program
SMALLEST_DOT = 16  # least extent of a product in Triton


def supports(arguments: IndexScoresArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    return unsupported_rows(arguments.fmt) or too_large(*arguments.pool)


def call(arguments: IndexScoresArguments, interpret: bool | None = None) -> jax.Array:
    """Computes what `ops.index_scores.reference` does.

    `interpret` defaults to whether the default backend is the CPU.
    """
    queries, table, rows_per_block = arguments.queries, arguments.table, arguments.rows_per_block
    operands = (queries, scaled(arguments.weights, arguments.scale), table, arguments.count, *arguments.pool)
    out_shape = jax.ShapeDtypeStruct((queries.shape[0], table.shape[1] * rows_per_block), jnp.float32)
    return pl.pallas_call(
        functools.partial(_scores_kernel, base=arguments.base, rows_per_block=rows_per_block, fmt=arguments.fmt),
        grid=(out_shape.shape[0], -(-out_shape.shape[1] // (TILE * TILES))),
        in_specs=[whole(x) for x in operands],
        out_specs=whole(out_shape),
        out_shape=out_shape,
        interpret=interpreted(interpret),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="index_scores",
    )(*operands)


IMPLEMENTATION = Implementation("index_scores", "pallas", call, supports, problem)


def _scores_kernel(queries, weights, table, count, *refs, base, rows_per_block, fmt):
    *pool, out = refs
    token, first = pl.program_id(0), pl.program_id(1) * TILES
    visible_keys = jnp.clip(count[token], 0, out.shape[1])
    heads, entries = weights.shape[1], out.shape[1]
    block = max(SMALLEST_DOT, pl.next_power_of_2(heads))
    head = jnp.arange(block, dtype=jnp.int32)
    live = head < heads
    w = read(weights, (jnp.full((block,), token), head), live).astype(jnp.float32)
    width = max(SMALLEST_DOT, pl.next_power_of_2(fmt.dim))
    h, column = outer(head, jnp.arange(width, dtype=jnp.int32))
    q = read(queries, (jnp.full(h.shape, token), h, column), (h < heads) & (column < fmt.dim))
    q = q.astype(jnp.dtype(fmt.dense_dtype))
    if fmt.quantised:
        q, power = _float16(q)
        w = w * power
    lane = jnp.arange(TILE, dtype=jnp.int32)

    def put(key, scores):
        pltriton.store(out.at[jnp.full((TILE,), token), key], scores, mask=key < entries)

    def score(tile, _):
        key = (first + tile) * TILE + lane
        visible = key < visible_keys
        page = read(table, (jnp.full((TILE,), token), key // rows_per_block), visible)
        page = jnp.clip(page, 0, (pool[0].shape[0] - base) // rows_per_block - 1)
        row = jnp.where(visible, base + page * rows_per_block + key % rows_per_block, 0)
        keys, factor = _load_keys(fmt, pool, row, visible, width)
        scores = _weighted(keys, q, w, live if heads < block else None)
        if factor is not None:
            scores = scores * factor
        put(key, jnp.where(visible, scores, -np.float32(np.inf)))

    def nothing(tile, _):
        put((first + tile) * TILE + lane, jnp.full((TILE,), -np.inf, jnp.float32))

    seen = jnp.clip((visible_keys + TILE - 1) // TILE - first, 0, TILES)
    lax.fori_loop(0, seen, score, None)
    lax.fori_loop(seen, TILES, nothing, None)


def _weighted(keys, queries, weights, live):
    """sum_h weights[h] * relu(queries[h] . keys[s]), [TILE]; `live` tells heads from padding."""
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    dots = jnp.dot(keys, queries.T, precision=precision, preferred_element_type=jnp.float32)
    negative = dots < 0  # so that NaN stays
    if live is not None:
        negative |= ~live[None, :]  # padding adds nothing, not even the NaN of 0 * Inf
    return (jnp.where(negative, np.float32(0), dots) * weights[None, :]).sum(1)


def _float16(queries):
    """bf16 [heads, width] over a power of two per head, float16 below 2, and those powers [heads] float32."""
    queries = queries.astype(jnp.float32)
    exponent = lax.bitcast_convert_type(jnp.abs(queries).max(1), jnp.uint32) >> np.uint32(23)
    exponent = jnp.clip(exponent, np.uint32(1), np.uint32(253))
    power = lax.bitcast_convert_type(exponent << np.uint32(23), jnp.float32)
    inverse = lax.bitcast_convert_type((np.uint32(254) - exponent) << np.uint32(23), jnp.float32)
    return (queries * inverse[:, None]).astype(jnp.float16), power


def _load_keys(fmt: RowFormat, pool, row, visible, width: int):
    """The keys [TILE, width], zeros where not visible, and what the scores are yet to be scaled by."""
    body = _loader(fmt)
    assert body is not None, unsupported_rows(fmt)
    return body(fmt, pool, row, visible, width)


def unsupported_rows(fmt: RowFormat) -> str | None:
    """Why keys of a format are not scored here, or None."""
    return None if _loader(fmt) else f"it does not score keys of {fmt.contents}"


def _loader(fmt: RowFormat) -> Callable[..., tuple[jax.Array, jax.Array | None]] | None:
    """What decodes keys of such parts, if anything here does."""
    match fmt.holds:
        case (Codes("f32" | "bf16"),):
            return _load_plain
        case Codes("e4m3", dims), Scales("power_of_two", group) if group >= dims:
            return _load_e4m3
        case Codes("e2m1"), Scales("ue8m0"):
            return _load_e2m1
    return None


def _load_plain(fmt: RowFormat, pool, row, visible, width: int):
    stored = _load_part(pool[0], row, visible, width)
    return stored if stored.dtype == jnp.float32 else lax.bitcast_convert_type(stored, jnp.bfloat16), None


def _load_e4m3(fmt: RowFormat, pool, row, visible, width: int):
    codes = _load_part(pool[0], row, visible, width)
    # The scale is a positive power of two: it passes through relu and sum.
    factor = read(pool[1], (row, jnp.zeros_like(row)), visible)
    return _half(codes), factor


def _load_part(part, row, visible, width: int):
    r, column = outer(row, jnp.arange(width, dtype=jnp.int32))
    return read(part, (r, column), visible[:, None] & (column < part.shape[1]))


def _load_e2m1(fmt: RowFormat, pool, row, visible, width: int):
    (packed, scale), (scales,) = pool, fmt.scales
    r, column = outer(row, jnp.arange(width // 2, dtype=jnp.int32))
    pairs = read(packed, (r, column), visible[:, None] & (column < packed.shape[1]))
    codes = e2m1_codes(jnp.stack([pairs, pairs >> np.uint8(4)], -1).reshape(row.shape[0], width))
    groups = range(fmt.groups(scales))
    exponents = [read(scale, (row, jnp.full_like(row, g)), visible).astype(jnp.int32) for g in groups]
    top = functools.reduce(jnp.maximum, exponents)
    relative = jnp.zeros(codes.shape, jnp.float16)
    _, column = outer(row, jnp.arange(width, dtype=jnp.int32))
    for group, exponent in zip(groups, exponents, strict=True):
        # 2^6 for e2m1_codes, over what the score is scaled by: the exponent field of a float16, bias 15.
        field = jnp.maximum(exponent - top + (6 + 15), 0).astype(jnp.uint16) << np.uint16(10)
        factor = jnp.broadcast_to(lax.bitcast_convert_type(field, jnp.float16)[:, None], codes.shape)
        # A select costs nothing: which group an element of a register belongs to is known when compiling.
        relative = jnp.where(column >= group * scales.group, factor, relative)
    nan = top == np.int32(UE8M0_NAN)
    return _half(codes) * relative, jnp.where(nan, np.float32(np.nan), power_of_two(top - np.int32(127)))


def _half(codes):
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float16)
