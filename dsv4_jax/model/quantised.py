"""Matrices that stay as released: leaves of the parameter tree in FP8 or FP4, and the products with them.

Where the CUDA kernels run a row's bits depend on no other row: in a prefill they are those of a decode step, whatever
is scheduled beside it. What that costs against a cuBLAS product with dequantised weights is in docs/kernels.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from ..formats.weights import WEIGHT_FORMATS, WeightFormat
from ..ops.batches import in_tiles
from ..ops.dense_fp8 import dense_fp8

__all__ = ["FP4", "FP8", "Matrix", "Quantised", "product"]

FP8, FP4 = WEIGHT_FORMATS["fp8"], WEIGHT_FORMATS["fp4"]
MOST_ROWS = 1 << 16  # of a product with FP8 weights: what the CUDA kernel takes


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A matrix [rows, columns] in a weight format, or several of them with axes before these two. A pytree.

    Attributes:
        parts: what the device holds, as `format.parts`.
        format: a record of `dsv4_jax.formats.weights`; static.
        whole_rows: of the matrix of whose rows these are a device's share; None: these are all. Static.
    """

    parts: tuple[Any, ...]
    format: WeightFormat
    whole_rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.format.unpacked(self.parts[0].shape)

    @property
    def dtype(self) -> Any:
        """What the weights are exactly, and what rows are taken in: bfloat16."""
        return jnp.dtype(jnp.bfloat16)

    def decode(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
        """The matrix as a plain array."""
        codec = self.format.codec
        return codec.decode(*codec.unpack(*self.parts), dtype)


jax.tree_util.register_dataclass(Quantised, data_fields=["parts"], meta_fields=["format", "whole_rows"])

Matrix: TypeAlias = "jax.Array | Quantised"


def product(
    x: jax.Array, weight: Quantised, *, groups: int = 1, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """`ops.dense_fp8` of any number of rows: [T, groups * in] -> [T, out] of `dtype`.

    Raises:
        ShapeError: the weights are not fp8, or x does not fit them.
    """
    if weight.format != FP8:
        raise ShapeError(f"a dense product with {weight.format.name} weights: only {FP8.name} ones have it")
    settings: dict[str, Any] = {"groups": groups, "dtype": jnp.dtype(dtype), "whole_rows": weight.whole_rows}
    return in_tiles(lambda x: dense_fp8(x, *weight.parts, **settings), MOST_ROWS, x)
