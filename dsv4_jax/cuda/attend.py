"""attend in the project's own CUDA for Hopper (`csrc/attend_kernel.cuh`), called through XLA FFI.

One launch per call: V4's KV rows (`widths.KV_ROW`) are gathered and decoded by producer warps while the tensor cores
(wgmma) work on the tile before, the runs of the key split are merged within a thread-block cluster, and the output
leaves turned back and rounded if the caller wants that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.attend import AttendArguments, KernelSplit
from ..ops.numerics import rope_tables
from ..ops.registry import Implementation
from .widths import KV_ROW, WIDTHS, unsupported_rows

__all__ = ["IMPLEMENTATION", "call", "cut", "split_count", "supports"]

TILE = 64  # keys of a tile, as in the kernel
HEADS = 64  # of a block
MAX_SPLITS = 8  # largest portable cluster
# Fewer tiles a run help batch 1, more help large batches (benchmarks/RESULTS.md).
TILES_PER_RUN = 9
LATENCY_TILES_PER_RUN, LATENCY_TILES_PER_RUN_OF_MORE_HEADS = 3, 5  # more than 64 heads are several blocks already
LATENCY_RUNS = 4  # at least, or one a tile: to one token a tile more is 2.4 us, a run more to merge 0.6


def cut(heads: int = 64, key_split: KernelSplit = "throughput") -> tuple[int, int]:
    """(tiles of 64 keys that a run has at most, runs that a token has at least, or one a tile)."""
    if key_split == "throughput":
        return TILES_PER_RUN, 1
    return LATENCY_TILES_PER_RUN if heads <= HEADS else LATENCY_TILES_PER_RUN_OF_MORE_HEADS, LATENCY_RUNS


def split_count(window: int, entries: int, heads: int = 64, key_split: KernelSplit = "throughput") -> int:
    """Runs of a token's keys, each a block's (of 64 heads), if it has as many as the call has room for.

    At most eight. A token with fewer keys has the runs of its own number; no bit depends on the batch or the room.
    """
    tiles = -(-window // TILE) - (-entries // TILE)
    most, least = cut(heads, key_split)
    return min(MAX_SPLITS, max(1, min(tiles, least), -(-tiles // most)))


def supports(arguments: AttendArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    if reason := unsupported_rows(arguments.fmt, KV_ROW):
        return reason
    if arguments.inverse_rope is not None and arguments.inverse_rope[1].shape != (WIDTHS.rope_pairs,):
        return f"it turns {WIDTHS.rope_pairs} pairs of dims back, not {arguments.inverse_rope[1].shape[0]}"
    return None


def call(arguments: AttendArguments) -> tuple[jax.Array, jax.Array]:
    """As `ops.attend.reference`. Queries are rounded to bf16, as are the softmax weights before the second product.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    window, inverse_rope = arguments.window, arguments.inverse_rope
    entries, entry_ids, entry_count = arguments.entries, arguments.entry_ids, arguments.entry_count
    tokens, heads, dim = arguments.queries.shape
    if entries is None or entry_ids is None or entry_count is None:
        entries, entry_ids = window.rows, jnp.zeros((tokens, 0), jnp.int32)
        entry_count = jnp.zeros(tokens, jnp.int32)
    # No rows: nothing to turn back.
    no_table = jnp.zeros((0, WIDTHS.rope_pairs), jnp.float32)
    tables = (no_table, no_table) if inverse_rope is None else rope_tables(*inverse_rope)
    stored = jnp.bfloat16 if arguments.dtype == jnp.bfloat16 else jnp.float32
    kernel = jax.ffi.ffi_call(
        ffi.cuda_target("attend", "dsv4_attend"),
        (jax.ShapeDtypeStruct((tokens, heads, dim), stored), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)),
    )
    of_model = arguments.heads or heads
    most, least = cut(of_model, arguments.key_split)
    splits = split_count(window.ids.shape[1], entry_ids.shape[1], of_model, arguments.key_split)
    out, lse = kernel(
        arguments.queries.astype(jnp.bfloat16), arguments.sink.astype(jnp.float32), *window.rows, window.ids,
        window.visible, *entries, entry_ids, entry_count, *tables,
        scale=np.float32(arguments.scale), splits=np.int32(splits), most=np.int32(most), least=np.int32(least),
    )  # fmt: skip
    return out.astype(arguments.dtype), lse


IMPLEMENTATION = Implementation("attend", "cuda", call, supports, lambda: ffi.cuda_problem("attend"), ("dsv4_attend",))
