"""normalise: RMSNorm of rows with a weight, rounded to what the next product takes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from .arguments import Check
from .columns import Values, dense
from .numerics import unit_rms
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "NormaliseArguments", "normalise", "reference"]


@dataclasses.dataclass(frozen=True)
class NormaliseArguments:
    """Holds what an implementation of `normalise` is given, as in its arguments."""

    values: Values
    weight: jax.Array
    eps: float
    dtype: jnp.dtype

    @property
    def empty(self) -> bool:
        return self.values.size == 0


def normalise(
    values: Values, weight: jax.Array, *, eps: float, dtype: jnp.dtype = jnp.float32, implementation: Choice = None
) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32: [T, n] of `dtype`.

    Args:
        values: [T, n] float, an array or `Columns`.
        weight: [n] float32.
        dtype: of the result, float32 or bfloat16.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("normalise")
    values = check.array("values", values, "float", "T", "n")
    weight = check.array("weight", weight, "float32", "n")
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ShapeError(f"normalise: dtype is {jnp.dtype(dtype).name}, expected float32 or bfloat16")
    return run("normalise", NormaliseArguments(values, weight, eps, jnp.dtype(dtype)), implementation)


def reference(arguments: NormaliseArguments) -> jax.Array:
    """Computes `normalise` in `jnp`."""
    x = unit_rms(dense(arguments.values).astype(jnp.float32), arguments.eps)
    return (x * arguments.weight[None]).astype(arguments.dtype)


IMPLEMENTATION = Implementation("normalise", "xla", reference)
