"""compress: the CSA and HCA compressors. Update per-request state, emit finished entries, in place.

Entry s of ratio r covers tokens r*s .. r*s + r - 1 and is emitted when the last of them is fed
(spec 2.4). A pooled row is softmax-weighted per channel, RMS-normalised, rotated to the position
of its block's first token, optionally Hadamard-rotated, quantised and stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import RowFormat
from ..plan import StepPlan
from .append import Rows, append, exists, load, pin, ring_row
from .columns import Values, dense
from .dispatch import Implementation, implementation_for
from .epilogue import Epilogue
from .numerics import exp, rounded, tree_sum

__all__ = ["CompressorGeometry", "CompressorInputs", "compress_csa", "compress_hca", "online_update"]


@dataclasses.dataclass(frozen=True)
class CompressorGeometry:
    """The static geometry of one layer's compressor: sizes of its state ring and its pool.

    Attributes:
        ratio: tokens per entry.
        ordinal: index of the layer among those its leaves hold.
        slots: slots of the state leaf, the null slot included.
        ring: rows per slot of the state leaf.
        base: first row of the layer in the pool leaves.
        rows_per_block: entries per block.
        fmt: row format of the pool.
        blocks: of the layer in the pool leaves, the null block included; None: up to the end of the leaves.
    """

    ratio: int
    ordinal: int
    slots: int
    ring: int
    base: int
    rows_per_block: int
    fmt: RowFormat
    blocks: int | None = None

    def block_units(self, pool_rows: int) -> int:
        """Blocks of the layer in leaves of so many rows: ids are below."""
        return (pool_rows - self.base) // self.rows_per_block if self.blocks is None else self.blocks


@dataclasses.dataclass(frozen=True)
class CompressorInputs:
    """One compressor's operands in a step. Not a pytree: it exists while a step is traced.

    Attributes:
        state: float32 leaf of running state. CSA: [layers * slots * ring, 4e] ring of [kv | score] rows.
            HCA raw: [layers * slots * ring, 2e] the same. HCA online: [layers * slots * banks, 3e] rows
            [max | sum | acc], the state after position p in bank p mod banks.
        pool: entry leaves.
        kv, score: [T, 2e] (CSA) or [T, e] (HCA) float32, arrays or `Columns`.
        epilogue: what turns a pooled row into an entry; positions are those of an entry's first token.
        geometry: sizes of the leaves.
        ape: [ratio, width of score] float32: row p mod ratio is added to the score of a token at position p; None: the
            score has it already.
    """

    state: jax.Array
    pool: Rows
    kv: Values
    score: Values
    epilogue: Epilogue
    geometry: CompressorGeometry
    ape: jax.Array | None = None

    def resolved(self, plan: StepPlan) -> CompressorInputs:
        """This stream with kv and score as arrays and the position bias added."""
        score = dense(self.score)
        if self.ape is not None:
            score = score + self.ape[jnp.asarray(plan.token_position) % np.int32(self.ape.shape[0])]
        return dataclasses.replace(self, kv=dense(self.kv), score=score, ape=None)


def compress_csa(
    streams: Sequence[CompressorInputs], plan: StepPlan, table: jax.Array, *, implementation: Implementation = None
) -> list[tuple[jax.Array, Rows]]:
    """Feeds one layer's CSA compressors: the main one, the indexer's, or both at once (one kernel then).

    Entry s pools 2r rows: the first halves of kv and score of the r tokens before its block and
    the second halves of its own r tokens; rows before position 0 do not exist.

    Args:
        streams: one or more compressors of equal ratio and ring.
        table: [slots, columns] int32 block table.

    Returns:
        (state, pool) of every stream, updated.
    """
    return implementation_for("compress", _compress_csa, implementation)(streams, plan, table, implementation)


def compress_hca(
    stream: CompressorInputs,
    plan: StepPlan,
    table: jax.Array,
    *,
    mode: Literal["online", "raw"] = "online",
    implementation: Implementation = None,
) -> tuple[jax.Array, Rows]:
    """Feeds one layer's HCA compressor: entry s pools its own r rows.

    Args:
        table: [slots, columns] int32 block table.
        mode: what the state is. "online" takes tokens one at a time in position order whatever the
            chunking, so its result differs from "raw" (a two-pass softmax) by float32 rounding.

    Returns:
        (state, pool) updated.
    """
    reference = _compress_hca_online if mode == "online" else _compress_hca_raw
    return implementation_for("compress", reference, implementation)(stream, plan, table, implementation)


def _compress_csa(
    streams: Sequence[CompressorInputs], plan: StepPlan, table: jax.Array, implementation: Implementation
) -> list[tuple[jax.Array, Rows]]:
    return [_compress_csa_one(stream.resolved(plan), plan, table, implementation) for stream in streams]


def _compress_csa_one(
    stream: CompressorInputs, plan: StepPlan, table: jax.Array, implementation: Implementation
) -> tuple[jax.Array, Rows]:
    ratio, width = stream.geometry.ratio, stream.kv.shape[-1] // 2
    rows, real, state = _rows_behind(stream, plan, plan.flush_tokens, 2 * ratio)
    own = jnp.arange(2 * ratio)[None, :, None] >= ratio
    values = jnp.where(own, rows[..., width : 2 * width], rows[..., :width])
    logits = jnp.where(own, rows[..., 3 * width :], rows[..., 2 * width : 3 * width])
    pooled = _softmax_pool(values, logits, real)
    return state, _emit(stream, pooled, plan, plan.flush_tokens, table, implementation)


def _compress_hca_raw(
    stream: CompressorInputs, plan: StepPlan, table: jax.Array, implementation: Implementation
) -> tuple[jax.Array, Rows]:
    stream = stream.resolved(plan)
    width = stream.kv.shape[-1]
    last = _last_of_group(plan)
    rows, real, state = _rows_behind(stream, plan, last, stream.geometry.ratio)
    pooled = _softmax_pool(rows[..., :width], rows[..., width:], real)
    return state, _emit(stream, pooled, plan, last, table, implementation)


def _compress_hca_online(
    stream: CompressorInputs, plan: StepPlan, table: jax.Array, implementation: Implementation
) -> tuple[jax.Array, Rows]:
    stream = stream.resolved(plan)
    state, kv, score, geometry = stream.state, dense(stream.kv), dense(stream.score), stream.geometry
    tokens, width, banks = kv.shape[0], kv.shape[-1], geometry.ring
    groups = plan.group_tokens.shape[0]
    first = jnp.minimum(plan.group_tokens[:, 0], np.int32(tokens - 1))
    live = (plan.group_tokens[:, 0] < tokens) & exists(plan.token_slot[first], geometry.slots)
    slot, start = plan.token_slot[first], plan.token_position[first]

    before = jnp.maximum(start - np.int32(1), 0)
    bank = ring_row(geometry.ordinal, geometry.slots, banks, slot, before)
    (carried,), (state,) = pin(load((state,), bank), (state,))
    fresh = (start % np.int32(geometry.ratio) == 0)[:, None]
    peak = jnp.where(fresh, -np.float32(np.inf), carried[:, :width])
    total = jnp.where(fresh, np.float32(0), carried[:, width : 2 * width])
    acc = jnp.where(fresh, np.float32(0), carried[:, 2 * width :])

    def feed(carry: tuple[jax.Array, ...], members: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        peak, total, acc, saved, step = carry
        token = jnp.minimum(members, np.int32(tokens - 1))
        fed = (members < tokens)[:, None]
        triple = online_update((peak, total, acc), kv[token], score[token])
        peak, total, acc = (jnp.where(fed, new, old) for new, old in zip(triple, (peak, total, acc), strict=True))
        here = ((start + step) % np.int32(banks))[None] == jnp.arange(banks, dtype=jnp.int32)[:, None]
        row = jnp.concatenate([peak, total, acc], -1)
        saved = jnp.where(here[..., None] & fed[None], row[None], saved)
        return (peak, total, acc, saved, step + np.int32(1)), None

    saved = jnp.zeros((banks, groups, 3 * width), jnp.float32)
    init = (peak, total, acc, saved, jnp.int32(0))
    (peak, total, acc, saved, _), _ = lax.scan(feed, init, jnp.asarray(plan.group_tokens).T)

    # Each bank keeps the group's last position that maps to it, if that is one of the row's last `banks`.
    count = (plan.group_tokens < tokens).sum(1, dtype=jnp.int32)
    end = (plan.seq_start + plan.seq_count)[plan.token_seq[first]]
    newest = start + count - np.int32(1)
    back = (newest[None] - jnp.arange(banks, dtype=jnp.int32)[:, None]) % np.int32(banks)
    position = newest[None] - back
    keep = live[None] & (position >= start[None]) & (position >= (end - np.int32(banks))[None])
    row = ring_row(geometry.ordinal, geometry.slots, banks, slot[None], position)
    row = jnp.where(keep, row, np.int32(state.shape[0]))
    state = state.at[row.reshape(-1)].set(saved.reshape(-1, 3 * width), mode="drop")

    pooled = acc / total
    return state, _emit(stream, pooled, plan, _last_of_group(plan), table, implementation)


def online_update(
    triple: tuple[jax.Array, jax.Array, jax.Array], kv: jax.Array, score: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One row into an online softmax pool: (max, sum, acc), each [..., e] (spec 3.2, representation 3)."""
    peak, total, acc = triple
    new_peak = jnp.maximum(peak, score)
    decay, weight = exp(peak - new_peak), exp(score - new_peak)
    return new_peak, rounded(total * decay) + weight, rounded(acc * decay) + rounded(weight * kv)


