"""attend on a GPU in Pallas-Triton: fp8 rows decoded in the kernel, one program per token, key split and 64 heads.

The key axis is cut into tiles of 64 keys (the window's tiles, then the entries'), the tiles into
`split_count` runs. Both depend on the static shapes alone, never on the batch, so a token's bits do
not change with its neighbours. Each program keeps an online softmax over its run; the runs are
merged in a fixed order, where the sink enters once.

Rows of e4m3 codes with a ue8m0 scale per 64 and bf16 RoPE dims have a body here, as V4's are in the format "fp8".
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import NOPE_GROUP, Codes, RowFormat, Scales
from ..ops.append import Rows
from ..ops.attend import AttendArguments, finish_output
from ..ops.registry import Implementation
from .tiles import interpreted, pieces, problem, too_large, whole

__all__ = ["IMPLEMENTATION", "call", "merge_splits", "split_count", "supports", "unsupported_rows"]

TILE = 64  # keys of one step of the inner loop
HEADS = 64  # most heads of one program
TILES_PER_SPLIT = 4
SMALLEST_DOT = 16  # least extent of a product in Triton
TOKENS_PER_CALL = 1024  # bounds the float32 partials of a prefill chunk
LOG2E = np.float32(1.4426950408889634)
LN2 = np.float32(0.6931471805599453)


def split_count(window: int, entries: int) -> int:
    """Runs the tiles of `window` + `entries` keys are cut into. A function of shapes only."""
    return max(1, round(_tiles(window, entries) / TILES_PER_SPLIT))


def unsupported_rows(fmt: RowFormat) -> str | None:
    """Why rows of a format are not decoded in the kernel, or None."""
    match fmt.holds:
        case Codes("e4m3", nope), Codes("bf16", rope), Scales("ue8m0", group) if group == NOPE_GROUP:
            if nope % NOPE_GROUP == 0 and rope >= SMALLEST_DOT and rope & (rope - 1) == 0:
                return None
            return (
                f"it decodes e4m3 dims in {NOPE_GROUP}s and a power of two of bf16 dims from {SMALLEST_DOT}, "
                f"not {nope} and {rope}"
            )
    return f"it does not decode rows of {fmt.contents}"


def supports(arguments: AttendArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    return unsupported_rows(arguments.fmt) or too_large(*arguments.window.rows, *(arguments.entries or ()))


def call(arguments: AttendArguments, interpret: bool | None = None) -> tuple[jax.Array, jax.Array]:
    """Computes what `ops.attend.reference` does.

    Queries are rounded to bf16, as are the softmax weights before the second product.

    `interpret` defaults to whether the default backend is the CPU. `key_split` changes nothing: there is one split.
    """
    queries, (window, window_ids, visible) = arguments.queries, arguments.window
    entries, entry_ids, entry_count = arguments.entries, arguments.entry_ids, arguments.entry_count
    if entries is None or entry_ids is None or entry_count is None or entry_ids.shape[1] == 0:
        entries, entry_ids = window, window_ids[:, :1]
        entry_count = jnp.zeros(queries.shape[0], jnp.int32)
        num_entries = 0
    else:
        num_entries = entry_ids.shape[1]
    run = functools.partial(
        _run, arguments.sink, window, entries, scale=float(arguments.scale), num_entries=num_entries,
        interpret=interpreted(interpret),
    )  # fmt: skip
    rows = (queries.astype(jnp.bfloat16), window_ids, visible.astype(jnp.int8), entry_ids, entry_count)
    out, lse = [], []
    for first in range(0, queries.shape[0], TOKENS_PER_CALL):
        part = run(*(x[first : first + TOKENS_PER_CALL] for x in rows))
        out.append(part[0])
        lse.append(part[1])
    return finish_output(jnp.concatenate(out), arguments.inverse_rope, arguments.dtype), jnp.concatenate(lse)


IMPLEMENTATION = Implementation("attend", "pallas", call, supports, problem)


def _run(
    sink: jax.Array,
    window: Rows,
    entries: Rows,
    queries: jax.Array,
    window_ids: jax.Array,
    window_visible: jax.Array,
    entry_ids: jax.Array,
    entry_count: jax.Array,
    *,
    scale: float,
    num_entries: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    tokens, heads, dim = queries.shape
    splits = split_count(window_ids.shape[1], num_entries)
    block = min(HEADS, max(16, pl.next_power_of_2(heads)))
    out_shape = (
        jax.ShapeDtypeStruct((tokens, splits, heads, dim), jnp.float32),
        jax.ShapeDtypeStruct((tokens, splits, heads), jnp.float32),
        jax.ShapeDtypeStruct((tokens, splits, heads), jnp.float32),
    )
    operands = (queries, *window, window_ids, window_visible, *entries, entry_ids, entry_count)
    partial = pl.pallas_call(
        functools.partial(
            _attend_kernel, log2_scale=np.float32(scale) * LOG2E, splits=splits, heads=heads, block=block,
            window=window_ids.shape[1], entries=num_entries,
        ),
        grid=(tokens, splits, -(-heads // block)),
        in_specs=[whole(x) for x in operands],
        out_specs=tuple(whole(x) for x in out_shape),
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=3),
        name="attend",
    )(*operands)  # fmt: skip
    acc, top, total = partial
    return merge_splits(acc, top, total, sink)


def merge_splits(acc: jax.Array, top: jax.Array, total: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One softmax from the runs' own ones, in run order (the sum is written out: its order is part of the result).

    Args:
        acc: [T, S, H, dim] float32, sum of 2^(z - top) K over a run's keys, z in log2 units.
        top, total: [T, S, H] float32, largest z (-inf for an empty run) and sum of 2^(z - top).
        sink: [H] float32, in natural units.

    Returns:
        (out [T, H, dim] float32, lse [T, H] float32) of `ops.attend`.
    """
    highest = top.max(1)
    safe = jnp.where(highest == -jnp.inf, np.float32(0), highest)
    weights = jnp.exp2(top - safe[:, None])
    out, mass = acc[:, 0] * weights[:, 0, :, None], total[:, 0] * weights[:, 0]
    for s in range(1, acc.shape[1]):
        out = out + acc[:, s] * weights[:, s, :, None]
        mass = mass + total[:, s] * weights[:, s]
    norm = mass + jnp.exp2(sink.astype(jnp.float32)[None] * LOG2E - safe)
    seen = highest > -jnp.inf
    out = out * jnp.where(seen, np.float32(1) / norm, np.float32(0))[..., None]
    return out, jnp.where(seen, (jnp.log2(mass) + safe) * LN2, -np.float32(np.inf))


