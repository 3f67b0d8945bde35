"""The store of `pools.KVPool` on a GPU in Pallas-Triton: encode and scatter K and V in one launch, a program per token.

Interpreted and cross-lowered only: it has not run on a GPU yet, and `pools.store_kv` does not choose it by itself.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import index_format
from ..pools.carriers import to_carrier
from ..pools.kv_pool import Parts
from ..pools.kv_pool import _store_kv as _reference
from .emit import Arithmetic, RowTile, emit
from .tiles import addressable, interpreted, whole

__all__: list[str] = []

WARPS = 4


def _store_kv(
    k_pool: Parts, v_pool: Parts, k: jax.Array, v: jax.Array, rows: jax.Array, storage: str,
    interpret: bool | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    """As `pools.kv_pool._store_kv`, bit for bit. `interpret` defaults to whether the default backend is the CPU."""
    pool = (*k_pool, *v_pool)
    if not addressable(*pool, k, v):
        return _reference(k_pool, v_pool, k, v, rows, storage)
    operands = (rows, k, v, *pool)
    out_shape = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pool)
    out = pl.pallas_call(
        functools.partial(_kernel, storage=storage, interpret=interpreted(interpret)),
        grid=(rows.shape[0],),
        in_specs=[whole(x) for x in operands],
        out_specs=tuple(whole(x) for x in out_shape),
        out_shape=out_shape,
        input_output_aliases={3 + i: i for i in range(len(pool))},
        interpret=interpreted(interpret),
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="kv_store",
    )(*operands)
    return tuple(out[: len(k_pool)]), tuple(out[len(k_pool) :])


def _kernel(rows, k, v, *refs, storage, interpret):
    pool = refs[len(refs) // 2 :]  # the outputs: the pool's parts again, in place
    half = len(pool) // 2
    token = pl.program_id(0)
    row = rows[token]
    # Loaded whether the rows are stored or not: so that no load waits for another.
    loaded = [(RowTile(x.shape[1]), RowTile(x.shape[1]).load(x, token)) for x in (k, v)]

    @pl.when((row >= 0) & (row < pool[0].shape[0]))
    def _():
        for (tile, x), parts in zip(loaded, (pool[:half], pool[half:]), strict=True):
            if storage == "fp8":
                fmt = index_format("fp8", tile.dim)
                emit(x.astype(jnp.float32), fmt, None, None, parts, row, Arithmetic(interpret))
            else:
                tile.store(parts[0], row, to_carrier(x, storage))
