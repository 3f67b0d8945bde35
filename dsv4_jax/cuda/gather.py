"""gather in the project's own CUDA (`csrc/rows/gather.cu`): V4's KV rows (`widths.KV_ROW`) to bf16 or float32.

One launch, pools of any size; rows of other formats and results of other types are Pallas'.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import ffi
from ..ops.gather import GatherArguments
from ..ops.registry import Implementation
from .widths import KV_ROW, unsupported_rows

__all__ = ["IMPLEMENTATION", "call", "supports"]


def supports(arguments: GatherArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    if jnp.dtype(arguments.dtype) not in (jnp.bfloat16, jnp.float32):
        return f"it makes bfloat16 or float32, not {jnp.dtype(arguments.dtype)}"
    return unsupported_rows(arguments.fmt, KV_ROW)


def call(arguments: GatherArguments) -> jax.Array:
    """As `ops.gather.reference`, bit for bit. Raises `ImplementationError`: the CUDA library is not there."""
    ids, fmt = arguments.row_ids, arguments.fmt
    kernel = jax.ffi.ffi_call(
        ffi.cuda_target("gather", "dsv4_gather"), jax.ShapeDtypeStruct((ids.size, fmt.dim), arguments.dtype)
    )
    return kernel(ids.reshape(-1), *arguments.pool).reshape(*ids.shape, fmt.dim)


IMPLEMENTATION = Implementation("gather", "cuda", call, supports, lambda: ffi.cuda_problem("gather"), ("dsv4_gather",))
