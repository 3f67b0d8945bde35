"""What the wrappers of the CUDA kernels share: how they are declared, called, and told where rows of values lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..ops.columns import Columns, Values, dense
from ..ops.registry import Implementation

__all__ = ["declare", "float_columns", "launch"]


def declare(
    op: str,
    call: Callable[[Any], Any],
    supports: Callable[[Any], str | None],
    *targets: str,
    alone: tuple[str, ...] = (),
    early: tuple[str, ...] = (),
) -> Implementation:
    """The implementation of an op in CUDA, which can be used where the library has its code. For the rest see there."""
    return Implementation(op, "cuda", call, supports, lambda: ffi.cuda_problem(op), targets, alone, early)


def launch(
    op: str, target: str, results: Any, *operands: Any, aliases: Mapping[int, int] | None = None, **attributes: Any
) -> Any:
    """Calls a handler of the CUDA library.

    Args:
        op: as the handler names it.
        target: its name.
        results: shapes and dtypes, one or a tuple.
        operands: arrays.
        aliases: operand -> the result that overwrites it.
        attributes: integers are passed as int32, floats as float32; others as they are.

    Raises:
        ImplementationError: the CUDA library is not there, or has no code for the device.
    """
    kernel = jax.ffi.ffi_call(ffi.cuda_target(op, target), results, input_output_aliases=dict(aliases or {}))
    return kernel(*operands, **{name: _attribute(value) for name, value in attributes.items()})


def _attribute(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _attribute(part) for name, part in value.items()}
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float | np.floating) else value


def float_columns(values: Values, multiple: int = 4, *, rounded: bool = False) -> tuple[jax.Array, int]:
    """A float32 matrix [T, total] and the first of its columns that hold `values`.

    Columns are left in place where both are multiples of `multiple`, by default what loads of 16 bytes ask for.
    `rounded`: bfloat16 values stay so, of which loads of 16 bytes ask for twice as many.
    """
    dtype = jnp.bfloat16 if rounded and values.dtype == jnp.bfloat16 else jnp.float32
    if isinstance(values, Columns) and values.dtype == dtype:
        total, step = values.matrix.shape[1], multiple * (2 if dtype == jnp.bfloat16 else 1)
        if values.start % step == total % step == 0:
            return values.matrix, values.start
    values = dense(values).astype(dtype)
    return values.reshape(values.shape[0], math.prod(values.shape[1:])), 0
