"""compress: the CSA and HCA compressors. Update per-request state, emit finished entries, in place.

Entry s of ratio r covers tokens r*s .. r*s + r - 1 and is emitted when the last of them is fed
(docs/model.md, Compressors). A pooled row is softmax-weighted per channel, RMS-normalised, rotated to the position
of its block's first token, optionally Hadamard-rotated, quantised and stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import shown
from ..errors import LayoutError, ShapeError
from ..formats import RowFormat
from ..plan import StepPlan
from .append import AppendArguments, Rows, exists, load, pin, ring_row
from .append import reference as append_reference
from .arguments import Check
from .columns import Values, dense
from .epilogue import Epilogue, check_epilogue
from .numerics import exp, rounded, tree_sum
from .registry import Choice, Implementation, run
from .scatter import set_existing

__all__ = [
    "IMPLEMENTATION",
    "CompressArguments",
    "Compressed",
    "CompressorGeometry",
    "CompressorInputs",
    "Kind",
    "compress_csa",
    "compress_hca",
    "last_of_group",
    "online_update",
    "reference",
    "state_before",
]

Kind = Literal["csa", "online", "raw"]
Compressed = tuple[jax.Array, Rows]  # a compressor's state and pool after a step


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
    """One compressor's operands in a step. A pytree, whose geometry is static.

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
        """Returns the same with kv and score as arrays and the position bias added."""
        score = dense(self.score)
        if self.ape is not None:
            score = score + self.ape[jnp.asarray(plan.token_position) % np.int32(self.ape.shape[0])]
        return dataclasses.replace(self, kv=dense(self.kv), score=score, ape=None)


jax.tree_util.register_dataclass(
    CompressorInputs, data_fields=["state", "pool", "kv", "score", "epilogue", "ape"], meta_fields=["geometry"]
)


@dataclasses.dataclass(frozen=True)
class CompressArguments:
    """What an implementation of `compress_csa` and `compress_hca` is given.

    Attributes:
        kind: "csa"; or what the state of the HCA compressor is, "online" or "raw".
        compressors: one or more of equal ratio and ring for CSA, one for HCA.
        plan: the step.
        table: [slots, columns] int32 block table.
    """

    kind: Kind
    compressors: tuple[CompressorInputs, ...]
    plan: StepPlan
    table: jax.Array

    @property
    def empty(self) -> bool:
        return self.plan.num_tokens == 0


