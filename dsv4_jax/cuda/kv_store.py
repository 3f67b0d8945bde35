"""The store of `pools.KVPool` in the project's own CUDA (`csrc/rows/kv_store.cu`).

It is one launch that writes bf16 rows into fp8 pools. Other storage is Pallas', which is as fast there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..pools.kv_pool import KVStoreArguments, Parts
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "call", "supports"]

STEP = 8  # values that a lane takes at once
MAX_WIDTH = 2048


def supports(arguments: KVStoreArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    if arguments.storage != "fp8":
        return f"it stores fp8, not {arguments.storage}"
    for name, x in (("k", arguments.k), ("v", arguments.v)):
        if x.dtype != jnp.bfloat16:
            return f"it takes bfloat16, {name} is {x.dtype}"
        if x.shape[1] % STEP or x.shape[1] > MAX_WIDTH:
            return f"it takes rows of a multiple of {STEP} up to {MAX_WIDTH} values, {name} has {x.shape[1]}"
    return None


def call(arguments: KVStoreArguments) -> tuple[Parts, Parts]:
    """Computes what `pools.kv_pool.reference` does, bit for bit.

    Raises `ImplementationError`: the CUDA library is not there.
    """
    pool = (*arguments.k_pool, *arguments.v_pool)
    results = tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in pool)
    operands = arguments.k, arguments.v, arguments.rows
    aliases = {len(operands) + i: i for i in range(len(pool))}
    stored = launch("kv_store", "dsv4_kv_store", results, *operands, *pool, aliases=aliases)
    half = len(arguments.k_pool)
    return tuple(stored[:half]), tuple(stored[half:])


IMPLEMENTATION = declare("kv_store", call, supports, "dsv4_kv_store")
