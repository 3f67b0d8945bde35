"""normalise in the project's own CUDA (`csrc/residual/normalise.cu`): one launch, rounded to bf16."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.normalise import NormaliseArguments
from .calls import declare, float_columns, launch

__all__ = ["IMPLEMENTATION", "call", "supports"]

MAX_COLUMNS, STEP = 8192, 4


def supports(arguments: NormaliseArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    width = arguments.weight.shape[0]
    if arguments.dtype != jnp.bfloat16:
        return f"it rounds to bfloat16, not to {arguments.dtype.name}"
    return (
        f"it takes up to {MAX_COLUMNS} columns in {STEP}s, not {width}" if width > MAX_COLUMNS or width % STEP else None
    )


def call(arguments: NormaliseArguments) -> jax.Array:
    """Computes what `ops.normalise.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    # Of bfloat16 a load has twice as many columns.
    matrix, start = float_columns(arguments.values, STEP, rounded=arguments.weight.shape[0] % (2 * STEP) == 0)
    result = jax.ShapeDtypeStruct(arguments.values.shape, jnp.bfloat16)
    settings = dict(start=start, eps=float(arguments.eps))
    return launch("normalise", "dsv4_normalise", result, matrix, arguments.weight, **settings)


IMPLEMENTATION = declare("normalise", call, supports, "dsv4_normalise", early=("dsv4_normalise",))
