"""Rows that are rounded to e4m3 already, as the products of `dense_e4m3` read them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShapeError
from ..formats.activations import ROW_BLOCK, quantise_rows
from ..formats.scaling import e4m3_values, grouped, power_of_two

__all__ = ["PITCH", "RoundedRows"]

PITCH = 4  # rows of scales come in multiples: 16 bytes


@dataclasses.dataclass(frozen=True)
class RoundedRows:
    """Rows [T, K] as codes and scales (`formats.activations`). A pytree.

    What makes rows may round them itself, where nothing but products takes them: they never go to memory as bfloat16.

    Attributes:
        codes: [T, K] uint8, e4m3.
        scales: [K / 128, T in whole 4s] float32, powers of two: by blocks of columns, of rows next to each other; zeros
            beyond T.
    """

    codes: jax.Array
    scales: jax.Array

    @staticmethod
    def shapes(rows: int, columns: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns those of codes and scales."""
        pitch = -(-rows // PITCH) * PITCH
        scales = jax.ShapeDtypeStruct((columns // ROW_BLOCK, pitch), jnp.float32)
        return jax.ShapeDtypeStruct((rows, columns), jnp.uint8), scales

    @classmethod
    def of(cls, x: jax.Array) -> RoundedRows:
        """Rounds float rows [T, K].

        Raises:
            ShapeError: x is no matrix, or K no multiple of 128.
        """
        if np.ndim(x) != 2:
            raise ShapeError(f"RoundedRows: x has {np.ndim(x)} dimensions, expected rows and columns")
        x = jnp.asarray(x)
        codes, scales = quantise_rows(x)
        factors = power_of_two(scales.astype(jnp.int32) - 127)
        return cls(codes, jnp.pad(factors.T, [(0, 0), (0, -x.shape[0] % PITCH)]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def values(self) -> jax.Array:
        """Returns the numbers that they stand for, [T, K] bfloat16, exactly."""
        factors = self.scales[:, : self.codes.shape[0]].T
        blocks = grouped(e4m3_values(self.codes), ROW_BLOCK) * factors[..., None]
        return blocks.reshape(self.shape).astype(jnp.bfloat16)


jax.tree_util.register_dataclass(RoundedRows, data_fields=["codes", "scales"], meta_fields=[])
