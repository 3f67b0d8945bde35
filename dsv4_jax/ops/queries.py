"""finish_queries: the last steps of a query before attention or the indexer: norm, RoPE, Hadamard, FP4 round trip."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from ..formats.index_fp4 import round_trip
from .arguments import Check
from .columns import Values, dense
from .numerics import hadamard, rope, unit_rms
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "QueriesArguments", "finish_queries", "reference"]


@dataclasses.dataclass(frozen=True)
class QueriesArguments:
    """Holds what an implementation of `finish_queries` is given, as in its arguments."""

    queries: Values
    position: jax.Array
    inv_freq: jax.Array
    eps: float | None = None
    rotate: bool = False
    round_fp4: bool = False

    @property
    def empty(self) -> bool:
        return self.queries.size == 0


def finish_queries(
    queries: Values,
    position: jax.Array,
    inv_freq: jax.Array,
    *,
    eps: float | None = None,
    rotate: bool = False,
    round_fp4: bool = False,
    implementation: Choice = None,
) -> jax.Array:
    """Does RMSNorm per head (no weight) and RoPE; for the indexer also Hadamard and FP4 rounding.

    (docs/model.md, Projections and Index.)

    Args:
        queries: [T, H, dim] float, an array, `Columns` or a `Product`; taken in float32.
        position: [T] int32.
        inv_freq: [rope_dim / 2] float32.
        eps: of the norm; None: no norm.
        rotate: multiply by the Hadamard matrix (dim a power of two).
        round_fp4: round to what FP4 storage would keep, groups of 32 dims.

    Returns:
        [T, H, dim]: float32 of the reference, bfloat16 of a kernel (the kernels they go to round to it anyway).

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("finish_queries")
    queries = check.array("queries", queries, "float", "T", "H", "dim")
    position = check.array("position", position, "int32", "T")
    inv_freq = check.array("inv_freq", inv_freq, "float32", "RoPE pairs")
    dim = queries.shape[-1]
    if 2 * inv_freq.shape[0] > dim:
        raise ShapeError(
            f"finish_queries: inv_freq has {inv_freq.shape[0]} frequencies, {dim} dims have {dim // 2} pairs"
        )
    if rotate and dim & (dim - 1):
        raise ShapeError(f"finish_queries: queries have {dim} dims, rotate needs a power of two")
    return run("queries", QueriesArguments(queries, position, inv_freq, eps, rotate, round_fp4), implementation)


def reference(arguments: QueriesArguments) -> jax.Array:
    """Computes `finish_queries` in `jnp`, float32 throughout."""
    queries, eps = dense(arguments.queries).astype(jnp.float32), arguments.eps
    if eps is not None:
        queries = unit_rms(queries, eps)
    queries = rope(queries, jnp.asarray(arguments.position)[:, None], jnp.asarray(arguments.inv_freq))
    if arguments.rotate:
        queries = hadamard(queries)
    return round_trip(queries) if arguments.round_fp4 else queries


IMPLEMENTATION = Implementation("queries", "xla", reference)
