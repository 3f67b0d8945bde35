"""The experts' products with rows rounded to e4m3 in CUDA for Hopper (`csrc/moe/e4m3_kernel.cuh`).

FP4 weights as `formats.weights.fp4_e4m3.pack` lays them out, widened to e4m3 without loss while they are multiplied.
Five launches: pairs given rows by expert, tokens rounded into them, gate and up with the clamped SwiGLU, share and
rounding, down, and each token's sum over its experts (`ops.moe.ExpertSums`). A token's bits depend on the token, its
experts and their shares alone: not on its neighbours, on their number or on how the kernel cuts the work.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..formats.activations import ROW_BLOCK
from ..ops.moe import MoeArguments
from .calls import declare
from .moe import launch_experts, listed_rows, supports

__all__ = ["IMPLEMENTATION", "call", "workspace_bytes"]


def call(arguments: MoeArguments, shape: int = 0) -> jax.Array:
    """Computes what `ops.moe_e4m3.reference` does. `shape`: of those that are compiled, from 1 on; 0: by the number of
    rows. All give the same bits.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    beside, dtype = arguments.beside, jnp.bfloat16
    if beside is None:
        beside, dtype = jnp.zeros((0, arguments.x.shape[1]), jnp.bfloat16), jnp.float32
    return launch_experts("moe_e4m3", arguments, workspace_bytes, beside, dtype=dtype, shape=shape)


IMPLEMENTATION = declare("moe_e4m3", call, supports, "dsv4_moe_e4m3")


def workspace_bytes(tokens: int, top: int, hidden: int, inter: int, here: int) -> int:
    """Counts the scratch memory of a call, as `moe_e4m3_work` of csrc/moe/e4m3_lists.cuh does."""
    pairs, rows = tokens * top, listed_rows(tokens, top, here)
    of_rows = (size for width in (hidden, inter) for size in (rows * width, 4 * rows * (width // ROW_BLOCK)))
    sizes = (4 * pairs, 4 * rows, 4 * rows, 4 * pairs, *of_rows, 2 * pairs * hidden)
    return 1024 + sum(-(-size // 1024) * 1024 for size in sizes)
