"""Matrices that stay as released: leaves of the parameter tree in FP8 or FP4."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp

from ...formats.weights import WEIGHT_FORMATS, WeightFormat

__all__ = ["FP4", "FP8", "Matrix", "Quantised", "rounds_rows"]

FP8, FP4 = WEIGHT_FORMATS["fp8"], WEIGHT_FORMATS["fp4"]


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
        """The shape of the matrix, or of the matrices."""
        return self.format.unpacked(self.parts[0].shape)

    @property
    def dtype(self) -> Any:
        """What the weights are exactly, and what rows are taken in: bfloat16."""
        return jnp.dtype(jnp.bfloat16)

    def decode(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
        """Returns the matrix as a plain array."""
        codec = self.format.codec
        return codec.decode(*codec.unpack(*self.parts), dtype)


jax.tree_util.register_dataclass(Quantised, data_fields=["parts"], meta_fields=["format", "whole_rows"])

Matrix: TypeAlias = "jax.Array | Quantised"


def rounds_rows(weight: Any) -> TypeGuard[Quantised]:
    """Whether these are weights whose products round rows to e4m3, as the released model does."""
    return isinstance(weight, Quantised) and weight.format.rows == "e4m3"
