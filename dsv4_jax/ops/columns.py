"""Values that are not an array yet: columns of a matrix of several stacked products, or a product not made."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

__all__ = ["Columns", "Product", "Values", "dense"]


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of a matrix, not cut yet. A pytree with one leaf.

    Ops take them in place of an array. The CUDA kernels read them where they lie, if they are float32 and both their
    first column and the matrix's width are multiples of 16 bytes; everything else cuts them, which is a copy.

    Attributes:
        matrix: [T, total].
        start: the first column; static.
        tail: what the columns of a row are read as: (width,), or (heads, dim); static.
    """

    matrix: jax.Array
    start: int
    tail: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.matrix.shape[0], *self.tail)

    @property
    def dtype(self) -> jax.typing.DTypeLike:
        return self.matrix.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> Columns:
        """Returns the values with another shape; the first axis, which may be given as -1, stays."""
        assert shape[0] in (-1, self.matrix.shape[0]) and math.prod(shape[1:]) == math.prod(self.tail), (shape, self)
        return dataclasses.replace(self, tail=tuple(shape[1:]))

    def cut(self) -> jax.Array:
        """Returns the columns as an array [T, *tail]."""
        stop = self.start + math.prod(self.tail)
        return jax.lax.slice_in_dim(self.matrix, self.start, stop, axis=1).reshape(self.shape)


jax.tree_util.register_dataclass(Columns, data_fields=["matrix"], meta_fields=["start", "tail"])


@dataclasses.dataclass(frozen=True)
class Product:
    """x @ weights.T, not multiplied yet. A pytree.

    For a kernel that multiplies itself, so that a long chunk's sums never go to memory; everything else makes it.

    Attributes:
        x: [T, K] bfloat16.
        weights: [N, K] bfloat16.
        tail: what the columns of a row are read as: (N,), or (heads, dim); static.
    """

    x: jax.Array
    weights: jax.Array
    tail: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.x.shape[0], *self.tail)

    @property
    def dtype(self) -> jax.typing.DTypeLike:
        """The dtype of the product."""
        return jnp.dtype(jnp.float32)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> Product:
        """Returns the values with another shape; the first axis, which may be given as -1, stays."""
        assert shape[0] in (-1, self.x.shape[0]) and math.prod(shape[1:]) == math.prod(self.tail), (shape, self)
        return dataclasses.replace(self, tail=tuple(shape[1:]))

    def cut(self) -> jax.Array:
        """Returns the product as an array [T, *tail] float32."""
        return jnp.einsum("ti,oi->to", self.x, self.weights, preferred_element_type=jnp.float32).reshape(self.shape)


jax.tree_util.register_dataclass(Product, data_fields=["x", "weights"], meta_fields=["tail"])

Values = jax.Array | Columns | Product


def dense(values: Values) -> jax.Array:
    """Returns the values as an array."""
    return values.cut() if isinstance(values, Columns | Product) else values
