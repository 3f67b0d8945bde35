"""entry_rows in the project's own CUDA (`csrc/index/entry_rows.cu`): one launch, between top_k and attend in their call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.entry_rows import EntryRowsArguments
from ..ops.registry import Implementation

__all__ = ["IMPLEMENTATION", "call", "supports"]

MOST_KEYS = 2**22


def supports(arguments: EntryRowsArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    keys = arguments.entries.shape[1]
    return f"it takes up to {MOST_KEYS} entries of a token, not {keys}" if keys > MOST_KEYS else None


def call(arguments: EntryRowsArguments) -> jax.Array:
    """As `ops.entry_rows.reference`.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    kernel = jax.ffi.ffi_call(
        ffi.cuda_target("entry_rows", "dsv4_entry_rows"), jax.ShapeDtypeStruct(arguments.entries.shape, jnp.int32)
    )
    numbers = {"base": arguments.base, "per_block": arguments.per_block, "blocks": arguments.blocks}
    numbers = {name: np.int32(number) for name, number in numbers.items()}
    return kernel(arguments.entries, arguments.slots, arguments.table, **numbers)


IMPLEMENTATION = Implementation(
    "entry_rows", "cuda", call, supports, lambda: ffi.cuda_problem("entry_rows"), ("dsv4_entry_rows",)
)
