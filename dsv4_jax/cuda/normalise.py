"""normalise in the project's own CUDA (`csrc/residual/normalise.cu`): one launch, rounded to bf16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.normalise import NormaliseArguments
from ..ops.registry import Implementation
from .columns import float_columns

__all__ = ["IMPLEMENTATION", "call", "supports"]

MOST, STEP = 8192, 4


def supports(arguments: NormaliseArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    width = arguments.weight.shape[0]
    if arguments.dtype != jnp.bfloat16:
        return f"it rounds to bfloat16, not to {arguments.dtype.name}"
    return f"it takes up to {MOST} columns in {STEP}s, not {width}" if width > MOST or width % STEP else None


def call(arguments: NormaliseArguments) -> jax.Array:
    """As `ops.normalise.reference`.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    matrix, start = float_columns(arguments.values)
    kernel = jax.ffi.ffi_call(
        ffi.cuda_target("normalise", "dsv4_normalise"), jax.ShapeDtypeStruct(arguments.values.shape, jnp.bfloat16)
    )
    return kernel(matrix, arguments.weight, start=np.int32(start), eps=np.float32(arguments.eps))


IMPLEMENTATION = Implementation(
    "normalise", "cuda", call, supports, lambda: ffi.cuda_problem("normalise"), ("dsv4_normalise",)
)
