"""gather in the project's own CUDA (`csrc/rows/gather.cu`): V4's KV rows (`widths.KV_ROW`) to bf16 or float32.

One launch, pools of any size; rows of other formats and results of other types are Pallas'.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.gather import GatherArguments
from .calls import declare, launch
from .widths import KV_ROW, unsupported_rows

__all__ = ["IMPLEMENTATION", "call", "supports"]


def supports(arguments: GatherArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    if jnp.dtype(arguments.dtype) not in (jnp.bfloat16, jnp.float32):
        return f"it makes bfloat16 or float32, not {jnp.dtype(arguments.dtype)}"
    return unsupported_rows(arguments.fmt, KV_ROW)


def call(arguments: GatherArguments) -> jax.Array:
    """Computes what `ops.gather.reference` does, bit for bit.

    Raises `ImplementationError`: the CUDA library is not there.
    """
    ids, fmt = arguments.row_ids, arguments.fmt
    result = jax.ShapeDtypeStruct((ids.size, fmt.dim), arguments.dtype)
    return launch("gather", "dsv4_gather", result, ids.reshape(-1), *arguments.pool).reshape(*ids.shape, fmt.dim)


IMPLEMENTATION = declare("gather", call, supports, "dsv4_gather")
