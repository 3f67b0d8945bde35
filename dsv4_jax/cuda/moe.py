"""The experts' products in the project's own CUDA for Hopper (`csrc/moe_kernel.cuh`), called through XLA FFI.

FP4 weights as `expert_weights.pack` lays them out, bf16 rows, sums in float32. Four launches: rows by expert, gate and
up with the clamped SwiGLU, down, and each token's sum over its experts in their order. A token's bits depend on the
token, its experts and their shares alone: not on its neighbours, on their number or on how the kernel cuts the work.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.arguments import Check
from ..ops.registry import Choice, Implementation, run
from .expert_weights import TILE_COLUMNS

__all__ = ["IMPLEMENTATION", "ExpertsArguments", "call", "experts", "supports", "workspace_bytes"]

MOST_EXPERTS, MOST_TOP, MOST_PAIRS = 512, 16, 98_304


@dataclasses.dataclass(frozen=True)
class ExpertsArguments:
    """What an implementation of `experts` is given; as in its arguments."""

    x: jax.Array
    chosen: jax.Array
    share: jax.Array
    gate_up: jax.Array
    down: jax.Array
    limit: float
    first: int
    routed: int

    @property
    def empty(self) -> bool:
        return self.chosen.size == 0


def experts(x: jax.Array, chosen: jax.Array, share: jax.Array, gate_up: jax.Array, down: jax.Array, *, limit: float,
            first: int = 0, routed: int | None = None, implementation: Choice = None) -> jax.Array:  # fmt: skip
    """Each token's experts times their shares: [T, hidden] float32.

    Args:
        x: [T, hidden] float, taken in bf16.
        chosen: [T, top] int32, distinct experts of a token, of all `routed`.
        share: [T, top] float, what each counts.
        gate_up: uint8, `pack` of the `gate_up_rows` of the experts that are here.
        down: uint8, `pack` of their last matrices.
        limit: of the SwiGLU: gates are clamped above, ups on both sides.
        first: number of the first expert that is here; what others would add is left out.
        routed: how many experts there are on all devices; None: those here.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("experts")
    x = check.array("x", x, "float", "T", "hidden")
    chosen, share = check.array("chosen", chosen, "int32", "T", "top"), check.array("share", share, "float", "T", "top")
    gate_up = check.array("gate_up", gate_up, "uint8", "experts", "tiles", "steps", "bytes")
    down = check.array("down", down, "uint8", "experts", "tiles of down", "steps of down", "bytes")
    routed = down.shape[0] if routed is None else routed
    return run("moe", ExpertsArguments(x, chosen, share, gate_up, down, limit, first, routed), implementation)


def supports(arguments: ExpertsArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    (tokens, hidden), top = arguments.x.shape, arguments.chosen.shape[1]
    here, inter = arguments.down.shape[0], arguments.down.shape[2] * TILE_COLUMNS
    if hidden % 256 or inter % 256 or here > MOST_EXPERTS or top > MOST_TOP or tokens * top > MOST_PAIRS:
        return (
            f"it takes sizes in 256s, at most {MOST_EXPERTS} experts, {MOST_TOP} of them a token and {MOST_PAIRS} in "
            f"all, not {here} of {hidden} x {inter} for {tokens} tokens with {top} each"
        )
    return None


def call(arguments: ExpertsArguments) -> jax.Array:
    """As `experts`. Raises `ImplementationError`: the CUDA library is not there."""
    (tokens, hidden), top = arguments.x.shape, arguments.chosen.shape[1]
    here, inter = arguments.down.shape[0], arguments.down.shape[2] * TILE_COLUMNS
    if arguments.empty:
        return jnp.zeros((tokens, hidden), jnp.float32)
    kernel = jax.ffi.ffi_call(
        ffi.cuda_target("moe", "dsv4_moe"),
        (
            jax.ShapeDtypeStruct((tokens, hidden), jnp.float32),
            jax.ShapeDtypeStruct((workspace_bytes(tokens, top, hidden, inter, here),), jnp.uint8),
        ),
    )
    out, _ = kernel(
        arguments.x.astype(jnp.bfloat16), arguments.chosen, arguments.share.astype(jnp.float32), arguments.gate_up,
        arguments.down, first=np.int32(arguments.first), routed=np.int32(arguments.routed),
        limit=np.float32(arguments.limit),
    )  # fmt: skip
    return out


IMPLEMENTATION = Implementation("moe", "cuda", call, supports, lambda: ffi.cuda_problem("moe"), ("dsv4_moe",))


def workspace_bytes(tokens: int, top: int, hidden: int, inter: int, here: int) -> int:
    """Scratch memory of a call; `moe_work` of csrc/moe_lists.cuh."""
    pairs = tokens * top
    partly = min(pairs, here)  # experts with a group of 8 rows that is not full
    rows = 8 * ((pairs - partly) // 8 + partly)
    sizes = (4 * pairs, 4 * rows, 2 * rows * hidden, 2 * rows * inter, 4 * pairs * hidden)
    return 1024 + sum(-(-size // 1024) * 1024 for size in sizes)
