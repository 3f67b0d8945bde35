"""top-k on a GPU in Pallas-Triton: every chunk of a row keeps its k best, chunks of survivors again, until k are left.

Scores become uint32 keys of the same order; 0 is what does not exist. A program holds one chunk in
registers, finds the k-th highest key bit by bit by counting, and compacts the winners with a prefix
sum. Chunks and survivors stay in index order, so ties go to the lowest index. At last each winner's
rank is the number of winners before it. Exact whatever the values are; nothing depends on the batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..ops.registry import Implementation
from ..ops.top_k import TopKArguments
from .tiles import interpreted, outer, problem, read, too_large, whole

__all__ = ["IMPLEMENTATION", "call", "supports"]

LARGEST_K = 1024
CHUNK = 4096  # scores of one program
MERGED = 8  # chunks whose survivors one program merges
PER_WARP = 512  # elements a warp holds, 16 registers of each thread
RANKED = 16  # winners ranked by one program
RIVALS = 256  # winners compared with at once
_NEGATIVE_INFINITY = np.uint32(0x007FFFFF)  # its key


def supports(arguments: TopKArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    if arguments.k > LARGEST_K:
        return f"it keeps at most {LARGEST_K} entries, not {arguments.k}"
    return too_large(arguments.scores)


def call(arguments: TopKArguments, interpret: bool | None = None) -> tuple[jax.Array, jax.Array]:
    """Computes what `ops.top_k.reference` does, bit for bit.

    `interpret` defaults to whether the default backend is the CPU.
    """
    scores, count, k = arguments.scores, arguments.count, arguments.k
    interpret = interpreted(interpret)
    keys, ids = _survivors(_first_kernel, (scores, count), scores.shape[1], CHUNK, k, interpret)
    merge = MERGED * pl.next_power_of_2(k)
    while keys.shape[1] > k:
        keys, ids = _survivors(_merge_kernel, (keys, ids), keys.shape[1], merge, k, interpret)
    out_shape = jax.ShapeDtypeStruct(keys.shape, jnp.int32)
    indices = pl.pallas_call(
        _rank_kernel,
        grid=(keys.shape[0], -(-k // RANKED)),
        in_specs=[whole(keys), whole(ids)],
        out_specs=whole(out_shape),
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="top_k_rank",
    )(keys, ids)
    return indices, jnp.clip(count, 0, np.int32(k))


IMPLEMENTATION = Implementation("top_k", "pallas", call, supports, problem)


def _survivors(kernel, operands, width: int, chunk: int, k: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Keys and indices [T, chunks * k] of the k best of every chunk of the rows."""
    chunk = min(chunk, pl.next_power_of_2(width))
    tokens, chunks = operands[0].shape[0], -(-width // chunk)
    shape = (tokens, chunks * k)
    out_shape = (jax.ShapeDtypeStruct(shape, jnp.uint32), jax.ShapeDtypeStruct(shape, jnp.int32))
    return pl.pallas_call(
        functools.partial(kernel, chunk=chunk, k=k),
        grid=(tokens, chunks),
        in_specs=[whole(x) for x in operands],
        out_specs=tuple(whole(x) for x in out_shape),
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=min(32, max(4, chunk // PER_WARP)), num_stages=1),
        name="top_k" + kernel.__name__.removesuffix("_kernel"),
    )(*operands)


def _first_kernel(scores, count, keys_out, ids_out, *, chunk, k):
    token, part = pl.program_id(0), pl.program_id(1)
    exist = jnp.minimum(count[token], scores.shape[1])

    @pl.when(part * chunk < exist)
    def _():
        index = part * chunk + jnp.arange(chunk, dtype=jnp.int32)
        score = read(scores, (jnp.full((chunk,), token), index), index < exist)
        _keep(jnp.where(index < exist, _ordered(score), np.uint32(0)), index, keys_out, ids_out, token, part, k)

    @pl.when(part * chunk >= exist)
    def _():
        lane = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)
        at = (jnp.full(lane.shape, token), jnp.where(lane < k, part * k + lane, keys_out.shape[1]))
        pltriton.store(keys_out.at[at], jnp.zeros(lane.shape, jnp.uint32), mask=lane < k)
        pltriton.store(ids_out.at[at], jnp.zeros(lane.shape, jnp.int32), mask=lane < k)


def _merge_kernel(keys, ids, keys_out, ids_out, *, chunk, k):
    token, part = pl.program_id(0), pl.program_id(1)
    lane = part * chunk + jnp.arange(chunk, dtype=jnp.int32)
    at, exists = (jnp.full((chunk,), token), lane), lane < keys.shape[1]
    _keep(read(keys, at, exists), read(ids, at, exists), keys_out, ids_out, token, part, k)


def _ordered(score):
    """Keys in the order of float32 scores: NaN as -inf, -0 as 0, none of them 0."""
    bits = lax.bitcast_convert_type(jnp.where(score == 0, np.float32(0), score), jnp.uint32)
    key = jnp.where(bits >> np.uint32(31) != 0, ~bits, bits | np.uint32(1 << 31))
    return jnp.where(jnp.isnan(score), _NEGATIVE_INFINITY, key)


def _keep(key, index, keys_out, ids_out, token, part, k: int):
    """Stores the k best of a program's keys, in their order, as the survivors of part `part`."""
    threshold = _kth(key, k)
    above, equal = key > threshold, key == threshold
    # Both counts fit 16 bits: one prefix sum serves both.
    packed = above.astype(jnp.uint32) | equal.astype(jnp.uint32) << np.uint32(16)
    before = lax.cumsum(packed) - packed
    above_before = (before & np.uint32(0xFFFF)).astype(jnp.int32)
    equal_before = (before >> np.uint32(16)).astype(jnp.int32)
    wanted = k - above.astype(jnp.int32).sum()
    kept = above | (equal & (equal_before < wanted))
    place = above_before + jnp.minimum(equal_before, wanted)
    at = (jnp.full(key.shape, token), jnp.where(kept, part * k + place, keys_out.shape[1]))
    pltriton.store(keys_out.at[at], key, mask=kept)
    pltriton.store(ids_out.at[at], index, mask=kept)


def _kth(key, k: int):
    """A threshold that at least k keys reach and at most k exceed."""

    def unsettled(state):
        bit, _, found = state
        return (bit >= 0) & (found != k)

    def settle(state):
        bit, threshold, _ = state
        candidate = threshold | np.uint32(1) << bit.astype(jnp.uint32)
        found = (key >= candidate).astype(jnp.int32).sum()
        return bit - 1, jnp.where(found >= k, candidate, threshold), found

    return lax.while_loop(unsettled, settle, (jnp.int32(31), jnp.uint32(0), jnp.int32(-1)))[1]


def _rank_kernel(keys, ids, out):
    token, k = pl.program_id(0), keys.shape[1]
    mine = pl.program_id(1) * RANKED + jnp.arange(RANKED, dtype=jnp.int32)
    at = (jnp.full((RANKED,), token), mine)
    key = read(keys, at, mine < k)

    before = jnp.zeros((RANKED, RIVALS), jnp.int32)
    for first in range(0, k, RIVALS):
        rival = first + jnp.arange(RIVALS, dtype=jnp.int32)
        # Beyond k the keys are 0 and the places high: they come before nobody.
        other = read(keys, (jnp.full((RIVALS,), token), rival), rival < k)
        m, r = outer(mine, rival)
        wins = (other[None, :] > key[:, None]) | ((other[None, :] == key[:, None]) & (r < m))
        before += wins.astype(jnp.int32)
    rank = before.sum(1)
    index = jnp.where(key == 0, 0, read(ids, at, mine < k))
    place = jnp.where(mine < k, rank, k)
    pltriton.store(out.at[jnp.full((RANKED,), token), place], index, mask=mine < k)
