"""top-k in the project's own CUDA for Hopper (`csrc/index/top_k_kernel.cuh`), called through XLA FFI.

One launch: a block, or a cluster of them for a long row, keeps a row in registers. The greatest scores of its columns
bound the k-th from below; the few candidates that reach the bound are ordered by one histogram. Rows of up to 262,144
scores and k up to 1024.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.top_k import TopKArguments
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "call", "supports"]

MAX_K = 1024
MAX_SCORES = 262_144


def supports(arguments: TopKArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    if arguments.k > MAX_K:
        return f"it keeps at most {MAX_K} entries, not {arguments.k}"
    width = arguments.scores.shape[1]
    return f"it takes rows of at most {MAX_SCORES} scores, not {width}" if width > MAX_SCORES else None


def call(arguments: TopKArguments) -> tuple[jax.Array, jax.Array]:
    """Computes what `ops.top_k.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    tokens, k = arguments.scores.shape[0], arguments.k
    results = jax.ShapeDtypeStruct((tokens, k), jnp.int32), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    indices, kept = launch("top_k", "dsv4_top_k", results, arguments.scores.astype(jnp.float32), arguments.count)
    return indices, kept


IMPLEMENTATION = declare("top_k", call, supports, "dsv4_top_k")
