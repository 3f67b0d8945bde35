"""attend in the project's own CUDA for Hopper (`csrc/attend_kernel.cuh`), called through XLA FFI.

One launch per call: V4's KV rows (`widths.KV_ROW`) are gathered and decoded by producer warps while the tensor cores
(wgmma) work on the tile before, the runs of the key split are merged within a thread-block cluster, and the output
leaves turned back and rounded if the caller wants that. Other rows take the reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..ffi import cuda_target
from ..formats import RowFormat
from ..layout import KeySplit
from ..ops.append import Rows
from ..ops.attend import _attend as _reference
from ..ops.numerics import rope_tables
from .widths import KV_ROW, unsupported_rows

__all__ = ["has_kernel", "split_count"]

TILE = 64  # keys of a tile, as in the kernel
HEADS = 64  # of a block
MAX_SPLITS = 8  # largest portable cluster
# Fewer tiles a run help batch 1, more help large batches (benchmarks/RESULTS.md).
TILES_PER_RUN = 9
LATENCY_TILES_PER_RUN, LATENCY_TILES_PER_RUN_OF_MORE_HEADS = 3, 5  # more than 64 heads are several blocks already


def split_count(window: int, entries: int, heads: int = 64, key_split: KeySplit = "throughput") -> int:
    """Runs of one token's keys, each a block's (of 64 heads): by static shapes and settings, never by the batch.

    "throughput" gives a run up to nine tiles of 64 keys, "latency" three (five with more than 64 heads); at most
    eight runs.
    """
    tiles = -(-window // TILE) - (-entries // TILE)
    each = TILES_PER_RUN
    if key_split == "latency":
        each = LATENCY_TILES_PER_RUN if heads <= HEADS else LATENCY_TILES_PER_RUN_OF_MORE_HEADS
    return min(MAX_SPLITS, max(1, -(-tiles // each)))


def has_kernel(fmt: RowFormat) -> bool:
    """Whether the kernel decodes rows of this format."""
    return unsupported_rows(fmt, KV_ROW) is None


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
    *,
    inverse_rope: tuple[jax.Array, jax.Array] | None = None,
    dtype: DTypeLike = jnp.float32,
    key_split: KeySplit = "throughput",
) -> tuple[jax.Array, jax.Array]:
    """As `ops.attend._attend`. Queries are rounded to bf16, as are the softmax weights before the second product.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    if not has_kernel(fmt) or (inverse_rope is not None and inverse_rope[1].shape != (fmt.rope_dim // 2,)):
        return _reference(
            queries, sink, window, window_ids, window_visible, entries, entry_ids, entry_count, scale, fmt,
            inverse_rope=inverse_rope, dtype=dtype,
        )  # fmt: skip
    tokens, heads, dim = queries.shape
    if entries is None or entry_ids is None or entry_count is None:
        entries, entry_ids = window, jnp.zeros((tokens, 0), jnp.int32)
        entry_count = jnp.zeros(tokens, jnp.int32)
    # No rows: nothing to turn back.
    no_table = jnp.zeros((0, fmt.rope_dim // 2), jnp.float32)
    tables = (no_table, no_table) if inverse_rope is None else rope_tables(*inverse_rope)
    stored = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    call = jax.ffi.ffi_call(
        cuda_target("dsv4_attend"),
        (jax.ShapeDtypeStruct((tokens, heads, dim), stored), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)),
    )
    out, lse = call(
        queries.astype(jnp.bfloat16), sink.astype(jnp.float32), *window, window_ids, window_visible,
        *entries, entry_ids, entry_count, *tables,
        scale=np.float32(scale),
        splits=np.int32(split_count(window_ids.shape[1], entry_ids.shape[1], heads, key_split)),
    )  # fmt: skip
    return out.astype(dtype), lse
