"""dense_e4m3: products with FP8 weights as the released model computes them, rows rounded to e4m3 with them.

`formats.activations` says how rows are rounded. Of the sums a kernel promises more than the reference: K is cut into
parts by the matrix alone, 128 columns are added up by the matrix unit and then to a float32 total, in order. So a row's
bits depend on the row and the weights alone, not on the other rows or their number. The reference has the same codes
and other sums: they differ by up to 3e-4 (relative L2), which is what the unit's 14 bits cost.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..formats.activations import dequantise_rows, quantise_rows
from ..formats.weights import fp8_e4m3
from .dense_fp8 import DenseFp8Arguments, checked, product
from .registry import Choice, Implementation, run
from .rounded_rows import RoundedRows

__all__ = ["IMPLEMENTATION", "dense_e4m3", "dense_e4m3_rounding", "reference"]


def dense_e4m3(
    x: jax.Array | RoundedRows,
    codes: jax.Array,
    scales: jax.Array,
    *,
    groups: int = 1,
    dtype: jnp.dtype = jnp.float32,
    whole_rows: int | None = None,
    implementation: Choice = None,
) -> jax.Array:
    """Multiplies rounded(x) @ weights.T with float32 totals: [T, N] of `dtype`.

    Args:
        x: [T, groups * K] float, rounded to bf16 and then to e4m3 with a power-of-two scale per row and 128 columns;
            or rows that are rounded so already.
        codes: [N / 64, K / 128, 8192] uint8, packed (`formats.weights.fp8_e4m3`).
        scales: [ceil(N / 128), K / 128] uint8, e8m0, as released.
        groups, dtype, whole_rows: as of `dense_fp8`.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    return run("dense_e4m3", checked("dense_e4m3", x, codes, scales, groups, dtype, whole_rows), implementation)


def dense_e4m3_rounding(
    x: jax.Array | RoundedRows,
    codes: jax.Array,
    scales: jax.Array,
    *,
    groups: int = 1,
    whole_rows: int | None = None,
    implementation: Choice = None,
) -> jax.Array | RoundedRows:
    """Multiplies for another `dense_e4m3`, with the bits that it makes of this one's bfloat16.

    Args:
        others: as of `dense_e4m3`.

    Returns:
        The rows, [T, N] bfloat16 or rounded already.

    Raises:
        ShapeError, ImplementationError: as `dense_e4m3`.
    """
    arguments = checked("dense_e4m3", x, codes, scales, groups, jnp.dtype(jnp.bfloat16), whole_rows)
    return run("dense_e4m3", dataclasses.replace(arguments, rounds=True), implementation)


def reference(arguments: DenseFp8Arguments) -> jax.Array:
    """Computes `dense_e4m3` in `jnp`: rows and weights rounded and dequantised, then a product of bf16."""
    x = arguments.x
    values = x.values() if isinstance(x, RoundedRows) else dequantise_rows(*quantise_rows(x), jnp.bfloat16)
    return product(arguments, values, fp8_e4m3.unpack(arguments.codes, arguments.scales)[0])


IMPLEMENTATION = Implementation("dense_e4m3", "xla", reference)