def compress_csa(
    compressors: Sequence[CompressorInputs], plan: StepPlan, table: jax.Array, *, implementation: Choice = None
) -> list[Compressed]:
    """Feeds one layer's CSA compressors: the main one, the indexer's, or both at once (one kernel then).

    Entry s pools 2r rows: the first halves of kv and score of the r tokens before its block and
    the second halves of its own r tokens; rows before position 0 do not exist.

    Args:
        compressors: one or more, of equal ratio and ring.
        table: [slots, columns] int32 block table.

    Returns:
        (state, pool) of every compressor, updated.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    return run("compress", _checked("compress_csa", "csa", compressors, plan, table), implementation)


def compress_hca(
    compressor: CompressorInputs,
    plan: StepPlan,
    table: jax.Array,
    *,
    mode: Literal["online", "raw"] = "online",
    implementation: Choice = None,
) -> Compressed:
    """Feeds one layer's HCA compressor: entry s pools its own r rows.

    Args:
        table: [slots, columns] int32 block table.
        mode: what the state is. "online" takes tokens one at a time in position order whatever the
            chunking, so its result differs from "raw" (a two-pass softmax) by float32 rounding.

    Returns:
        (state, pool) updated. Raises as `compress_csa`.
    """
    (result,) = run("compress", _checked("compress_hca", mode, [compressor], plan, table), implementation)
    return result


def _checked(
    op: str, kind: Kind, compressors: Sequence[CompressorInputs], plan: StepPlan, table: jax.Array
) -> CompressArguments:
    check = Check(op)
    if kind not in get_args(Kind):
        raise LayoutError(f"{op}: unknown state {shown(kind)}, expected 'online' or 'raw'")
    if not compressors:
        raise ShapeError(f"{op}: no compressor was given")
    table = check.array("table", table, "int32", "slots", "columns")
    compressors = [
        _checked_inputs(op, f"compressors[{i}]" if kind == "csa" else "compressor", inputs, kind, plan)
        for i, inputs in enumerate(compressors)
    ]
    geometries = {(compressor.geometry.ratio, compressor.geometry.ring) for compressor in compressors}
    if len(geometries) > 1:
        raise ShapeError(f"{op}: the compressors differ in (ratio, ring): {sorted(geometries)}")
    return CompressArguments(kind, tuple(compressors), plan, table)


def _checked_inputs(op: str, name: str, inputs: CompressorInputs, kind: Kind, plan: StepPlan) -> CompressorInputs:
    check = Check(op, {"T": plan.num_tokens})
    check.given(name, inputs, CompressorInputs)
    geometry, ape = inputs.geometry, inputs.ape
    width = geometry.fmt.dim * (2 if kind == "csa" else 1)
    check_epilogue(check, f"{name}.epilogue", inputs.epilogue, geometry.fmt.dim)
    return dataclasses.replace(
        inputs,
        kv=check.array(f"{name}.kv", inputs.kv, "float32", "T", width),
        score=check.array(f"{name}.score", inputs.score, "float32", "T", width),
        state=check.array(f"{name}.state", inputs.state, "float32", "rows", (3 if kind == "online" else 2) * width),
        pool=check.parts(f"{name}.pool", inputs.pool, geometry.fmt),
        ape=None if ape is None else check.array(f"{name}.ape", ape, "float32", geometry.ratio, width),
    )


def reference(arguments: CompressArguments) -> list[Compressed]:
    """Computes `compress_csa` and `compress_hca` in `jnp`."""
    if arguments.empty:
        return [(compressor.state, compressor.pool) for compressor in arguments.compressors]
    one = {"csa": _compress_csa, "online": _compress_hca_online, "raw": _compress_hca_raw}[arguments.kind]
    plan = arguments.plan
    return [one(compressor.resolved(plan), plan, arguments.table) for compressor in arguments.compressors]


IMPLEMENTATION = Implementation("compress", "xla", reference)


def _compress_csa(inputs: CompressorInputs, plan: StepPlan, table: jax.Array) -> Compressed:
    ratio, width = inputs.geometry.ratio, inputs.kv.shape[-1] // 2
    rows, real, state = _rows_behind(inputs, plan, plan.flush_tokens, 2 * ratio)
    own = jnp.arange(2 * ratio)[None, :, None] >= ratio
    values = jnp.where(own, rows[..., width : 2 * width], rows[..., :width])
    logits = jnp.where(own, rows[..., 3 * width :], rows[..., 2 * width : 3 * width])
    pooled = _softmax_pool(values, logits, real)
    return state, _emit(inputs, pooled, plan, plan.flush_tokens, table)


def _compress_hca_raw(inputs: CompressorInputs, plan: StepPlan, table: jax.Array) -> Compressed:
    width = inputs.kv.shape[-1]
    last = last_of_group(plan)
    rows, real, state = _rows_behind(inputs, plan, last, inputs.geometry.ratio)
    pooled = _softmax_pool(rows[..., :width], rows[..., width:], real)
    return state, _emit(inputs, pooled, plan, last, table)


def _compress_hca_online(inputs: CompressorInputs, plan: StepPlan, table: jax.Array) -> Compressed:
    state, kv, score, geometry = inputs.state, dense(inputs.kv), dense(inputs.score), inputs.geometry
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
    state = set_existing(state, row.reshape(-1), saved.reshape(-1, 3 * width))

    pooled = acc / jnp.where(live[:, None], total, np.float32(1))  # no 0 / 0 of padding, for who looks for NaN
    return state, _emit(inputs, pooled, plan, last_of_group(plan), table)


def online_update(
    triple: tuple[jax.Array, jax.Array, jax.Array], kv: jax.Array, score: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds a row to an online softmax pool: (max, sum, acc), each [..., e] (docs/model.md, State)."""
    peak, total, acc = triple
    new_peak = jnp.maximum(peak, score)
    decay, weight = exp(peak - new_peak), exp(score - new_peak)
    return new_peak, rounded(total * decay) + weight, rounded(acc * decay) + rounded(weight * kv)


def last_of_group(plan: StepPlan) -> jax.Array:
    """Returns the last fed token of every group, [G] (T for an empty group)."""
    tokens = np.int32(plan.num_tokens)
    fed = plan.group_tokens < tokens
    last = jnp.where(fed, plan.group_tokens, np.int32(-1)).max(1)
    return jnp.where(fed.any(1), last, tokens)


