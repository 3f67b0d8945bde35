"""The experts' products in the project's own CUDA for Hopper (`csrc/moe_kernel.cuh`), called through XLA FFI.

FP4 weights as `expert_weights.pack` lays them out, bf16 rows, sums in float32. Four launches: rows by expert, gate and
up with the clamped SwiGLU, down, and each token's sum over its experts in their order. A token's bits depend on the
token, its experts and their shares alone: not on its neighbours, on their number or on how the kernel cuts the work.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShapeError
from ..ffi import cuda_target
from .expert_weights import TILE_COLUMNS

__all__ = ["experts", "workspace_bytes"]

MOST_EXPERTS, MOST_TOP, MOST_PAIRS = 512, 16, 98_304


def experts(x: jax.Array, chosen: jax.Array, share: jax.Array, gate_up: jax.Array, down: jax.Array, *, limit: float,
            first: int = 0, routed: int | None = None) -> jax.Array:  # fmt: skip
    """Each token's experts times their shares: [T, hidden] float32.

    Args:
        x: [T, hidden], taken in bf16.
        chosen: [T, top] int32, distinct experts of a token, of all `routed`.
        share: [T, top], what each counts.
        gate_up: uint8, `pack` of the `gate_up_rows` of the experts that are here.
        down: uint8, `pack` of their last matrices.
        limit: of the SwiGLU: gates are clamped above, ups on both sides.
        first: number of the first expert that is here; what others would add is left out.
        routed: how many experts there are on all devices; None: those here.

    Raises:
        ShapeError: sizes that the kernel does not take, or that do not agree.
        ImplementationError: the CUDA library is not there.
    """
    (tokens, hidden), top = x.shape, chosen.shape[-1]
    here, inter = down.shape[0], down.shape[2] * TILE_COLUMNS
    pairs = tokens * top
    if hidden % 256 or inter % 256 or here > MOST_EXPERTS or top > MOST_TOP or pairs > MOST_PAIRS:
        raise ShapeError(
            f"experts: {here} of {hidden} x {inter}, {tokens} tokens with {top} each; the kernel takes sizes in 256s, "
            f"at most {MOST_EXPERTS} experts, {MOST_TOP} of them a token and {MOST_PAIRS} in all"
        )
    if pairs == 0:
        return jnp.zeros((tokens, hidden), jnp.float32)
    call = jax.ffi.ffi_call(
        cuda_target("dsv4_moe"),
        (
            jax.ShapeDtypeStruct((tokens, hidden), jnp.float32),
            jax.ShapeDtypeStruct((workspace_bytes(tokens, top, hidden, inter, here),), jnp.uint8),
        ),
    )
    out, _ = call(x.astype(jnp.bfloat16), chosen, share.astype(jnp.float32), gate_up, down, first=np.int32(first),
                  routed=np.int32(here if routed is None else routed), limit=np.float32(limit))  # fmt: skip
    return out


def workspace_bytes(tokens: int, top: int, hidden: int, inter: int, here: int) -> int:
    """Scratch memory of a call; `moe_work` of csrc/moe_lists.cuh."""
    pairs = tokens * top
    partly = min(pairs, here)  # experts with a group of 8 rows that is not full
    rows = 8 * ((pairs - partly) // 8 + partly)
    sizes = (4 * pairs, 4 * rows, 2 * rows * hidden, 2 * rows * inter, 4 * pairs * hidden)
    return 1024 + sum(-(-size // 1024) * 1024 for size in sizes)
