"""attend in the project's own CUDA for Hopper (`csrc/attend_kernel.cuh`), called through XLA FFI.

One launch per call: fp8 rows are gathered and decoded by producer warps while the tensor cores (wgmma) work on the
tile before, and the runs of the key split are merged within a thread-block cluster. Other row formats and
widths take the reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..ffi import cuda_target
from ..formats import RowFormat
from ..ops.append import Rows
from ..ops.attend import _attend as _reference

__all__ = ["split_count"]

TILE = 64  # keys of a tile, as in the kernel
MAX_SPLITS = 8  # largest portable cluster
TILES_PER_SPLIT = 9  # fewer help batch 1, more help large batches (benchmarks/RESULTS.md)


def split_count(window: int, entries: int) -> int:
    """Blocks that share one token's keys (and 64 heads): a function of shapes only, never of the batch."""
    tiles = -(-window // TILE) - (-entries // TILE)
    return min(MAX_SPLITS, max(1, -(-tiles // TILES_PER_SPLIT)))


def has_kernel(fmt: RowFormat) -> bool:
    """Whether the kernel decodes rows of this format."""
    return fmt.name == "fp8" and (fmt.nope_dim, fmt.rope_dim) == (448, 64)


def _attend(
    queries: jax.Array,
    sink: jax.Array,
    window: Rows,
    window_ids: jax.Array,
    window_visible: jax.Array,
    entries: Rows | None,
    entry_ids: jax.Array | None,
    entry_count: jax.Array | None,
    scale: float,
    fmt: RowFormat,
) -> tuple[jax.Array, jax.Array]:
    """As `ops.attend._attend`. Queries are rounded to bf16, as are the softmax weights before the second product.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    if not has_kernel(fmt):
        return _reference(
            queries, sink, window, window_ids, window_visible, entries, entry_ids, entry_count, scale, fmt
        )
    tokens, heads, dim = queries.shape
    if entries is None or entry_ids is None or entry_count is None:
        entries, entry_ids = window, jnp.zeros((tokens, 0), jnp.int32)
        entry_count = jnp.zeros(tokens, jnp.int32)
    call = jax.ffi.ffi_call(
        cuda_target("dsv4_attend"),
        (jax.ShapeDtypeStruct((tokens, heads, dim), jnp.float32), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)),
    )
    out, lse = call(
        queries.astype(jnp.bfloat16), sink.astype(jnp.float32), *window, window_ids, window_visible,
        *entries, entry_ids, entry_count,
        scale=np.float32(scale), splits=np.int32(split_count(window_ids.shape[1], entry_ids.shape[1])),
    )  # fmt: skip
    return out, lse
