"""moe_e4m3: the routed experts as the released model computes them, rows rounded to e4m3 with FP4 weights.

As `ops.moe`, but a token is rounded (`formats.activations`) before the first product and what lies between the
products, times the token's share, before the second; and both products' results to bfloat16. The sums of a kernel are
those of `formats.weights.fp4_e4m3`: of 128 columns by the matrix unit, then in order in float32, all of K in one part.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..formats.activations import dequantise_rows, quantise_rows, to_bfloat16
from ..formats.weights import fp4_e4m3
from .arguments import Check
from .moe import MoeArguments, Product, checked, gates_and_ups, summed
from .numerics import clamped_swiglu
from .registry import Choice, Implementation, run

__all__ = ["IMPLEMENTATION", "moe_e4m3", "reference"]


def moe_e4m3(
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    limit: float,
    first: int | jax.Array = 0,
    routed: int | None = None,
    shards: int = 1,
    beside: jax.Array | None = None,
    implementation: Choice = None,
) -> jax.Array:
    """Each token's experts, added in a fixed order: [T, hidden] float32; with something beside them bfloat16.

    An expert is down @ (share * silu(min(gate, limit)) * clip(up, -limit, limit)), one that is named twice with the sum
    of both shares.

    Args:
        gate_up, down: of the shapes that `ops.moe` takes, packed as `formats.weights.fp4_e4m3` does.
        beside: [T, hidden] bfloat16, such as the shared expert's: added to the sums, which are then rounded to it.
            Of all routed experts only: a device's share of the sums is not to be rounded.
        others: as of `ops.moe`.

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or a number is not of its range; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    arguments = checked("moe_e4m3", x, chosen, share, gate_up, down, limit, first, routed, shards)
    if beside is not None:
        beside = Check("moe_e4m3").array("beside", beside, "bfloat16", *arguments.x.shape)
        arguments = dataclasses.replace(arguments, beside=beside)
    return run("moe_e4m3", arguments, implementation)


def reference(arguments: MoeArguments) -> jax.Array:
    """Computes `moe_e4m3` in `jnp`, as the reference of `moe` does."""
    x = _rounded(arguments.x)

    def expert(multiply: Product, share: jax.Array) -> jax.Array:
        gate, up = (to_bfloat16(half) for half in gates_and_ups(multiply(x, 0)))
        hidden = clamped_swiglu(gate, up, arguments.limit) * share[:, None]
        return to_bfloat16(multiply(_rounded(hidden), 1))

    sums = summed(arguments, expert, fp4_e4m3)
    if arguments.beside is None:
        return sums
    return to_bfloat16(sums + arguments.beside.astype(jnp.float32)).astype(jnp.bfloat16)


def _rounded(x: jax.Array) -> jax.Array:
    return dequantise_rows(*quantise_rows(x), jnp.bfloat16)


IMPLEMENTATION = Implementation("moe_e4m3", "xla", reference)
