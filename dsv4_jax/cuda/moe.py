"""The experts' products in the project's own CUDA for Hopper (`csrc/moe/experts_kernel.cuh`), called through XLA FFI.

FP4 weights as `formats.weights.fp4.pack` lays them out, bf16 rows, sums in float32. Four launches: rows by expert, gate
and up with the clamped SwiGLU, down, and each token's sum over its experts (`ops.moe.ExpertSums`). A token's bits
depend on the token, its experts and their shares alone: not on its neighbours, on their number, on how the kernel cuts
the work or on how many devices share the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.moe import MoeArguments
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "call", "launch_experts", "listed_rows", "supports", "workspace_bytes"]

MAX_EXPERTS, MAX_TOP, MAX_PAIRS = 512, 16, 98_304


def supports(arguments: MoeArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    (tokens, hidden), top = arguments.x.shape, arguments.chosen.shape[1]
    here, inter = arguments.down.shape[0], arguments.inter
    if hidden % 256 or inter % 256 or here > MAX_EXPERTS or top > MAX_TOP or tokens * top > MAX_PAIRS:
        return (
            f"it takes sizes in 256s, at most {MAX_EXPERTS} experts, {MAX_TOP} of them a token and {MAX_PAIRS} in "
            f"all, not {here} of {hidden} x {inter} for {tokens} tokens with {top} each"
        )
    return None


def call(arguments: MoeArguments) -> jax.Array:
    """Computes what `ops.moe.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    return launch_experts("moe", arguments, workspace_bytes)


IMPLEMENTATION = declare("moe", call, supports, "dsv4_moe")


def launch_experts(
    op: str,
    arguments: MoeArguments,
    workspace: Callable[..., int],
    *others: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.float32,
    **settings: Any,
) -> jax.Array:
    """Calls an op's handler, whose scratch memory is counted by `workspace`, with operands and settings of its own."""
    (tokens, hidden), top = arguments.x.shape, arguments.chosen.shape[1]
    here, inter = arguments.down.shape[0], arguments.inter
    results = (
        jax.ShapeDtypeStruct((tokens, hidden), dtype),
        jax.ShapeDtypeStruct((workspace(tokens, top, hidden, inter, here),), jnp.uint8),
    )
    share = arguments.share.astype(jnp.float32)
    operands = arguments.x.astype(jnp.bfloat16), arguments.chosen, share, arguments.gate_up, arguments.down
    settings |= dict(first=arguments.first, routed=arguments.routed)
    return launch(op, f"dsv4_{op}", results, *operands, *others, limit=float(arguments.limit), **settings)[0]


def listed_rows(tokens: int, top: int, here: int) -> int:
    """Counts the rows of a call by expert, in groups of 8 of one expert each: the most that there can be."""
    pairs = tokens * top
    # Experts with a group of 8 rows that is not full; each pair of a single token has a group of its own.
    partly = pairs if tokens == 1 else min(pairs, here)
    return 8 * ((pairs - partly) // 8 + partly)


def workspace_bytes(tokens: int, top: int, hidden: int, inter: int, here: int) -> int:
    """Counts the scratch memory of a call, as `moe_work` of csrc/moe/lists.cuh does."""
    pairs, rows = tokens * top, listed_rows(tokens, top, here)
    sizes = (4 * pairs, 4 * rows, 2 * rows * hidden, 2 * rows * inter, 4 * pairs * hidden)
    return 1024 + sum(-(-size // 1024) * 1024 for size in sizes)
