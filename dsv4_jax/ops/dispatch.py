"""Picks the implementation of an op: the `jnp` reference or the GPU kernel of the same file name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import jax

from .. import ffi
from ..errors import ImplementationError

__all__ = ["Implementation", "has_kernel", "implementation_for"]

Implementation = Literal["xla", "pallas", "cuda", "triton"] | None
_ROOMS = {"pallas": "Pallas", "cuda": "CUDA", "triton": "Triton"}  # room -> what its kernels are called
# The default of each op on a GPU: the fastest whose results were compared on one (benchmarks/RESULTS.md).
_ON_GPU: dict[str, Literal["xla", "pallas", "cuda"]] = {
    "append": "cuda",
    "attend": "cuda",
    "compress": "cuda",
    "gather": "pallas",
    "index_scores": "cuda",
    "kv_store": "pallas",
    "queries": "cuda",
    "top_k": "cuda",
}


def has_kernel(op: str, room: str = "pallas") -> bool:
    """Whether `dsv4_jax.pallas` (or `.cuda`, `.triton`) has a kernel file for this op."""
    return importlib.util.find_spec(f"dsv4_jax.{room}.{op}") is not None


def implementation_for(
    op: str, reference: Callable[..., Any], implementation: Implementation, *, empty: bool = False
) -> Callable[..., Any]:
    """The function to call for `op`, a file name in `pallas/`, `cuda/` or `triton/` if it has kernels there.

    None means, on a GPU backend, the op's default there (its Pallas kernel in place of a CUDA one whose
    library is not built, or not for these devices); everywhere else the reference. It is the reference,
    too, if there is nothing to do (`empty`): kernels need at least one element of each operand.

    Raises:
        ImplementationError: unknown name, or no such kernel exists for this op.
    """
    if implementation is None:
        implementation = _best(op)
    if implementation == "xla":
        return reference
    if implementation not in _ROOMS:
        expected = "'xla', 'pallas', 'cuda', 'triton' or None"
        raise ImplementationError(f"{op}: unknown implementation {implementation!r}, expected {expected}")
    if not has_kernel(op, implementation):
        kind = _ROOMS[implementation]
        raise ImplementationError(f"{op}: there is no {kind} kernel for this op, use implementation='xla'")
    if empty:
        return reference
    return getattr(importlib.import_module(f"dsv4_jax.{implementation}.{op}"), reference.__name__)


def _best(op: str) -> Literal["xla", "pallas", "cuda"]:
    if jax.default_backend() != "gpu":
        return "xla"
    best = _ON_GPU[op]
    return "pallas" if best == "cuda" and ffi.cuda_problem(op) is not None else best