def _attend_kernel(
    queries,  # bf16 [T, H, dim]
    w_nope,  # uint8 [window rows, nope]
    w_rope,  # uint16 [window rows, rope]
    w_scale,  # uint8 [window rows, scales]
    w_ids,  # int32 [T, W]
    w_visible,  # int8 [T, W]
    e_nope,  # uint8 [entry rows, nope]
    e_rope,  # uint16 [entry rows, rope]
    e_scale,  # uint8 [entry rows, scales]
    e_ids,  # int32 [T, K]
    e_count,  # int32 [T]
    acc_out,  # float32 [T, S, H, dim]
    top_out,  # float32 [T, S, H]
    total_out,  # float32 [T, S, H]
    *,
    log2_scale,
    splits,
    heads,
    block,
    window,
    entries,
):
    token, split = pl.program_id(0), pl.program_id(1)
    head = pl.program_id(2) * block + jnp.arange(block, dtype=jnp.int32)
    live = head < heads

    def load_queries(first, width):
        column = first + jnp.arange(width, dtype=jnp.int32)
        index = (jnp.full((block, width), token), *_grid(jnp.where(live, head, 0), column))
        mask = jnp.broadcast_to(live[:, None], (block, width))
        return pltriton.load(queries.at[index], mask=mask, other=jnp.zeros((block, width), jnp.bfloat16))

    nope_dim, rope_dim = w_nope.shape[1], w_rope.shape[1]
    columns = [(g * NOPE_GROUP, n * NOPE_GROUP) for g, n in _groups(nope_dim)] + [(nope_dim, rope_dim)]
    q_tiles = [load_queries(*c) for c in columns]

    def step(rows, visible, parts, carry):
        top, total, *acc = carry
        nope, rope, scale = parts
        keys = _load_keys(nope, rope, scale, rows, visible)
        z = sum(jnp.dot(q, k.T, preferred_element_type=jnp.float32) for q, k in zip(q_tiles, keys, strict=True))
        z = jnp.where(visible[None, :], z * log2_scale, -np.float32(np.inf))
        new = jnp.maximum(top, z.max(1))
        safe = jnp.where(new == -np.float32(np.inf), np.float32(0), new)
        keep = jnp.exp2(top - safe)
        p = jnp.exp2(z - safe[:, None])
        total = total * keep + p.sum(1)
        p = p.astype(jnp.bfloat16)
        acc = [
            a * keep[:, None] + jnp.dot(p, k, preferred_element_type=jnp.float32)
            for a, k in zip(acc, keys, strict=True)
        ]
        return new, total, *acc

    lane = jnp.arange(TILE, dtype=jnp.int32)

    def window_step(tile, carry):
        key = tile * TILE + lane
        inside = key < window
        index = (jnp.full((TILE,), token), jnp.where(inside, key, 0))
        visible = inside & (pltriton.load(w_visible.at[index]) != 0)
        rows = jnp.where(visible, pltriton.load(w_ids.at[index]), 0)
        return step(_nearest(rows, w_nope), visible, (w_nope, w_rope, w_scale), carry)

    window_tiles = -(-window // TILE)
    count = jnp.clip(e_count[token], 0, entries) if entries else 0

    def entry_step(tile, carry):
        key = (tile - window_tiles) * TILE + lane
        visible = key < count
        index = (jnp.full((TILE,), token), jnp.where(visible, key, 0))
        rows = jnp.where(visible, pltriton.load(e_ids.at[index]), 0)
        return step(_nearest(rows, e_nope), visible, (e_nope, e_rope, e_scale), carry)

    tiles = window_tiles + -(-entries // TILE)
    first, last = split * tiles // splits, (split + 1) * tiles // splits
    carry = (
        jnp.full((block,), -np.inf, jnp.float32),
        jnp.zeros((block,), jnp.float32),
        *(jnp.zeros((block, width), jnp.float32) for _, width in columns),
    )
    carry = lax.fori_loop(first, jnp.minimum(last, window_tiles), window_step, carry)
    if entries:
        counted = window_tiles + (count + TILE - 1) // TILE
        carry = lax.fori_loop(jnp.maximum(first, window_tiles), jnp.minimum(last, counted), entry_step, carry)

    top, total, *acc = carry
    index = (jnp.full((block,), token), jnp.full((block,), split), head)
    pltriton.store(top_out.at[index], top, mask=live)
    pltriton.store(total_out.at[index], total, mask=live)
    for (start, width), a in zip(columns, acc, strict=True):
        at = _grid(head, start + jnp.arange(width, dtype=jnp.int32))
        index = (jnp.full((block, width), token), jnp.full((block, width), split), *at)
        pltriton.store(acc_out.at[index], a, mask=jnp.broadcast_to(live[:, None], (block, width)))


def _nearest(rows, part):
    """The rows of a part that are nearest to these ids."""
    return jnp.clip(rows, 0, part.shape[0] - 1)


def _groups(nope: int) -> list[tuple[int, int]]:
    """The scale groups of so many dims as tiles that need no mask: (first group, groups), a power of two."""
    return [(first, groups) for first, _, groups in pieces(nope // NOPE_GROUP)]


def _load_keys(nope, rope, scale, rows, visible):
    """The bf16 tiles of the rows; those of invisible rows are zeros whatever their bytes are."""
    tiles = []
    for group, groups in _groups(nope.shape[1]):
        shape = (TILE, groups, NOPE_GROUP)
        row = jnp.broadcast_to(rows[:, None, None], shape)
        lane = jnp.arange(NOPE_GROUP, dtype=jnp.int32)[None, None, :]
        of_group = group + jnp.arange(groups, dtype=jnp.int32)
        column = jnp.broadcast_to(of_group[None, :, None] * NOPE_GROUP + lane, shape)
        mask = jnp.broadcast_to(visible[:, None, None], shape)
        codes = pltriton.load(nope.at[row, column], mask=mask, other=jnp.zeros(shape, jnp.uint8))
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
        shape = (TILE, groups)
        index = (jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(of_group[None, :], shape))
        mask = jnp.broadcast_to(visible[:, None], shape)
        exponent = pltriton.load(scale.at[index], mask=mask, other=jnp.zeros(shape, jnp.uint8))
        # A ue8m0 code is the exponent field of the bf16 it stands for.
        factor = lax.bitcast_convert_type(exponent.astype(jnp.uint16) << np.uint16(7), jnp.bfloat16)
        tiles.append((values * factor[:, :, None]).reshape(TILE, groups * NOPE_GROUP))
    shape = (TILE, rope.shape[1])
    mask = jnp.broadcast_to(visible[:, None], shape)
    index = _grid(rows, jnp.arange(rope.shape[1], dtype=jnp.int32))
    bits = pltriton.load(rope.at[index], mask=mask, other=jnp.zeros(shape, jnp.uint16))
    return [*tiles, lax.bitcast_convert_type(bits, jnp.bfloat16)]


def _grid(rows, columns):
    """Returns index arrays of the outer product of two 1-D index arrays."""
    shape = (rows.shape[0], columns.shape[0])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def _tiles(window: int, entries: int) -> int:
    return -(-window // TILE) - (-entries // TILE)
