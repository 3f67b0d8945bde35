"""compress in the project's own CUDA (`csrc/rows/compress_kernel.cuh`).

State, pooling and the stored entry are one launch. Takes V4's geometry: its KV rows and index keys (`widths`), its CSA
ratio, and for HCA the online state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.compress import CompressArguments, Compressed, CompressorInputs, state_before
from ..ops.numerics import rope_tables
from .append import stores as stores_kv_row
from .calls import declare, float_columns, launch
from .widths import INDEX_ROWS, KV_ROW, WIDTHS, unsupported_pairs, unsupported_rows

__all__ = ["IMPLEMENTATION", "call", "stores", "supports"]

ROWS = (KV_ROW, *INDEX_ROWS)  # what the kernels store, in the order of `Format` in csrc


def stores(inputs: CompressorInputs) -> str | None:
    """Why the kernels cannot store entries like this compressor's, None if they can."""
    fmt = inputs.geometry.fmt
    if _is_kv(inputs):
        return stores_kv_row(fmt, inputs.epilogue)
    return unsupported_rows(fmt, *ROWS) or unsupported_pairs(inputs.epilogue.inv_freq)


def _is_kv(inputs: CompressorInputs) -> bool:
    return inputs.geometry.fmt.parts == KV_ROW.parts


def supports(arguments: CompressArguments) -> str | None:
    """Says why the kernels cannot take these arguments; None if they can."""
    if arguments.kind == "raw":
        return "it has no raw HCA state"
    for inputs in arguments.compressors:
        if reason := stores(inputs):
            return reason
    kinds = [_is_kv(inputs) for inputs in arguments.compressors]
    if arguments.kind == "online":
        return None if all(kinds) else "its HCA entries are KV rows"
    if (ratio := arguments.compressors[0].geometry.ratio) != WIDTHS.csa_ratio:
        return f"it takes CSA of ratio {WIDTHS.csa_ratio}, not {ratio}"
    # What a launch has room for.
    return "it takes one compressor of KV rows and one of index keys" if len(set(kinds)) != len(kinds) else None


def call(arguments: CompressArguments) -> list[Compressed]:
    """Computes what `ops.compress.reference` does. Raises `ImplementationError`: the CUDA library is not there."""
    plan, compressors = arguments.plan, arguments.compressors
    if arguments.kind == "csa":
        target, more, depth = "dsv4_compress_csa", [], 2 * WIDTHS.csa_ratio - 1
    else:
        target, more, depth = "dsv4_compress_hca", [jnp.asarray(plan.group_tokens)], 1
    history = bool(plan.history_seqs.shape[0])
    of_plan = (plan.token_slot, plan.token_position, plan.token_seq, plan.seq_start, plan.seq_count, plan.seq_first)
    operands = [*(jnp.asarray(x) for x in of_plan), jnp.asarray(arguments.table), *more]
    position = jnp.asarray(plan.token_position)
    names = ["main" if _is_kv(inputs) else "index" for inputs in compressors]
    results, aliases, attributes, made = [], {}, {}, {}
    # The kernel reads the operands of the main compressor first.
    for name, inputs in sorted(zip(names, compressors, strict=True), key=lambda named: named[0] != "main"):
        state, old = inputs.state, []
        if history:
            before, state = state_before(inputs, plan, depth)
            old = [before]
        epilogue, geometry = inputs.epilogue, inputs.geometry
        (kv, kv_start), (score, score_start) = float_columns(inputs.kv), float_columns(inputs.score)
        bias = [] if inputs.ape is None else [inputs.ape.astype(jnp.float32)]
        # An entry turns to its first position.
        operands += [
            kv,
            score,
            *bias,
            epilogue.norm.astype(jnp.float32),
            *rope_tables(position - position % geometry.ratio, epilogue.inv_freq.astype(jnp.float32)),
            *old,
        ]
        made[name] = range(len(results), len(results) + 1 + len(inputs.pool))
        for leaf in (state, *inputs.pool):
            aliases[len(operands)] = len(results)
            operands.append(leaf)
            results.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        number = next(i for i, row in enumerate(ROWS) if row.parts == geometry.fmt.parts)
        attributes[name] = dict(
            ratio=geometry.ratio,
            ordinal=geometry.ordinal,
            slots=geometry.slots,
            ring=geometry.ring,
            base=geometry.base,
            rows_per_block=geometry.rows_per_block,
            blocks=geometry.block_units(inputs.pool[0].shape[0]),
            format=number,
            kv_column=kv_start,
            score_column=score_start,
            hadamard=bool(epilogue.hadamard),
            bias=bool(bias),
            eps=float(epilogue.eps),
        )
    out = launch("compress", target, tuple(results), *operands, aliases=aliases, **attributes, history=history)
    leaves = [[out[i] for i in made[name]] for name in names]
    return [(state, tuple(pool)) for state, *pool in leaves]


IMPLEMENTATION = declare("compress", call, supports, "dsv4_compress_csa", "dsv4_compress_hca")
