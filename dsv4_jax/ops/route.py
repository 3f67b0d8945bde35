"""route: which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShapeError
from .arguments import Check
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "RouteArguments", "reference", "route"]

_FLOOR = np.float32(1e-20)  # of the sum that shares are divided by


@dataclasses.dataclass(frozen=True)
class RouteArguments:
    """Holds what an implementation of `route` is given, as in its arguments. One of `bias` and `chosen` is None."""

    logits: jax.Array
    bias: jax.Array | None
    chosen: jax.Array | None
    top: int
    scale: float

    @property
    def empty(self) -> bool:
        return self.logits.size == 0


def route(
    logits: jax.Array,
    *,
    bias: jax.Array | None = None,
    chosen: jax.Array | None = None,
    top: int,
    scale: float = 1.0,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array]:
    """Each token's experts and their shares, from the gate's logits (docs/model.md, Experts).

    An expert's score is sqrt(softplus(logit)). Chosen are the `top` greatest scores plus bias, the greatest first and
    of equals the lower number; or, in layers that look them up by token, those given. The shares are the chosen
    experts' scores without bias, divided by their sum, times `scale`.

    Args:
        logits: [T, experts] float32.
        bias: [experts] float32; None if `chosen` is given.
        chosen: [T, top] int32, the experts of hash layers. One that is no expert makes its token's shares NaN.
        top: experts of a token.
        scale: `routed_scaling_factor`.

    Returns:
        chosen: [T, top] int32, distinct (also where logits are NaN: those count as the greatest); or those given.
        share: [T, top] float32.

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or not exactly one of bias and chosen is given.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("route")
    logits = check.array("logits", logits, "float32", "T", "experts")
    if (bias is None) == (chosen is None):
        raise ShapeError(f"route: bias and chosen are {'not' if bias is None else 'both'} given, expected one of them")
    if bias is not None:
        bias = check.array("bias", bias, "float32", "experts")
    if chosen is not None:
        chosen = check.array("chosen", chosen, "int32", "T", top)
    if not 0 < top <= logits.shape[1]:
        raise ShapeError(f"route: top is {top}, expected 1 to {logits.shape[1]}, the experts there are")
    return run("route", RouteArguments(logits, bias, chosen, top, scale), implementation)


def reference(arguments: RouteArguments) -> tuple[jax.Array, jax.Array]:
    """Computes `route` in `jnp`."""
    scores, chosen = jnp.sqrt(jax.nn.softplus(arguments.logits)), arguments.chosen
    if chosen is None:
        assert arguments.bias is not None
        _, chosen = lax.top_k(scores + arguments.bias[None], arguments.top)
        picked = jnp.take_along_axis(scores, chosen, 1)
    else:
        given = jnp.where(chosen < 0, np.int32(scores.shape[1]), chosen)  # what is too large is filled with NaN
        picked = jnp.take_along_axis(scores, given, 1, mode="fill")
    return chosen, picked / (picked.sum(1, keepdims=True) + _FLOOR) * np.float32(arguments.scale)


IMPLEMENTATION = Implementation("route", "xla", reference)
