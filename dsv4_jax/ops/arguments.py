"""Checks of what an op is given: each message names the op and the argument, before anything is traced.

NumPy arrays become JAX arrays, as at the border of a jitted function: without 64-bit types int64 is int32, float64 is
float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import shown
from ..errors import ShapeError
from ..formats import RowFormat
from .columns import Columns

__all__ = ["Check"]

T = TypeVar("T")
_FLOATING = "float"  # any floating-point type


@dataclasses.dataclass(frozen=True)
class Check:
    """The checks of one call of `op`. Axes that are given by a letter must have the same size wherever it stands.

    Every method raises `ShapeError`.
    """

    op: str
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def array(self, name: str, x: T, dtype: str, *axes: int | str) -> T:
        """Checks that `x` is an array or `Columns` of this type ("float": any floating-point one) and of these axes."""
        return self._array(name, x, dtype, axes)

    def any_shape(self, name: str, x: T, dtype: str) -> T:
        """Checks that `x` is an array of this type with any axes."""
        return self._array(name, x, dtype, None)

    def parts(self, name: str, parts: tuple[T, ...], fmt: RowFormat) -> tuple[T, ...]:
        """Checks that `parts` are the stored rows of a format: one array [rows, width] for each of its parts."""
        widths = ", ".join(f"{part.name} {part.dtype} [rows, {part.width}]" for part in fmt.parts)
        if not isinstance(parts, tuple | list) or len(parts) != len(fmt.parts):
            given = f"{len(parts)} parts" if isinstance(parts, tuple | list) else _spelled(parts)
            raise ShapeError(f"{self.op}: {name} is {given}, expected rows of format {fmt.name}: {widths}")
        return tuple(
            self.array(f"{name}'s part '{part.name}'", x, part.dtype, f"rows of {name}", part.width)
            for part, x in zip(fmt.parts, parts, strict=True)
        )

    def given(self, name: str, x: Any, expected: type, why: str = "") -> None:
        """`x` is an object of this class."""
        if not isinstance(x, expected):
            raise ShapeError(f"{self.op}: {name} is {shown(x)}, expected {expected.__name__}{why}")

    def _array(self, name: str, x: Any, dtype: str, axes: tuple[int | str, ...] | None) -> Any:
        shape = getattr(x, "shape", None)
        found = jax.dtypes.canonicalize_dtype(x.dtype) if hasattr(x, "dtype") else None
        if found is None or shape is None or not _is(found, dtype) or not self._fits(shape, axes):
            wanted = "" if axes is None else f" [{', '.join(str(self.sizes.get(str(a), a)) for a in axes)}]"
            raise ShapeError(f"{self.op}: {name} is {_spelled(x)}, expected {dtype}{wanted}")
        return jnp.asarray(x, found) if isinstance(x, np.ndarray) else x

    def _fits(self, shape: tuple[int, ...], axes: tuple[int | str, ...] | None) -> bool:
        if axes is None:
            return True
        if len(shape) != len(axes):
            return False
        known = dict(self.sizes)
        for size, axis in zip(shape, axes, strict=True):
            if (known.setdefault(axis, size) if isinstance(axis, str) else axis) != size:
                return False
        self.sizes.update(known)
        return True


@functools.cache
def _is(found: np.dtype, dtype: str) -> bool:
    return jnp.issubdtype(found, jnp.floating) if dtype == _FLOATING else found.name == dtype


def _spelled(x: Any) -> str:
    if isinstance(x, Columns):
        return f"Columns of {x.dtype} [{', '.join(map(str, x.shape))}]"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype} [{', '.join(map(str, x.shape))}]"
    return shown(x)
