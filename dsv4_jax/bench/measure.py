"""Measuring: an op at a shape with an implementation, timed and checked against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..errors import CacheError
from ..ops.registry import NAMES, find
from .ops import Problem, problem, registered
from .records import Measurement
from .shapes import AttendShape, Case, Shape
from .timing import Ceilings, call_count, time_problem

__all__ = [
    "IMPLEMENTATIONS",
    "default_implementations",
    "measure",
    "one_line",
    "outcome",
    "relative_error",
    "why_not",
]

IMPLEMENTATIONS = (*NAMES, "lax.top_k")
MAX_COMPARED = 1 << 24  # elements of a result that are compared: the first rows


def default_implementations(op: str) -> list[str]:
    """Names what is measured of an op by default: its kernels, the reference and its baseline."""
    names = [name for name in registered(op).names if name != "xla"]
    return [*names, "xla", *(["lax.top_k"] if op == "top_k" else [])]


def why_not(op: str, implementation: str) -> str | None:
    """Says why an implementation cannot be measured here, None if it can (or only trying it will tell)."""
    if implementation == "lax.top_k":
        return None if op == "top_k" else "a baseline of top_k"
    if implementation == "xla":
        return None
    for name in (name for name in registered(op).names if name == implementation):
        if (backend := jax.default_backend()) != "gpu":
            return f"the backend is {backend}"
        return find(registered(op).name, name).problem()
    return "no kernel"


def measure(
    case: Case,
    batch: int,
    names: list[str],
    ceilings: Ceilings | None,
    *,
    quick: bool,
    on_done: Callable[[], None] | None = None,
) -> list[Measurement]:
    """Measures each implementation, all on the same arguments.

    What an implementation raises becomes its `problem`; `on_done()` follows each. Without ceilings nothing is put in
    relation to them.
    """
    shape = case.make(batch)
    variant = shape.key_split if isinstance(shape, AttendShape) and shape.key_split != "throughput" else None
    base = Measurement(
        case.op,
        case.name,
        batch,
        "",
        variant=variant,
        context=case.context,
        bytes=shape.bytes_moved,
        flops=shape.flops,
        floor_us=None if ceilings is None else ceilings.floor_us(shape.bytes_moved, shape.flops),
    )
    found: list[Measurement] = []
    inputs, want = None, []
    for name in names:
        made = dataclasses.replace(base, implementation=name, problem=why_not(case.op, name))
        if made.problem is None:
            try:
                if inputs is None:
                    calls = call_count(shape.bytes_moved, quick=quick)
                    inputs = problem(shape, calls, pool_rows=1 << (10 if quick else 20))
                    want = outcome(inputs, "xla")
                got = want if name == "xla" else None
                made = _measured(made, shape, inputs, want, got, ceilings, repeats=2 if quick else 12)
            except Exception as error:  # an implementation may fail in any way; the others still count
                made = dataclasses.replace(made, problem=one_line(error))
        found.append(made)
        if on_done:
            on_done()
    return found


def _measured(
    base: Measurement,
    shape: Shape,
    inputs: Problem,
    want: list[np.ndarray],
    got: list[np.ndarray] | None,
    ceilings: Ceilings | None,
    *,
    repeats: int,
) -> Measurement:
    """Times one implementation and compares its results, `got` if they are known, with the reference's."""
    got = got or outcome(inputs, base.implementation)
    timing = time_problem(inputs, base.implementation, repeats=repeats)
    error = max(relative_error(a[: len(b)], b) for a, b in zip(got, want, strict=True))
    us = timing.us if timing.kernel_us is None else timing.kernel_us
    bytes_moved, flops = shape.bytes_moved, shape.flops
    return dataclasses.replace(
        base,
        timer=timing.timer,
        us=timing.us,
        kernel_us=timing.kernel_us,
        kernels=timing.kernels,
        gb_per_s=bytes_moved / us / 1e3,
        tflop_per_s=flops / us / 1e6,
        of_copy=None if ceilings is None else 1e6 * bytes_moved / us / ceilings.copy,
        of_matmul=None if ceilings is None else 1e6 * flops / us / ceilings.matmul,
        of_floor=None if base.floor_us is None else base.floor_us / us,
        relative_error=error,
        correct=error <= inputs.tolerance,
    )


def outcome(inputs: Problem, implementation: str, rows: slice | None = None) -> list[np.ndarray]:
    """Runs the first call and returns what it gives; with `rows`, all of what a batched op gives for these rows of its
    batch.
    """

    def run(shared: Any, carry: Any, call: Any) -> Any:
        carry, out = inputs.apply(shared, carry, call, implementation)
        found = inputs.result(carry, out, call)
        return jax.tree.map(lambda x: x[: max(1, MAX_COMPARED * len(x) // x.size)], found) if compared else found

    call, compared = inputs.calls[0], rows is None
    if rows is not None:
        call = jax.tree.map(lambda x: x[rows], call)
    found = jax.jit(run)(inputs.shared, inputs.carry(), call)
    return [np.asarray(x) for x in jax.tree.leaves(found)]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over norm of `want`; integers: share that differs. inf if NaN or infinities disagree."""
    if np.issubdtype(want.dtype, np.integer):
        return float(np.mean(got != want))
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(np.where(finite, 0, got), np.where(finite, 0, want), equal_nan=True):
        return float("inf")
    got, want = got[finite], want[finite]
    difference = np.linalg.norm(got - want) if np.isfinite(got).all() else np.inf
    return float(difference / max(np.linalg.norm(want), 1e-30))


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return (text if isinstance(error, CacheError) else f"{type(error).__name__}: {text}")[:300]
