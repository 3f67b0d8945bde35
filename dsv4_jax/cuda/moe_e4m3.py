"""The experts' products with rows rounded to e4m3 in CUDA for Hopper (`csrc/moe/e4m3_kernel.cuh`).

FP4 weights as `formats.weights.fp4_e4m3.pack` lays them out, widened to e4m3 without loss while they are multiplied.
Five launches: tokens rounded, rows by expert, gate and up with the clamped SwiGLU, share and rounding, down, and each
token's sum over its experts (`ops.moe.ExpertSums`). A token's bits depend on the token, its experts and their shares
alone: not on its neighbours, on their number or on how the kernel cuts the work.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..formats.activations import ROW_BLOCK
from ..ops.moe import MoeArguments
from .calls import declare, launch
from .dense_e4m3 import PITCH
from .moe import supports

__all__ = ["IMPLEMENTATION", "call", "workspace_bytes"]


def call(arguments: MoeArguments, shape: int = 0) -> jax.Array:
    """Computes what `ops.moe_e4m3.reference` does. `shape`: of those that are compiled, from 1 on; 0: by the number of
    rows. All give the same bits.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    (tokens, hidden), top = arguments.x.shape, arguments.chosen.shape[1]
    here, inter = arguments.down.shape[0], arguments.inter
    results = (
        jax.ShapeDtypeStruct((tokens, hidden), jnp.float32),
        jax.ShapeDtypeStruct((workspace_bytes(tokens, top, hidden, inter, here),), jnp.uint8),
    )
    share = arguments.share.astype(jnp.float32)
    operands = arguments.x.astype(jnp.bfloat16), arguments.chosen, share, arguments.gate_up, arguments.down
    settings = dict(first=arguments.first, routed=arguments.routed, limit=float(arguments.limit), shape=shape)
    return launch("moe_e4m3", "dsv4_moe_e4m3", results, *operands, **settings)[0]


IMPLEMENTATION = declare("moe_e4m3", call, supports, "dsv4_moe_e4m3")


def workspace_bytes(tokens: int, top: int, hidden: int, inter: int, here: int) -> int:
    """Counts the scratch memory of a call, as `moe_e4m3_work` of csrc/moe/e4m3_lists.cuh does."""
    pairs = tokens * top
    # Experts with a group of 8 rows that is not full; each pair of a single token has a group of its own.
    partly = pairs if tokens == 1 else min(pairs, here)
    rows = 8 * ((pairs - partly) // 8 + partly)
    of_tokens = tokens * hidden, 4 * (hidden // ROW_BLOCK) * (-(-tokens // PITCH) * PITCH)
    of_rows = (size for width in (hidden, inter) for size in (rows * width, 4 * rows * (width // ROW_BLOCK)))
    sizes = (4 * pairs, 4 * rows, 4 * rows, *of_tokens, *of_rows, 2 * pairs * hidden)
    return 1024 + sum(-(-size // 1024) * 1024 for size in sizes)
