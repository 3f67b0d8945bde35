"""compress on a GPU in Pallas-Triton: state update, pooling, epilogue, quantisation and store in one launch.

No program may read a state row that another one of the same launch writes. With no `history_seqs`
in the plan the rings are long enough for that: a step's rows come from the operands, older ones
from ring rows that the step does not overwrite. With them, XLA first copies the few old rows that
a step can need (`history`), and the kernel reads those instead.

Whatever a plan or a table holds, nothing outside of the operands is touched: slots and blocks are compared with their
number before they are used, places of tokens, rows and history cut to those that exist.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..ops.append import exists, ring_row
from ..ops.compress import CompressArguments, Compressed, CompressorGeometry, last_of_group, state_before
from ..ops.registry import Implementation
from .emit import Arithmetic, EpilogueRefs, RowTile, emit, epilogue_operands, unsupported_rows
from .tiles import interpreted, problem, too_large, whole

__all__ = ["IMPLEMENTATION", "call", "supports"]

IN_REGISTERS = 16  # most rows of an entry that are pooled from registers, not read twice
WARPS = 4  # of decode and prefill alike: a row's sums, and so its bits, depend on it
AHEAD = 4  # tokens that the online softmax loads while it works on as many

Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]


class _Plan(NamedTuple):
    """What the kernels read of a plan, as arrays outside of them and as refs inside."""

    work: Any  # [F] tokens that may complete an entry, or [G, J] tokens of each HCA entry; padded with T
    token_slot: Any  # [T]
    token_position: Any
    token_seq: Any
    seq_start: Any  # [B]
    seq_count: Any
    seq_first: Any
    table: Any  # [slots, columns]


@dataclasses.dataclass(frozen=True)
class _Static:
    """The static side of a compressor in a kernel."""

    geometry: CompressorGeometry
    eps: float
    hadamard: bool


class _Refs(NamedTuple):
    """The array side of a compressor in a kernel."""

    kv: Any  # float32 [T, width]
    score: Any
    norm: Any
    inv_freq: Any
    history: Any  # float32 old state rows, or None
    state: Any  # aliased in and out
    pool: Any


def supports(arguments: CompressArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    if arguments.kind != "online":
        ratio = arguments.compressors[0].geometry.ratio
        depth = 2 * ratio if arguments.kind == "csa" else ratio
        if depth > IN_REGISTERS and depth & (depth - 1):
            return f"it pools up to {IN_REGISTERS} rows, or a power of two, not {depth}"
    for inputs in arguments.compressors:
        if reason := unsupported_rows(inputs.geometry.fmt):
            return reason
    return too_large(*(part for inputs in arguments.compressors for part in (inputs.state, *inputs.pool)))


def call(arguments: CompressArguments, interpret: bool | None = None) -> list[Compressed]:
    """Computes what `ops.compress.reference` does. `interpret` defaults to whether the default backend is the CPU."""
    plan, interpret = arguments.plan, interpreted(interpret)
    if arguments.kind == "csa":
        return _pool_rows(arguments, plan.flush_tokens, overlap=True, interpret=interpret)
    if arguments.kind == "raw":
        return _pool_rows(arguments, last_of_group(plan), overlap=False, interpret=interpret)
    # A program per entry of a sequence, its tokens in a loop.
    work, body = plan.group_tokens, functools.partial(_online_kernel, interpret=interpret)
    return _launch(body, arguments, work, depth=1, programs=work.shape[0], interpret=interpret)


IMPLEMENTATION = Implementation("compress", "pallas", call, supports, problem)


def _pool_rows(arguments: CompressArguments, tokens: jax.Array, *, overlap: bool, interpret: bool) -> list[Compressed]:
    """Raw rings: program i stores ring row i of the step and pools the entry that token i of `tokens` completes."""
    plan, geometry = arguments.plan, arguments.compressors[0].geometry
    if tokens.shape[0] == 0:
        tokens = jnp.full(1, plan.num_tokens, jnp.int32)
    # One ring row for each token, or for each of the last `ring` of a row, whichever are fewer.
    by_token = plan.num_tokens <= plan.num_seqs * geometry.ring
    writes = plan.num_tokens if by_token else plan.num_seqs * geometry.ring
    depth = geometry.ratio * (2 if overlap else 1)
    body = functools.partial(
        _ring_kernel, depth=depth, overlap=overlap, by_token=by_token, writes=writes, interpret=interpret
    )
    programs = max(writes, tokens.shape[0])
    return _launch(body, arguments, tokens, depth=depth - 1, programs=programs, interpret=interpret)


def _launch(
    body, arguments: CompressArguments, work: jax.Array, *, depth: int, programs: int, interpret: bool
) -> list[Compressed]:
    """Runs `body` for (program, compressor) with the plan's and each compressor's refs."""
    plan, table = arguments.plan, arguments.table
    fields = _Plan(work, plan.token_slot, plan.token_position, plan.token_seq, plan.seq_start, plan.seq_count,
                   plan.seq_first, table)  # fmt: skip
    operands: list[Any] = [jnp.asarray(x) for x in fields]
    out_shape, aliases, statics = [], {}, []
    compressors = [inputs.resolved(plan) for inputs in arguments.compressors]
    for inputs in compressors:
        state, history = inputs.state, []
        if plan.history_seqs.shape[0]:
            old, state = state_before(inputs, plan, depth)
            history = [old]
        norm, inv_freq = epilogue_operands(inputs.epilogue)
        operands += [inputs.kv, inputs.score, norm, inv_freq, *history]
        for x in (state, *inputs.pool):
            aliases[len(operands)] = len(out_shape)
            operands.append(x)
            out_shape.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
        statics.append(_Static(inputs.geometry, float(inputs.epilogue.eps), inputs.epilogue.hadamard))
    out = pl.pallas_call(
        functools.partial(_split_refs, body, statics=tuple(statics), history=bool(plan.history_seqs.shape[0])),
        grid=(programs, len(compressors)),
        in_specs=[whole(x) for x in operands],
        out_specs=tuple(whole(x) for x in out_shape),
        out_shape=tuple(out_shape),
        input_output_aliases=aliases,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="compress",
    )(*operands)
    results, out = [], list(out)
    for inputs in compressors:
        state, pool = out.pop(0), tuple(out.pop(0) for _ in inputs.pool)
        results.append((state, pool))
    return results


def _split_refs(body, *refs, statics: tuple[_Static, ...], history: bool):
    """The kernel: sorts its flat refs and runs `body` for its program and compressor."""
    program, which = pl.program_id(0), pl.program_id(1)  # the interpreter knows them only out here
    refs = list(refs)
    plan = _Plan(*(refs.pop(0) for _ in _Plan._fields))
    given, counts = [], [1 + len(s.geometry.fmt.parts) for s in statics]
    for count in counts:
        given.append([refs.pop(0) for _ in range(5 if history else 4)])
        del refs[:count]  # the aliased inputs: only the outputs are touched
    for k, (static, operands, count) in enumerate(zip(statics, given, counts, strict=True)):
        state, *pool = (refs.pop(0) for _ in range(count))
        kv, score, norm, inv_freq, *old = operands
        inputs = _Refs(kv, score, norm, inv_freq, old[0] if old else None, state, pool)
        pl.when(which == k)(functools.partial(body, program, plan, inputs, static))


def _ring_kernel(
    program, plan: _Plan, inputs: _Refs, static: _Static, *, depth: int, overlap: bool, by_token: bool, writes: int,
    interpret: bool,
) -> None:  # fmt: skip
    pl.when(program < writes)(lambda: _write_ring(program, plan, inputs, static.geometry, by_token))
    token = plan.work[jnp.minimum(program, plan.work.shape[0] - 1)]
    fed = (program < plan.work.shape[0]) & (token >= 0) & (token < plan.token_slot.shape[0])
    token = jnp.where(fed, token, 0)
    slot, position = plan.token_slot[token], plan.token_position[token]

    @pl.when(fed & exists(slot, static.geometry.slots) & ((position + 1) % static.geometry.ratio == 0))
    def _():
        math = Arithmetic(interpret)
        read = _row_reader(plan, inputs, static.geometry, token, depth=depth, overlap=overlap)
        emit_entry = _entry(plan, inputs, static, slot, position, math)
        emit_entry(RowTile(static.geometry.fmt.dim).padded_with_zeros(_softmax_pool(read, depth, math)))


def _write_ring(program, plan: _Plan, inputs: _Refs, geometry: CompressorGeometry, by_token: bool) -> None:
    """Stores the [kv | score] row of one token, if it is among the last `ring` of its row."""
    if by_token:
        token, fed = program, True
    else:
        row, back = program // geometry.ring, program % geometry.ring
        fed = back < plan.seq_count[row]
        token = _nearest(jnp.where(fed, plan.seq_first[row] + plan.seq_count[row] - 1 - back, 0), plan.token_slot)
    slot, position, row = _token(plan, token)
    last = plan.seq_start[row] + plan.seq_count[row] - geometry.ring

    @pl.when(fed & exists(slot, geometry.slots) & (position >= last))
    def _():
        tile = RowTile(inputs.kv.shape[1])
        ring = ring_row(geometry.ordinal, geometry.slots, geometry.ring, slot, position)
        tile.store(inputs.state, ring, tile.load(inputs.kv, token))
        tile.store(inputs.state, ring, tile.load(inputs.score, token), tile.dim)


def _row_reader(
    plan: _Plan, inputs: _Refs, geometry: CompressorGeometry, token, *, depth: int, overlap: bool
) -> Callable[[Any], Pair]:
    """A function of j that reads row j of the `depth` rows up to `token`: (value, logit) tiles.

    A row before position 0 has value 0 and logit -inf.
    """
    slot, position, row = _token(plan, token)
    start, first = plan.seq_start[row], plan.seq_first[row]
    width = inputs.kv.shape[1]
    tile = RowTile(geometry.fmt.dim)

    def read(j) -> Pair:
        half = tile.dim if overlap and j >= depth // 2 else 0
        at = position - np.int32(depth - 1) + j
        new, real = at >= start, at >= 0
        here = _nearest(jnp.where(new, first + at - start, 0), inputs.kv)
        if inputs.history is None:
            ring = ring_row(geometry.ordinal, geometry.slots, geometry.ring, slot, jnp.maximum(at, 0))
            old, there = inputs.state, ring
        else:
            there = (row + 1) * np.int32(depth - 1) + jnp.where(new, -1, at - start)
            old, there = inputs.history, _nearest(there, inputs.history)
        before = real & ~new
        # Of the two loads at most one happens; neither needs registers of its own.
        value = tile.load(inputs.kv, here, half, new)
        logit = tile.load(inputs.score, here, half, new, jnp.full(tile.shape, -np.inf, jnp.float32))
        return tile.load(old, there, half, before, value), tile.load(old, there, width + half, before, logit)

    return read


def _softmax_pool(read: Callable[[Any], Pair], depth: int, math: Arithmetic) -> jax.Array:
    """As `ops.compress._softmax_pool`: the sums follow its tree, in which rows j and j + size / 2 meet first."""
    size = pl.next_power_of_2(depth)
    if depth <= IN_REGISTERS:
        rows = [read(j) for j in range(depth)]
        read = rows.__getitem__
        peak = functools.reduce(jnp.maximum, (logit for _, logit in rows))
    else:
        lowest = jnp.full_like(read(0)[1], -np.inf)
        peak = lax.fori_loop(0, depth, lambda j, peak: jnp.maximum(peak, read(j)[1]), lowest)

    def sums(stride: int, offset) -> Pair:
        """Returns (sum of weight * value, sum of weights) over rows offset, offset + stride, ..."""
        if stride == size:
            value, logit = read(offset)
            weight = math.exp(logit - peak)
            return math.product(weight, value), weight
        if depth > IN_REGISTERS and stride * IN_REGISTERS <= size:

            def add(k, pair: Pair) -> Pair:
                return _add(pair, sums(2 * stride, offset + k * np.int32(stride)))

            return lax.fori_loop(0, 2, add, (jnp.zeros_like(peak), jnp.zeros_like(peak)))
        if depth <= IN_REGISTERS and offset + stride >= depth:
            return sums(2 * stride, offset)  # the other half is padding
        return _add(sums(2 * stride, offset), sums(2 * stride, offset + stride))

    weighted, total = sums(1, 0)
    return weighted / total


def _add(a: Pair, b: Pair) -> Pair:
    return a[0] + b[0], a[1] + b[1]


def _online_kernel(group, plan: _Plan, inputs: _Refs, static: _Static, *, interpret: bool) -> None:
    geometry, math = static.geometry, Arithmetic(interpret)
    tokens, length = plan.token_slot.shape[0], plan.work.shape[1]
    lane = jnp.arange(pl.next_power_of_2(length), dtype=jnp.int32)
    members = pltriton.load(
        plan.work.at[jnp.full(lane.shape, group), lane], mask=lane < length, other=jnp.full(lane.shape, tokens)
    )
    count = (members < tokens).astype(jnp.int32).sum(dtype=jnp.int32)
    first = plan.work[group, 0]
    slot, start, row = _token(plan, jnp.clip(first, 0, tokens - 1))

    @pl.when((first >= 0) & (first < tokens) & exists(slot, geometry.slots))
    def _():
        tile = RowTile(geometry.fmt.dim)
        bank = functools.partial(ring_row, geometry.ordinal, geometry.slots, geometry.ring, slot)
        fresh = start % geometry.ratio == 0
        triple = _carried(inputs, tile, fresh, row, bank(jnp.maximum(start - 1, 0)))
        if not interpret:
            pltriton.debug_barrier()  # a layout of one bank reads and writes the same row here

        def feed(step) -> Pair:
            at = jnp.minimum(first + step, tokens - 1)  # neither is negative
            return tile.load(inputs.kv, at), tile.load(inputs.score, at)

        def feed_ahead(step) -> tuple[Pair, ...]:
            return tuple(feed(step + k) for k in range(AHEAD))

        def run(i, carry: tuple[Triple, tuple[Pair, ...]]) -> tuple[Triple, tuple[Pair, ...]]:
            triple, rows = carry
            ahead = feed_ahead((i + 1) * AHEAD)
            for kv, score in rows:
                triple = _online_update(triple, kv, score, math)
            return triple, ahead

        def run_and_save(step, triple: Triple) -> Triple:
            triple = _online_update(triple, *feed(step), math)

            @pl.when(step >= unsaved)
            def _():
                for part, values in enumerate(triple):
                    tile.store(inputs.state, bank(start + step), values, part * tile.dim)

            return triple

        # The last `banks` states of a row are saved.
        end = plan.seq_start[row] + plan.seq_count[row]
        unsaved = jnp.clip(end - geometry.ring - start, 0, count)
        step = jnp.int32(0)
        if length > AHEAD:
            triple, _ = lax.fori_loop(0, unsaved // AHEAD, run, (triple, feed_ahead(0)))
            step = unsaved // AHEAD * AHEAD
        _, total, acc = triple = lax.fori_loop(step, count, run_and_save, triple)

        @pl.when((start + count) % geometry.ratio == 0)
        def _():
            _entry(plan, inputs, static, slot, start + count - 1, math)(acc / total)


def _token(plan: _Plan, token) -> tuple[Any, Any, Any]:
    """Slot, position and row of a token; the nearest row, if there is none such."""
    return plan.token_slot[token], plan.token_position[token], _nearest(plan.token_seq[token], plan.seq_start)


def _nearest(place, ref):
    """The place along the first axis of a ref that is nearest to this one."""
    return jnp.clip(place, 0, ref.shape[0] - 1)


def _carried(inputs: _Refs, tile: RowTile, fresh, row, bank) -> Triple:
    """Returns the state before a group: empty if it opens an entry."""
    ref, at = (inputs.state, bank) if inputs.history is None else (inputs.history, row)
    peak, total, acc = (tile.load(ref, at, part * tile.dim, ~fresh) for part in range(3))
    return jnp.where(fresh, -np.float32(np.inf), peak), total, acc


def _online_update(triple: Triple, kv: jax.Array, score: jax.Array, math: Arithmetic) -> Triple:
    """Computes what `ops.compress.online_update` does: of its two exponentials one is always exp(0) = 1."""
    peak, total, acc = triple
    smaller = math.exp(-jnp.abs(peak - score))
    rises = score > peak
    one = np.float32(1)
    decay, weight = jnp.where(rises, smaller, one), jnp.where(rises, one, smaller)
    total = math.product(total, decay) + weight
    return jnp.maximum(peak, score), total, math.product(acc, decay) + math.product(weight, kv)


def _entry(
    plan: _Plan, inputs: _Refs, static: _Static, slot, position, math: Arithmetic
) -> Callable[[jax.Array], None]:
    """A function that finishes and stores the entry that the token at `position` completes, if it has a block.

    Everything it needs but the pooled row is loaded here.
    """
    geometry = static.geometry
    entry, per_block = position // geometry.ratio, geometry.rows_per_block
    pool_rows, column = inputs.pool[0].shape[0], entry // per_block
    block = plan.table[_nearest(slot, plan.table), jnp.clip(column, 0, plan.table.shape[1] - 1)]
    stored = exists(block, geometry.block_units(pool_rows)) & (column >= 0) & (column < plan.table.shape[1])
    row = jnp.where(stored, geometry.base + block * per_block + entry % per_block, pool_rows)
    epilogue = EpilogueRefs(inputs.norm, inputs.inv_freq, static.eps, static.hadamard)
    loaded = epilogue.load(RowTile(geometry.fmt.dim))
    return lambda pooled: emit(pooled, geometry.fmt, loaded, entry * geometry.ratio, inputs.pool, row, math)
