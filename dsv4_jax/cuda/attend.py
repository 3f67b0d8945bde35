"""attend in the project's own CUDA for Hopper, called through XLA FFI: three kernels with the same bits.

`csrc/attend/kernel.cuh`: V4's KV rows (`widths.KV_ROW`) are gathered and decoded by producer warps while the tensor
cores (wgmma) work on the tile before, the runs of the key split are merged within a thread-block cluster, and the
output leaves turned back and rounded if the caller wants that.

`csrc/attend/wide_kernel.cuh`: the same for few tokens, whose runs have several blocks each.

`csrc/attend/bf16_kernel.cuh`: bf16 rows are copied as they are, and a block takes one token after the other. For caches
of such rows, and for a long chunk, whose windows and entries are decoded to bf16 once, where its tokens would decode
each many times.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.attend import CHUNK, AttendArguments, KernelSplit
from ..ops.gather import gather_rows
from ..ops.numerics import rope_tables
from ..ops.rounded_rows import RoundedRows
from .calls import declare, launch
from .widths import BF16_ROW, KV_ROW, WIDTHS, unsupported_rows

__all__ = [
    "IMPLEMENTATION",
    "SUM_WORDS",
    "WIDE_CLUSTERS",
    "blocks_of_run",
    "call",
    "cut",
    "decodes_once",
    "split_count",
    "supports",
    "tile_count",
]

BLOCKS = 132  # that take tokens over bf16 rows, at most: SMs of an H100 or H200
READS_OF_A_ROW = 4  # of a chunk's tokens, on average, from which it is decoded before
ROWS_OF_A_TOKEN = 128  # decoded at most: 128 KiB, as its queries and its output take
TILE = 64  # keys of a tile, as in the kernel
HEADS = 64  # of a block
MAX_SPLITS = 8  # largest portable cluster
# Fewer tiles a run help batch 1, more help large batches (docs/kernels.md); more than 64 heads are several blocks
# already. Sixteen clusters of six run at once, of seven or eight fewer.
TILES_PER_RUN, TILES_PER_RUN_OF_MORE_HEADS, THROUGHPUT_SPLITS = 9, 18, 6
LATENCY_TILES_PER_RUN, LATENCY_TILES_PER_RUN_OF_MORE_HEADS = 3, 5
LATENCY_RUNS = 4  # at least, or one a tile: to one token a tile more is 2.4 us, a run more to merge 0.6
# Where a run has several blocks, clusters of eight at most, of which 15 run at once; of what has one cluster, two runs.
WIDE_CLUSTERS, WIDE_RUNS = 14, 2
# Of a run with a cluster of its own, to be merged: sums as halves, two a word; what they are counted in; (top, total).
SUM_WORDS = HEADS * 512 // 2 + 512 * 2 + HEADS * 2


def cut(heads: int = 64, key_split: KernelSplit = "throughput") -> tuple[int, int]:
    """(tiles of 64 keys that a run has at most, runs that a token has at least, or one a tile)."""
    if key_split == "throughput":
        return TILES_PER_RUN if heads <= HEADS else TILES_PER_RUN_OF_MORE_HEADS, 1
    return LATENCY_TILES_PER_RUN if heads <= HEADS else LATENCY_TILES_PER_RUN_OF_MORE_HEADS, LATENCY_RUNS


def tile_count(window: int, entries: int) -> int:
    """Tiles of a token's keys if all count: no tile has keys of both kinds."""
    return -(-window // TILE) - (-entries // TILE)


def split_count(window: int, entries: int, heads: int = 64, key_split: KernelSplit = "throughput") -> int:
    """Runs of a token's keys, each a block's (of 64 heads), if it has as many as the call has room for.

    At most six, or eight for "latency". A token with fewer keys has the runs of its own number; no bit depends on the
    batch or the room.
    """
    tiles = tile_count(window, entries)
    most, least = cut(heads, key_split)
    splits = THROUGHPUT_SPLITS if key_split == "throughput" else MAX_SPLITS
    return min(splits, max(1, min(tiles, least), -(-tiles // most)))


def blocks_of_run(tokens: int, heads: int, splits: int, tiles: int) -> int:
    """Thread blocks that share a run of a token and 64 heads. It changes no bit, only how long few tokens take.

    One if runs have a tile each. Eight, a run then being a cluster of its own, while all runs are served at once; else
    four of each of two runs, while all tokens are; else one.
    """
    if tiles <= splits:
        return 1
    clusters = tokens * -(-heads // HEADS)
    if clusters * splits <= WIDE_CLUSTERS:
        return MAX_SPLITS
    return MAX_SPLITS // WIDE_RUNS if splits == WIDE_RUNS and clusters <= WIDE_CLUSTERS else 1


def supports(arguments: AttendArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    if reason := unsupported_rows(arguments.fmt, KV_ROW, BF16_ROW):
        return reason
    if arguments.inverse_rope is not None and arguments.inverse_rope[1].shape != (WIDTHS.rope_pairs,):
        return f"it turns {WIDTHS.rope_pairs} pairs of dims back, not {arguments.inverse_rope[1].shape[0]}"
    return None


def decodes_once(arguments: AttendArguments) -> bool:
    """Whether the rows that the tokens have in common are decoded to bf16 before: no bit depends on it."""
    tokens, window = arguments.queries.shape[0], arguments.window
    keys, rows = window.ids.shape[1], window.rows[0].shape[0]
    if arguments.entry_ids is not None:
        if arguments.shared is None:
            return False
        keys, rows = keys + arguments.entry_ids.shape[1], rows + arguments.shared.rows.shape[0]
    return tokens >= CHUNK and rows <= tokens * min(keys // READS_OF_A_ROW, ROWS_OF_A_TOKEN)


def call(arguments: AttendArguments) -> tuple[jax.Array | RoundedRows, jax.Array]:
    """Computes what `ops.attend.reference` does.

    Queries are rounded to bf16, as are the softmax weights before the second product. Over bf16 rows the output comes
    as `RoundedRows` where it may: rounded to bf16, and that to e4m3.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    if arguments.fmt.parts == KV_ROW.parts and decodes_once(arguments):
        arguments = _decoded(arguments)
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
    of_model = arguments.heads or heads
    most, least = cut(of_model, arguments.key_split)
    splits = split_count(window.ids.shape[1], entry_ids.shape[1], of_model, arguments.key_split)
    attributes = dict(scale=float(arguments.scale), splits=splits, most=most, least=least)
    target = "attend_rows" if arguments.fmt.parts == BF16_ROW.parts else "attend"
    rounded = arguments.rounds and target == "attend_rows"
    results = [jax.ShapeDtypeStruct((tokens, heads, dim), stored), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)]
    units = tokens * -(-heads // HEADS)  # of a token and 64 heads
    if target == "attend_rows":
        blocks = min(units, BLOCKS)
        results.append(jax.ShapeDtypeStruct((blocks, splits - 1, HEADS * dim // 2), jnp.uint32))
        codes, scales = RoundedRows.shapes(tokens, heads * dim)
        if rounded:
            results[0] = jax.ShapeDtypeStruct((tokens, heads, dim), codes.dtype)
        results.append(scales if rounded else jax.ShapeDtypeStruct((0, scales.shape[1]), scales.dtype))
    else:
        blocks = blocks_of_run(tokens, heads, splits, tile_count(window.ids.shape[1], entry_ids.shape[1]))
        attributes["blocks"] = blocks
        merged = units if splits * blocks > MAX_SPLITS else 0  # by a second kernel
        results.append(jax.ShapeDtypeStruct((merged, splits, SUM_WORDS), jnp.uint32))
    out, lse, *others = launch(
        target,
        f"dsv4_{target}",
        results,
        arguments.queries.astype(jnp.bfloat16),
        arguments.sink.astype(jnp.float32),
        *window.rows,
        window.ids,
        window.visible,
        *entries,
        entry_ids,
        entry_count,
        *tables,
        **attributes,
    )
    if rounded:
        return RoundedRows(out.reshape(tokens, heads * dim), others[-1]), lse
    return out.astype(arguments.dtype), lse


def _decoded(arguments: AttendArguments) -> AttendArguments:
    """Makes of them the same over bf16 rows."""
    window, entries, shared = arguments.window, arguments.entries, arguments.shared
    every = jnp.arange(window.rows[0].shape[0], dtype=jnp.int32)
    rows = (gather_rows(window.rows, every, fmt=arguments.fmt),)
    changed: dict[str, Any] = dict(window=window._replace(rows=rows), fmt=BF16_ROW, shared=None)
    if entries is not None and shared is not None:
        changed |= dict(entries=(gather_rows(entries, shared.rows, fmt=arguments.fmt),), entry_ids=shared.ids)
    return dataclasses.replace(arguments, **changed)


IMPLEMENTATION = declare("attend", call, supports, "dsv4_attend", "dsv4_attend_rows")
