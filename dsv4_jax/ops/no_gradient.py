"""What enters a step of the cache has no gradient, and who asks for one is told so.

Rows are stored as codes and read by other steps: a derivative would be zero, or of some of the paths alone.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..errors import StepError

__all__ = ["NAME", "without_gradient"]

T = TypeVar("T")
NAME = "dsv4_without_gradient"  # of an operation that is nothing but its operand
_same = Primitive(NAME)


def without_gradient(values: T) -> T:
    """Returns the same pytree: what is differentiated with respect to its floats raises `StepError`.

    Compiled steps know nothing of it, and values that are constant to who differentiates may pass.
    """
    return jax.tree.map(lambda x: _same.bind(x) if _is_float(x) else x, values)


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _refuse(*_: Any) -> NoReturn:
    raise StepError(
        None,
        "a step of the cache has no gradient, as its rows are stored as codes and read by other steps: differentiate a "
        "forward without a cache (such as dsv4_jax.model.forward_uncached), or what follows the step, with "
        "jax.lax.stop_gradient around all that goes into it",
    )


_same.def_impl(lambda x: x)
_same.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_same] = _refuse
batching.primitive_batchers[_same] = lambda args, dims: (_same.bind(*args), *dims)
mlir.register_lowering(_same, lambda _, x: [x])
