"""swiglu in the project's own CUDA (`csrc/moe/swiglu.cu`): one launch, rounded to bf16.

It takes float32, and bfloat16 as it is. With it all between two bf16 products of a step is a kernel of ours, and may be
one call (`ops.in_sequence`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.swiglu import SwigluArguments
from .calls import declare, float_columns, launch

__all__ = ["IMPLEMENTATION", "call", "supports"]

MAX_COLUMNS, STEP = 2**24, 4


def supports(arguments: SwigluArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    width = arguments.gate.shape[1]
    if arguments.dtype != jnp.bfloat16:
        return f"it rounds to bfloat16, not to {arguments.dtype.name}"
    return (
        f"it takes up to {MAX_COLUMNS} columns in {STEP}s, not {width}" if width > MAX_COLUMNS or width % STEP else None
    )


def call(arguments: SwigluArguments) -> jax.Array:
    """Computes what `ops.swiglu.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    both = arguments.gate, arguments.up
    rounded = arguments.gate.shape[1] % (2 * STEP) == 0 and all(values.dtype == jnp.bfloat16 for values in both)
    (gate, gate_start), (up, up_start) = (float_columns(values, STEP, rounded=rounded) for values in both)
    result = jax.ShapeDtypeStruct(arguments.gate.shape, jnp.bfloat16)
    settings = dict(limit=float(arguments.limit), gate_start=gate_start, up_start=up_start)
    return launch("swiglu", "dsv4_swiglu", result, gate, up, **settings)


IMPLEMENTATION = declare("swiglu", call, supports, "dsv4_swiglu")
