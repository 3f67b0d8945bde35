"""gather: stored rows back to dense values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..formats import RowFormat, codec
from .append import Rows, load
from .arguments import Check
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "GatherArguments", "gather_rows", "reference"]


@dataclasses.dataclass(frozen=True)
class GatherArguments:
    """Holds what an implementation of `gather_rows` is given, as in its arguments."""

    pool: Rows
    row_ids: jax.Array
    fmt: RowFormat
    dtype: DTypeLike

    @property
    def empty(self) -> bool:
        return self.row_ids.size == 0


def gather_rows(
    pool: Rows,
    row_ids: jax.Array,
    *,
    fmt: RowFormat,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: Choice = None,
) -> jax.Array:
    """Dense rows [..., dim] of `dtype` for int32 `row_ids` [...]; an id out of range reads the nearest row.

    The RoPE dims of FP8 rows come back bit-exact; the NoPE dims are code times scale, exact in bf16.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("gather")
    pool, row_ids = check.parts("pool", pool, fmt), check.any_shape("row_ids", row_ids, "int32")
    return run("gather", GatherArguments(pool, row_ids, fmt, dtype), implementation)


def reference(arguments: GatherArguments) -> jax.Array:
    """Computes `gather_rows` in `jnp`."""
    fmt = arguments.fmt
    return codec(fmt).decode(fmt, load(arguments.pool, arguments.row_ids), arguments.dtype)


IMPLEMENTATION = Implementation("gather", "xla", reference)
