"""finish_queries on a GPU in Pallas-Triton: one program per head of a token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import FP4_GROUP, index_fp4
from ..formats.scaling import absmax, flush_subnormals, power_of_two, ue8m0_scale_exponent
from ..ops.columns import dense
from ..ops.epilogue import Epilogue
from ..ops.queries import QueriesArguments
from ..ops.registry import Implementation
from .emit import Arithmetic, EpilogueRefs, RowTile, epilogue_operands, hadamard, rms_norm, rope
from .tiles import interpreted, problem, whole

__all__ = ["IMPLEMENTATION", "call"]


def call(arguments: QueriesArguments, interpret: bool | None = None) -> jax.Array:
    """Computes what `ops.queries.reference` does, rounded to bf16.

    `interpret` defaults to whether the default backend is the CPU.
    """
    queries, eps = dense(arguments.queries).astype(jnp.float32), arguments.eps
    tokens, heads, dim = queries.shape
    interpret = interpreted(interpret)
    norm = jnp.ones((dim,), jnp.float32)
    operands = (
        queries.reshape(tokens * heads, dim),
        jnp.asarray(arguments.position),
        *epilogue_operands(Epilogue(norm, arguments.inv_freq)),
    )
    out = jax.ShapeDtypeStruct((tokens * heads, dim), jnp.bfloat16)
    rows = pl.pallas_call(
        functools.partial(
            _query_kernel,
            heads=heads,
            eps=eps,
            rotate=arguments.rotate,
            round_fp4=arguments.round_fp4,
            math=Arithmetic(interpret),
        ),
        grid=(tokens * heads,),
        in_specs=[whole(x) for x in operands],
        out_specs=whole(out),
        out_shape=out,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        name="finish_queries",
    )(*operands)
    return rows.reshape(queries.shape)


IMPLEMENTATION = Implementation("queries", "pallas", call, problem=problem)


def _query_kernel(
    queries,  # float32 [T * H, dim]
    position,  # int32 [T]
    norm,  # float32 [1, dim], ones
    inv_freq,  # float32 [1, rope_dim / 2]
    out,  # bfloat16 [T * H, dim]
    *,
    heads,
    eps,
    rotate,
    round_fp4,
    math,
):
    row = pl.program_id(0)
    tile = RowTile(queries.shape[1])
    x = tile.load(queries, row)
    epilogue = EpilogueRefs(norm, inv_freq, 0.0 if eps is None else eps, rotate)
    if eps is not None:
        x = rms_norm(x, tile, epilogue, math)
    x = rope(x, tile, epilogue, position[row // np.int32(heads)], math)
    if rotate:
        x = hadamard(x, tile.dim, math)
    if round_fp4:
        x = _round_trip(x)
    tile.store(out, row, x.astype(jnp.bfloat16))


def _round_trip(x: jax.Array) -> jax.Array:
    """`formats.index_fp4.round_trip` of a tile."""
    groups = flush_subnormals(x).reshape(-1, FP4_GROUP)
    exponent = ue8m0_scale_exponent(absmax(groups, index_fp4.AMAX_FLOOR), 6.0)
    codes = index_fp4.e2m1_codes(groups * power_of_two(-exponent)[:, None]).astype(jnp.int32)
    code, negative = codes & np.int32(7), codes > np.int32(7)
    # Twice the values: 0 to 4 in steps of 1, then 6, 8, 12.
    double = jnp.where(code < 4, code, jnp.where(code < 6, 2 * code - 4, 4 * code - 16))
    values = (
        jnp.where(negative, -double, double).astype(jnp.float32) * np.float32(0.5) * power_of_two(exponent)[:, None]
    )
    nan = jnp.isnan(groups).astype(jnp.int32).max(1, keepdims=True) != 0
    return jnp.where(nan, np.float32(np.nan), values).reshape(x.shape)