def _last_of_group(plan: StepPlan) -> jax.Array:
    """The last fed token of every group, [G] (T for an empty group)."""
    tokens = np.int32(plan.num_tokens)
    fed = plan.group_tokens < tokens
    last = jnp.where(fed, plan.group_tokens, np.int32(-1)).max(1)
    return jnp.where(fed.any(1), last, tokens)


def _rows_behind(
    stream: CompressorInputs, plan: StepPlan, tokens: jax.Array, depth: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The [kv | score] rows of the `depth` positions up to each token, from this step or from the ring.

    Returns (rows [N, depth, width], real [N, depth], state): the state with this step's rows written.
    """
    state, geometry = stream.state, stream.geometry
    token = jnp.minimum(tokens, np.int32(plan.num_tokens - 1))
    row = jnp.asarray(plan.token_seq)[token]
    position = plan.token_position[token][:, None] + jnp.arange(1 - depth, 1, dtype=jnp.int32)[None]
    real = position >= 0
    position = jnp.maximum(position, 0)
    ring_ids = ring_row(geometry.ordinal, geometry.slots, geometry.ring, plan.token_slot[token][:, None], position)
    if plan.history_seqs.shape[0] == 0:
        # No row of this step overruns the ring: write first, then read all from there. The order of a
        # read before a write could only be kept by `pin`, which CPU compilers drop, at the price of a copy.
        state = _write_ring(state, stream, plan)
        (rows,) = load((state,), ring_ids)
        return rows, real, state
    (old,), (state,) = pin(load((state,), ring_ids), (state,))
    offset = position - plan.seq_start[row][:, None]
    chunk_ids = jnp.clip(plan.seq_first[row][:, None] + offset, 0, np.int32(plan.num_tokens - 1))
    new = _kv_and_score(stream)[chunk_ids]
    rows = jnp.where((offset >= 0)[..., None], new, old)
    return rows, real, _write_ring(state, stream, plan)


def _softmax_pool(values: jax.Array, logits: jax.Array, real: jax.Array) -> jax.Array:
    """sum_rows softmax_rows(logits) * values, per channel. [N, rows, e] twice, [N, rows] -> [N, e]"""
    real = real[..., None]
    logits = jnp.where(real, logits, -np.float32(np.inf))
    values = jnp.where(real, values, np.float32(0))
    weights = exp(logits - logits.max(1, keepdims=True))
    return (tree_sum(rounded(weights * values), 1) / tree_sum(weights, 1))[:, 0]


def _emit(
    stream: CompressorInputs,
    pooled: jax.Array,
    plan: StepPlan,
    tokens: jax.Array,
    table: jax.Array,
    implementation: Implementation,
) -> Rows:
    """Finishes and stores the entries completed by `tokens`; the others are dropped."""
    pool, geometry = stream.pool, stream.geometry
    token = jnp.minimum(tokens, np.int32(plan.num_tokens - 1))
    slot, position = plan.token_slot[token], plan.token_position[token]
    ratio = np.int32(geometry.ratio)
    completes = (tokens < plan.num_tokens) & exists(slot, geometry.slots) & ((position + 1) % ratio == 0)
    entry = position // ratio
    per_block = np.int32(geometry.rows_per_block)
    column = entry // per_block
    block = jnp.asarray(table)[slot, column]
    row = np.int32(geometry.base) + block * per_block + entry % per_block
    # An entry without a block (0 is null) or beyond the table is a planning error, and is not stored anywhere.
    blocks = geometry.block_units(pool[0].shape[0])
    stored = completes & exists(block, blocks) & (column >= 0) & (column < table.shape[1])
    row = jnp.where(stored, row, np.int32(pool[0].shape[0]))
    return append(
        pool,
        pooled,
        row,
        fmt=geometry.fmt,
        epilogue=stream.epilogue,
        position=entry * ratio,
        implementation=implementation,
    )


def _write_ring(state: jax.Array, stream: CompressorInputs, plan: StepPlan) -> jax.Array:
    """Stores the rows of the last `ring` tokens of every row."""
    geometry = stream.geometry
    last = (plan.seq_start + plan.seq_count)[plan.token_seq] - np.int32(geometry.ring)
    keep = exists(plan.token_slot, geometry.slots) & (plan.token_position >= last)
    row = ring_row(geometry.ordinal, geometry.slots, geometry.ring, plan.token_slot, plan.token_position)
    row = jnp.where(keep, row, np.int32(state.shape[0]))
    return state.at[row].set(_kv_and_score(stream), mode="drop", wrap_negative_indices=False)


def _kv_and_score(stream: CompressorInputs) -> jax.Array:
    return jnp.concatenate([dense(stream.kv), dense(stream.score)], -1)
