"""compress in the project's own CUDA (`csrc/compress_kernel.cuh`): state, pooling and the stored entry in one launch.

V4's geometry: its KV rows and index keys (`widths`), its CSA ratio, and for HCA the online state.
Everything else takes the Pallas kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..ffi import cuda_target
from ..ops.append import Rows
from ..ops.compress import CompressorInputs
from ..ops.dispatch import Implementation
from ..ops.numerics import rope_tables
from ..pallas import compress as pallas
from ..plan import StepPlan
from .append import has_kernel as stores_kv_row
from .columns import float_columns
from .widths import INDEX_ROWS, KV_ROW, WIDTHS, unsupported_rows

__all__ = ["has_kernel"]

ROWS = (KV_ROW, *INDEX_ROWS)  # what the kernels store, in the order of `Format` in csrc


def has_kernel(stream: CompressorInputs) -> bool:
    """Whether the kernels store entries like this stream's."""
    fmt, epilogue = stream.geometry.fmt, stream.epilogue
    if _is_kv(stream):
        return stores_kv_row(fmt, epilogue)
    return unsupported_rows(fmt, *INDEX_ROWS) is None and epilogue.inv_freq.shape[0] == WIDTHS.rope_pairs


def _is_kv(stream: CompressorInputs) -> bool:
    return stream.geometry.fmt.parts == KV_ROW.parts


def _compress_csa(
    streams: Sequence[CompressorInputs], plan: StepPlan, table: jax.Array, implementation: Implementation
) -> list[tuple[jax.Array, Rows]]:
    """As `ops.compress._compress_csa`. Raises `ImplementationError`: the CUDA library is not there."""
    # One stream of each kind at most: what a launch has room for.
    kinds = [_is_kv(stream) for stream in streams]
    fits = all(has_kernel(s) and s.geometry.ratio == WIDTHS.csa_ratio for s in streams)
    if not fits or len(set(kinds)) != len(kinds):
        return pallas._compress_csa(streams, plan, table, implementation)
    return _call("dsv4_compress_csa", streams, plan, table, [], depth=2 * WIDTHS.csa_ratio - 1)


def _compress_hca_online(
    stream: CompressorInputs, plan: StepPlan, table: jax.Array, implementation: Implementation
) -> tuple[jax.Array, Rows]:
    """As `ops.compress._compress_hca_online`. Raises `ImplementationError`: the CUDA library is not there."""
    if not (_is_kv(stream) and has_kernel(stream)):
        return pallas._compress_hca_online(stream, plan, table, implementation)
    (result,) = _call("dsv4_compress_hca", [stream], plan, table, [jnp.asarray(plan.group_tokens)], depth=1)
    return result


def _compress_hca_raw(
    stream: CompressorInputs, plan: StepPlan, table: jax.Array, implementation: Implementation
) -> tuple[jax.Array, Rows]:
    """The Pallas kernel: the raw state is the exception, and has no CUDA kernel."""
    return pallas._compress_hca_raw(stream, plan, table, implementation)


def _call(
    target: str,
    streams: Sequence[CompressorInputs],
    plan: StepPlan,
    table: jax.Array,
    more: list[jax.Array],
    *,
    depth: int,
) -> list[tuple[jax.Array, Rows]]:
    history = bool(plan.history_seqs.shape[0])
    of_plan = (plan.token_slot, plan.token_position, plan.token_seq, plan.seq_start, plan.seq_count, plan.seq_first)
    operands = [*(jnp.asarray(x) for x in of_plan), jnp.asarray(table), *more]
    position = jnp.asarray(plan.token_position)
    results, aliases, numbers, columns = [], {}, [], []
    for stream in streams:
        state, old = stream.state, []
        if history:
            before, state = pallas.state_before(stream, plan, depth)
            old = [before]
        epilogue, geometry = stream.epilogue, stream.geometry
        (kv, kv_start), (score, score_start) = float_columns(stream.kv), float_columns(stream.score)
        bias = [] if stream.ape is None else [stream.ape.astype(jnp.float32)]
        # An entry turns to its first position.
        operands += [
            kv,
            score,
            *bias,
            epilogue.norm.astype(jnp.float32),
            *rope_tables(position - position % geometry.ratio, epilogue.inv_freq.astype(jnp.float32)),
            *old,
        ]
        for leaf in (state, *stream.pool):
            aliases[len(operands)] = len(results)
            operands.append(leaf)
            results.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        number = next(i for i, row in enumerate(ROWS) if row.parts == geometry.fmt.parts)
        numbers += [geometry.ratio, geometry.ordinal, geometry.slots, geometry.ring, geometry.base,
                    geometry.rows_per_block, number, int(epilogue.hadamard), len(bias),
                    geometry.block_units(stream.pool[0].shape[0])]  # fmt: skip
        columns += [kv_start, score_start]
    call = jax.ffi.ffi_call(cuda_target(target), tuple(results), input_output_aliases=aliases)
    eps = np.array([stream.epilogue.eps for stream in streams], np.float32)
    fields, columns = (np.array(x, np.int32) for x in (numbers, columns))
    out = list(call(*operands, fields=fields, columns=columns, eps=eps, history=history))
    return [(out.pop(0), tuple(out.pop(0) for _ in stream.pool)) for stream in streams]
