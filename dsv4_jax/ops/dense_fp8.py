"""dense_fp8: products with FP8 weights that stay as released, in the packed form of `formats.weights.fp8`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..checks import INT32_MAX, check_integer
from ..errors import ShapeError
from ..formats.weights import fp8
from ..formats.weights.fp8 import BLOCK, TILE_BYTES, TILE_COLUMNS, TILE_ROWS
from .arguments import Check
from .registry import Choice, Implementation, run
from .rounded_rows import RoundedRows

__all__ = ["IMPLEMENTATION", "DenseFp8Arguments", "checked", "dense_fp8", "product", "reference"]


@dataclasses.dataclass(frozen=True)
class DenseFp8Arguments:
    """Holds what an implementation of `dense_fp8` or of `dense_e4m3` is given, as in their arguments.

    `rounds`: products that round rows take the result, which is bfloat16. An implementation of `dense_e4m3` may give it
    as `RoundedRows`.
    """

    x: jax.Array | RoundedRows
    codes: jax.Array
    scales: jax.Array
    groups: int
    dtype: jnp.dtype
    whole_rows: int
    rounds: bool = False

    @property
    def empty(self) -> bool:
        return self.x.shape[0] == 0 or self.codes.size == 0

    @property
    def weight_rows(self) -> int:
        """N, the rows of the weights."""
        return self.codes.shape[0] * TILE_ROWS

    @property
    def columns(self) -> int:
        """K, the columns of the weights."""
        return self.codes.shape[1] * TILE_COLUMNS


def dense_fp8(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    groups: int = 1,
    dtype: jnp.dtype = jnp.float32,
    whole_rows: int | None = None,
    implementation: Choice = None,
) -> jax.Array:
    """Multiplies x @ weights.T with float32 sums: [T, N] of `dtype`.

    With g groups the weights are g matrices [N / g, K] one after the other, and each multiplies its own K of x's g * K
    columns: what V4's `wo_a` does to its groups of heads.

    Args:
        x: [T, groups * K] float, taken in bf16.
        codes: [N / 64, K / 128, 8192] uint8, `formats.weights.fp8.pack` of e4m3 codes [N, K].
        scales: [ceil(N / 128), K / 128] uint8, e8m0, as released.
        groups: of the weights' rows, in 64s.
        dtype: of the result, float32 or bfloat16.
        whole_rows: of the matrix of whose rows these are a share; None: these are all. Sums are cut as those of the
            whole are, so that its rows have the same products on any number of devices.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    arguments = checked("dense_fp8", x, codes, scales, groups, dtype, whole_rows)
    return run("dense_fp8", arguments, implementation)


def checked(
    op: str,
    x: jax.Array | RoundedRows,
    codes: jax.Array,
    scales: jax.Array,
    groups: int,
    dtype: jnp.dtype,
    whole_rows: int | None,
) -> DenseFp8Arguments:
    """Returns the record of a product of this name; raises as `dense_fp8`."""
    check = Check(op)
    if isinstance(x, RoundedRows) and op == "dense_e4m3":
        codes_of_x = check.array("x's codes", x.codes, "uint8", "T", "columns")
        shapes = RoundedRows.shapes(*codes_of_x.shape)
        x = RoundedRows(codes_of_x, check.array("x's scales", x.scales, "float32", *shapes[1].shape))
    else:
        x = check.array("x", x, "float", "T", "columns")
    codes = check.array("codes", codes, "uint8", "tiles", "steps", TILE_BYTES)
    tiles, steps, _ = codes.shape
    scales = check.array("scales", scales, "uint8", -(-tiles * TILE_ROWS // BLOCK), steps)
    if groups < 1 or tiles % groups or x.shape[1] != groups * steps * TILE_COLUMNS:
        raise ShapeError(
            f"{op}: x has {x.shape[1]} columns, {groups} groups of weights [{tiles * TILE_ROWS}, "
            f"{steps * TILE_COLUMNS}] take {groups * steps * TILE_COLUMNS}, and rows in {TILE_ROWS}s each"
        )
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ShapeError(f"{op}: dtype is {jnp.dtype(dtype).name}, expected float32 or bfloat16")
    rows = tiles * TILE_ROWS
    whole = (
        rows
        if whole_rows is None
        else check_integer(f"{op}: whole_rows", whole_rows, rows, INT32_MAX, error=ShapeError)
    )
    return DenseFp8Arguments(x, codes, scales, groups, jnp.dtype(dtype), whole)


def reference(arguments: DenseFp8Arguments) -> jax.Array:
    """Computes `dense_fp8` in `jnp`: the weights dequantised, then a product of bf16."""
    assert isinstance(arguments.x, jax.Array)
    return product(arguments, arguments.x.astype(jnp.bfloat16), fp8.unpack(arguments.codes, arguments.scales)[0])


def product(arguments: DenseFp8Arguments, x: jax.Array, codes: jax.Array) -> jax.Array:
    """Multiplies bf16 rows with the matrix of these codes [N, K], with float32 sums."""
    groups, columns, rows = arguments.groups, arguments.columns, x.shape[0]
    weights = fp8.decode(codes, arguments.scales).reshape(groups, arguments.weight_rows // groups, columns)
    x = x.reshape(rows, groups, columns)
    out = jnp.einsum("tgk,gnk->tgn", x, weights, preferred_element_type=jnp.float32)
    return out.reshape(rows, arguments.weight_rows).astype(arguments.dtype)


IMPLEMENTATION = Implementation("dense_fp8", "xla", reference)
