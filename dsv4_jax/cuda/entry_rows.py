"""entry_rows in the project's own CUDA (`csrc/index/entry_rows.cu`).

It is one launch, between top_k and attend in their call.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.entry_rows import EntryRowsArguments
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "call", "supports"]

MAX_KEYS = 2**22


def supports(arguments: EntryRowsArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    keys = arguments.entries.shape[1]
    return f"it takes up to {MAX_KEYS} entries of a token, not {keys}" if keys > MAX_KEYS else None


def call(arguments: EntryRowsArguments) -> jax.Array:
    """Computes what `ops.entry_rows.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    result = jax.ShapeDtypeStruct(arguments.entries.shape, jnp.int32)
    operands = arguments.entries, arguments.slots, arguments.table
    numbers = dict(base=arguments.base, per_block=arguments.per_block, blocks=arguments.blocks)
    return launch("entry_rows", "dsv4_entry_rows", result, *operands, **numbers)


IMPLEMENTATION = declare("entry_rows", call, supports, "dsv4_entry_rows")
