"""route in the project's own CUDA (`csrc/moe/route.cu`): one launch, a block for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.registry import Implementation
from ..ops.route import RouteArguments

__all__ = ["IMPLEMENTATION", "MOST_EXPERTS", "MOST_TOP", "call", "supports"]

MOST_EXPERTS, MOST_TOP = 512, 8


def supports(arguments: RouteArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    experts, top = arguments.logits.shape[1], arguments.top
    if experts > MOST_EXPERTS or top > MOST_TOP:
        return f"it takes up to {MOST_EXPERTS} experts and {MOST_TOP} of them a token, not {experts} and {top}"
    return None


def call(arguments: RouteArguments) -> tuple[jax.Array, jax.Array]:
    """As `ops.route.reference`.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    shape, hashed = (arguments.logits.shape[0], arguments.top), arguments.chosen is not None
    results = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    kernel = jax.ffi.ffi_call(ffi.cuda_target("route", "dsv4_route"), results)
    picks = arguments.chosen if hashed else arguments.bias
    chosen, share = kernel(arguments.logits, picks, hashed=hashed, scale=np.float32(arguments.scale))
    return chosen, share


IMPLEMENTATION = Implementation("route", "cuda", call, supports, lambda: ffi.cuda_problem("route"), ("dsv4_route",))
