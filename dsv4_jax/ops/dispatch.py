"""Picks the implementation of an op: the `jnp` reference or the GPU kernel of the same file name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import jax

from ..errors import ImplementationError

__all__ = ["Implementation", "has_kernel", "implementation_for"]

Implementation = Literal["xla", "pallas"] | None


def has_kernel(op: str) -> bool:
    """Whether `dsv4_jax.pallas` has a kernel file for this op."""
    return importlib.util.find_spec(f"dsv4_jax.pallas.{op}") is not None


def implementation_for(op: str, reference: Callable[..., Any], implementation: Implementation) -> Callable[..., Any]:
    """The function to call for `op` (a file name in `ops/` and, if it has a kernel, in `pallas/`).

    None means the kernel on a GPU backend where one exists, else the reference.

    Raises:
        ImplementationError: unknown name, or no kernel exists for this op.
    """
    if implementation is None:
        implementation = "pallas" if jax.default_backend() == "gpu" and has_kernel(op) else "xla"
    if implementation == "xla":
        return reference
    if implementation != "pallas":
        raise ImplementationError(f"{op}: unknown implementation {implementation!r}, expected 'xla', 'pallas' or None")
    if not has_kernel(op):
        raise ImplementationError(f"{op}: there is no Pallas kernel for this op, use implementation='xla'")
    return getattr(importlib.import_module(f"dsv4_jax.pallas.{op}"), reference.__name__)
