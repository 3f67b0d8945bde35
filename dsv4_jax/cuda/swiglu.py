"""swiglu in the project's own CUDA (`csrc/moe/swiglu.cu`): one launch, rounded to bf16.

With it all between two bf16 products of a step is a kernel of ours, and may be one call (`ops.in_sequence`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.registry import Implementation
from ..ops.swiglu import SwigluArguments
from .columns import float_columns

__all__ = ["IMPLEMENTATION", "call", "supports"]

MOST, STEP = 2**24, 4


def supports(arguments: SwigluArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    width = arguments.gate.shape[1]
    if arguments.dtype != jnp.bfloat16:
        return f"it rounds to bfloat16, not to {arguments.dtype.name}"
    return f"it takes up to {MOST} columns in {STEP}s, not {width}" if width > MOST or width % STEP else None


def call(arguments: SwigluArguments) -> jax.Array:
    """As `ops.swiglu.reference`.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    (gate, gate_start), (up, up_start) = float_columns(arguments.gate), float_columns(arguments.up)
    kernel = jax.ffi.ffi_call(
        ffi.cuda_target("swiglu", "dsv4_swiglu"), jax.ShapeDtypeStruct(arguments.gate.shape, jnp.bfloat16)
    )
    starts = {"gate_start": np.int32(gate_start), "up_start": np.int32(up_start)}
    return kernel(gate, up, limit=np.float32(arguments.limit), **starts)


IMPLEMENTATION = Implementation("swiglu", "cuda", call, supports, lambda: ffi.cuda_problem("swiglu"), ("dsv4_swiglu",))
