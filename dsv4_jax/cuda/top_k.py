"""top-k in the project's own CUDA for Hopper (`csrc/top_k_kernel.cuh`), called through XLA FFI.

One launch: a block, or a cluster of them for a long row, keeps a row in registers. The greatest scores of its columns
bound the k-th from below; the few candidates that reach the bound are ordered by one histogram. Rows of up to 262,144
scores and k up to 1024; everything else takes the reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ffi import cuda_target
from ..ops.top_k import _top_k as _reference

__all__: list[str] = []

MAX_K = 1024
MAX_SCORES = 262_144


def _top_k(scores: jax.Array, count: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """As `ops.top_k._top_k`.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    tokens, width = scores.shape
    if not 0 < k <= MAX_K or width > MAX_SCORES:
        return _reference(scores, count, k)
    call = jax.ffi.ffi_call(
        cuda_target("dsv4_top_k"),
        (jax.ShapeDtypeStruct((tokens, k), jnp.int32), jax.ShapeDtypeStruct((tokens,), jnp.int32)),
    )
    indices, kept = call(scores.astype(jnp.float32), count)
    return indices, kept
