"""route in the project's own CUDA (`csrc/moe/route.cu`): one launch, a block for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.route import RouteArguments
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "MAX_EXPERTS", "MAX_TOP", "call", "supports"]

MAX_EXPERTS, MAX_TOP = 512, 8


def supports(arguments: RouteArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    experts, top = arguments.logits.shape[1], arguments.top
    if experts > MAX_EXPERTS or top > MAX_TOP:
        return f"it takes up to {MAX_EXPERTS} experts and {MAX_TOP} of them a token, not {experts} and {top}"
    return None


def call(arguments: RouteArguments) -> tuple[jax.Array, jax.Array]:
    """Computes what `ops.route.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    shape, hashed = (arguments.logits.shape[0], arguments.top), arguments.chosen is not None
    results = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    operands = arguments.logits, arguments.chosen if hashed else arguments.bias
    chosen, share = launch("route", "dsv4_route", results, *operands, hashed=hashed, scale=float(arguments.scale))
    return chosen, share


IMPLEMENTATION = declare("route", call, supports, "dsv4_route", early=("dsv4_route",))
