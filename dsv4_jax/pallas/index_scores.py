"""index_scores on a GPU in Pallas-Triton: paged keys, decoded in registers, straight into the tensor cores.

A program takes one token and TILES tiles of TILE keys. The keys are the left operand of the product
with the queries, so that a tile goes from its stored bytes to the score without shared memory. Only
visible keys are read. Queries are rounded to bf16 for all formats but f32; decoded keys are exact.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import FP4_GROUP, RowFormat
from ..formats.scaling import UE8M0_NAN
from ..ops.append import Rows
from ..ops.index_scores import _index_scores as _reference
from .tiles import addressable, e2m1_values, interpreted, outer, read, whole

__all__: list[str] = []

TILE = 128  # keys of one product
TILES = 8  # products of one program
SMALLEST_DOT = 16  # least extent of a product in Triton


def _index_scores(
    pool: Rows,
    queries: jax.Array,
    weights: jax.Array,
    table: jax.Array,
    count: jax.Array,
    base: int,
    rows_per_block: int,
    fmt: RowFormat,
    interpret: bool | None = None,
) -> jax.Array:
    """As `ops.index_scores._index_scores`. `interpret` defaults to whether the default backend is the CPU."""
    if not addressable(*pool):
        return _reference(pool, queries, weights, table, count, base, rows_per_block, fmt)
    operands = (queries, weights, table, count, *pool)
    out_shape = jax.ShapeDtypeStruct((queries.shape[0], table.shape[1] * rows_per_block), jnp.float32)
    return pl.pallas_call(
        functools.partial(_scores_kernel, base=base, rows_per_block=rows_per_block, fmt=fmt),
        grid=(out_shape.shape[0], -(-out_shape.shape[1] // (TILE * TILES))),
        in_specs=[whole(x) for x in operands],
        out_specs=whole(out_shape),
        out_shape=out_shape,
        interpret=interpreted(interpret),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        name="index_scores",
    )(*operands)


def _scores_kernel(queries, weights, table, count, *refs, base, rows_per_block, fmt):
    *pool, out = refs
    token, first = pl.program_id(0), pl.program_id(1) * TILES
    visible_keys = count[token]
    heads, entries = weights.shape[1], out.shape[1]
    block = max(SMALLEST_DOT, pl.next_power_of_2(heads))
    head = jnp.arange(block, dtype=jnp.int32)
    live = head < heads
    w = read(weights, (jnp.full((block,), token), head), live).astype(jnp.float32)
    # Of fp4 keys the even elements make one product, the odd ones another.
    phases = 2 if fmt.name == "fp4" else 1
    width = max(SMALLEST_DOT, pl.next_power_of_2(fmt.dim // phases))
    dtype = jnp.float32 if fmt.name == "f32" else jnp.bfloat16
    q_tiles = [_load_queries(queries, token, head, phase, phases, width).astype(dtype) for phase in range(phases)]
    lane = jnp.arange(TILE, dtype=jnp.int32)

    def put(key, scores):
        pltriton.store(out.at[jnp.full((TILE,), token), key], scores, mask=key < entries)

    def score(tile, _):
        key = (first + tile) * TILE + lane
        visible = key < visible_keys
        page = read(table, (jnp.full((TILE,), token), key // rows_per_block), visible)
        row = jnp.where(visible, base + page * rows_per_block + key % rows_per_block, 0)
        keys, factor = _load_keys(fmt, pool, row, visible, width)
        scores = _weighted(keys, q_tiles, w, live if heads < block else None)
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
    precision = lax.Precision.HIGHEST if keys[0].dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
    dots = sum(dot(k, q.T) for k, q in zip(keys, queries, strict=True))
    negative = dots < 0  # so that NaN stays
    if live is not None:
        negative |= ~live[None, :]  # padding adds nothing, not even the NaN of 0 * Inf
    return (jnp.where(negative, np.float32(0), dots) * weights[None, :]).sum(1)


def _load_queries(queries, token, head, phase: int, phases: int, width: int):
    """Elements `phase`, `phase + phases`, ... of a token's queries, [heads, width], zero-padded."""
    _, heads, dim = queries.shape
    h, column = outer(head, jnp.arange(width, dtype=jnp.int32) * phases + phase)
    return read(queries, (jnp.full(h.shape, token), h, column), (h < heads) & (column < dim))


def _load_keys(fmt: RowFormat, pool, row, visible, width: int):
    """The keys' tiles [TILE, width], zeros where not visible, and what the scores are yet to be scaled by."""
    if fmt.name == "fp4":
        return _load_fp4(*pool, row, visible, width), None
    r, column = outer(row, jnp.arange(width, dtype=jnp.int32))
    stored = read(pool[0], (r, column), visible[:, None] & (column < fmt.dim))
    if fmt.name == "fp8":
        # The scale is a positive power of two: it passes through relu and sum.
        factor = read(pool[1], (row, jnp.zeros_like(row)), visible)
        return [lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.bfloat16)], factor
    return [stored if fmt.name == "f32" else lax.bitcast_convert_type(stored, jnp.bfloat16)], None


def _load_fp4(packed, scale, row, visible, width: int):
    lanes = FP4_GROUP // 2  # bytes that share a scale
    r, group, lane = outer(
        row, jnp.arange(width // lanes, dtype=jnp.int32), jnp.arange(lanes, dtype=jnp.int32)
    )  # fmt: skip
    column = group * lanes + lane
    codes = read(packed, (r, column), visible[:, None, None] & (column < packed.shape[1]))
    r, group = outer(row, jnp.arange(width // lanes, dtype=jnp.int32))
    exponent = read(scale, (r, group), visible[:, None] & (group < scale.shape[1]))
    # A ue8m0 code is the exponent field of the bf16 it stands for, but 0xFF is NaN and not Inf.
    bits = exponent.astype(jnp.uint16) << np.uint16(7) | (exponent == UE8M0_NAN).astype(jnp.uint16)
    factor = lax.bitcast_convert_type(bits, jnp.bfloat16)[:, :, None]
    return [(e2m1_values(c) * factor).reshape(row.shape[0], width) for c in (codes, codes >> np.uint8(4))]