def state_before(inputs: CompressorInputs, plan: StepPlan, depth: int) -> tuple[jax.Array, jax.Array]:
    """Returns the state rows of the `depth` positions before each row of the step, [B * depth, width], and the
    state."""
    geometry = inputs.geometry
    start = jnp.asarray(plan.seq_start)[:, None]
    before = jnp.maximum(start - np.int32(depth) + jnp.arange(depth, dtype=jnp.int32)[None], 0)
    slot = jnp.asarray(plan.seq_slot)[:, None]
    ids = ring_row(geometry.ordinal, geometry.slots, geometry.ring, slot, before)
    (old,), (state,) = pin(load((inputs.state,), ids.reshape(-1)), (inputs.state,))
    return old, state


def _rows_behind(
    inputs: CompressorInputs, plan: StepPlan, tokens: jax.Array, depth: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the [kv | score] rows of the `depth` positions up to each token, from this step or from the ring.

    Returns (rows [N, depth, width], real [N, depth], state): the state with this step's rows written.
    """
    state, geometry = inputs.state, inputs.geometry
    token = jnp.minimum(tokens, np.int32(plan.num_tokens - 1))
    row = jnp.asarray(plan.token_seq)[token]
    position = plan.token_position[token][:, None] + jnp.arange(1 - depth, 1, dtype=jnp.int32)[None]
    real = position >= 0
    position = jnp.maximum(position, 0)
    ring_ids = ring_row(geometry.ordinal, geometry.slots, geometry.ring, plan.token_slot[token][:, None], position)
    if plan.history_seqs.shape[0] == 0:
        # No row of this step overruns the ring: write first, then read all from there. The order of a
        # read before a write could only be kept by `pin`, which CPU compilers drop, at the price of a copy.
        state = _write_ring(state, inputs, plan)
        (rows,) = load((state,), ring_ids)
        return rows, real, state
    (old,), (state,) = pin(load((state,), ring_ids), (state,))
    offset = position - plan.seq_start[row][:, None]
    chunk_ids = jnp.clip(plan.seq_first[row][:, None] + offset, 0, np.int32(plan.num_tokens - 1))
    new = _kv_and_score(inputs)[chunk_ids]
    rows = jnp.where((offset >= 0)[..., None], new, old)
    return rows, real, _write_ring(state, inputs, plan)


def _softmax_pool(values: jax.Array, logits: jax.Array, real: jax.Array) -> jax.Array:
    """sum_rows softmax_rows(logits) * values, per channel. [N, rows, e] twice, [N, rows] -> [N, e]"""
    real = real[..., None]
    logits = jnp.where(real, logits, -np.float32(np.inf))
    values = jnp.where(real, values, np.float32(0))
    weights = exp(logits - logits.max(1, keepdims=True))
    return (tree_sum(rounded(weights * values), 1) / tree_sum(weights, 1))[:, 0]


def _emit(
    inputs: CompressorInputs,
    pooled: jax.Array,
    plan: StepPlan,
    tokens: jax.Array,
    table: jax.Array,
) -> Rows:
    """Finishes and stores the entries completed by `tokens`; the others are dropped."""
    pool, geometry = inputs.pool, inputs.geometry
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
    rows = AppendArguments(pooled, geometry.fmt, inputs.epilogue, entry * ratio, pool, row)
    return append_reference(rows)


def _write_ring(state: jax.Array, inputs: CompressorInputs, plan: StepPlan) -> jax.Array:
    """Stores the rows of the last `ring` tokens of every row."""
    geometry = inputs.geometry
    last = (plan.seq_start + plan.seq_count)[plan.token_seq] - np.int32(geometry.ring)
    keep = exists(plan.token_slot, geometry.slots) & (plan.token_position >= last)
    row = ring_row(geometry.ordinal, geometry.slots, geometry.ring, plan.token_slot, plan.token_position)
    row = jnp.where(keep, row, np.int32(state.shape[0]))
    return set_existing(state, row, _kv_and_score(inputs))


def _kv_and_score(inputs: CompressorInputs) -> jax.Array:
    return jnp.concatenate([dense(inputs.kv), dense(inputs.score)], -1)
