"""swiglu: what stands between the two products of the shared expert, rounded to what the second takes."""

from __future__ import annotations

import dataclasses
import numbers

import jax
import jax.numpy as jnp

from ..checks import shown
from ..errors import ShapeError
from .arguments import Check
from .columns import Values, dense
from .numerics import clamped_swiglu
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "SwigluArguments", "reference", "swiglu"]


@dataclasses.dataclass(frozen=True)
class SwigluArguments:
    """Holds what an implementation of `swiglu` is given, as in its arguments."""

    gate: Values
    up: Values
    limit: float
    dtype: jnp.dtype

    @property
    def empty(self) -> bool:
        return self.gate.size == 0


def swiglu(
    gate: Values, up: Values, *, limit: float, dtype: jnp.dtype = jnp.float32, implementation: Choice = None
) -> jax.Array:
    """Computes silu(min(gate, limit)) * clip(up, -limit, limit), in float32: [T, n] of `dtype`.

    Args:
        gate, up: [T, n] float, arrays or `Columns`.
        limit: by which gates are clamped above, ups on both sides.
        dtype: of the result, float32 or bfloat16.

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or the limit is no number >= 0; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("swiglu")
    gate, up = check.array("gate", gate, "float", "T", "n"), check.array("up", up, "float", "T", "n")
    if not isinstance(limit, numbers.Real) or not limit >= 0:
        raise ShapeError(f"swiglu: limit is {shown(limit)}, expected a number >= 0")
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ShapeError(f"swiglu: dtype is {jnp.dtype(dtype).name}, expected float32 or bfloat16")
    return run("swiglu", SwigluArguments(gate, up, float(limit), jnp.dtype(dtype)), implementation)


def reference(arguments: SwigluArguments) -> jax.Array:
    """Computes `swiglu` in `jnp`."""
    gate, up = (dense(values).astype(jnp.float32) for values in (arguments.gate, arguments.up))
    return clamped_swiglu(gate, up, arguments.limit).astype(arguments.dtype)


IMPLEMENTATION = Implementation("swiglu", "xla", reference)
