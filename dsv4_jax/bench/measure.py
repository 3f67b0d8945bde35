"""Measuring: an op at a shape with an implementation, timed, checked against the reference and judged."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ..errors import CacheError
from ..ops.registry import NAMES, find
from . import torch_ops
from .ops import BATCHED_OPS, Problem, problem, registered
from .records import Measurement
from .shapes import AttendShape, Case, Shape
from .targets import TARGETS, Target, verdict
from .timing import Ceilings, Timing, call_count, time_problem

__all__ = [
    "BASELINES",
    "IMPLEMENTATIONS",
    "default_implementations",
    "is_batch_invariant",
    "measure",
    "one_line",
    "outcome",
    "relative_error",
    "why_not",
]

BASELINES = ("lax.top_k", "torch")
IMPLEMENTATIONS = (*NAMES, *BASELINES)
MAX_COMPARED = 1 << 24  # elements of a result that are compared: the first rows


def default_implementations(op: str) -> list[str]:
    """Names what is measured of an op by default: its kernels, the reference and its baselines."""
    names = [name for name in registered(op).names if name != "xla"]
    return [*names, "xla", *(["lax.top_k"] if op == "top_k" else []), *(["torch"] if op in torch_ops.OPS else [])]


def why_not(op: str, implementation: str) -> str | None:
    """Says why an implementation cannot be measured here, None if it can (or only trying it will tell)."""
    if implementation == "torch":
        return torch_ops.why_not(op)
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
    invariance: bool = False,
    on_done=None,
) -> list[Measurement]:
    """Measures each implementation, all on the same arguments.

    What an implementation raises becomes its `problem`; `on_done()` follows each. Without ceilings nothing is put in
    relation to them.
    """
    shape = case.make(batch)
    bytes_moved, flops = shape.bytes_moved, shape.flops
    floor = required = goal = None
    target = Target() if quick or ceilings is None else TARGETS.get((case.op, case.name, batch), Target())
    if ceilings is not None:
        floor = ceilings.floor_us(bytes_moved, flops)
        required, goal = target.limits(bytes_moved, ceilings.copy)
    variant = shape.key_split if isinstance(shape, AttendShape) and shape.key_split != "throughput" else None
    base = Measurement(
        case.op,
        case.name,
        batch,
        "",
        variant=variant,
        context=case.context,
        bytes=bytes_moved,
        flops=flops,
        floor_us=floor,
        required_us=required,
        goal_us=goal,
        required_of_copy=target.required_of_copy,
        goal_of_copy=target.goal_of_copy,
        peer_us=target.peer,
    )
    found: list[Measurement] = []
    inputs, want = None, []
    for name in names:
        made = dataclasses.replace(base, implementation=name, problem=why_not(case.op, name))
        if made.problem is None:
            try:
                if inputs is None:
                    inputs = _inputs(case.op, shape, quick)
                    want = outcome(inputs, "xla")
                got = want if name == "xla" else None
                made = _measured(made, shape, inputs, want, got, ceilings, quick=quick, invariance=invariance)
            except Exception as error:  # an implementation may fail in any way; the others still count
                made = dataclasses.replace(made, problem=one_line(error))
        found.append(made)
        if on_done:
            on_done()
    return found


def _inputs(op: str, shape: Shape, quick: bool) -> Problem:
    calls = call_count(shape.bytes_moved, quick=quick)
    return problem(op, shape, calls, pool_rows=1 << (10 if quick else 20))


def _measured(
    base: Measurement,
    shape: Shape,
    inputs: Problem,
    want: list[np.ndarray],
    got: list[np.ndarray] | None,
    ceilings: Ceilings | None,
    *,
    quick: bool,
    invariance: bool,
) -> Measurement:
    """Times one implementation and compares its results, `got` if they are known, with the reference's."""
    repeats = 2 if quick else 12
    if base.implementation == "torch":
        us, got = torch_ops.measure(base.op, shape, inputs, repeats=repeats)
        timing = Timing(us, {"graph": us}, "graph")
    else:
        got = got or outcome(inputs, base.implementation)
        timing = time_problem(inputs, base.implementation, repeats=repeats)
    error = max(relative_error(a[: len(b)], b) for a, b in zip(got, want, strict=True))
    invariant = None
    if invariance and base.op in BATCHED_OPS and base.implementation not in BASELINES:
        invariant = is_batch_invariant(inputs, base.implementation, base.batch)
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
        verdict=verdict(us, base.required_us, base.goal_us),
        relative_error=error,
        correct=error <= (torch_ops.TOLERANCE if base.implementation == "torch" else inputs.tolerance),
        batch_invariant=invariant,
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


def is_batch_invariant(inputs: Problem, implementation: str, batch: int) -> bool:
    """Says whether rows of the first call have the same bits in batches of 1, 2, 16 and 64."""
    whole = outcome(inputs, implementation, slice(None))
    share = whole[0].shape[0] // batch  # rows that a gather makes per request
    for size in (1, 2, 16, 64):
        for first in {0, (batch - size) // 2} if size < batch else ():
            rows = slice(first * share, (first + size) * share)
            part = outcome(inputs, implementation, rows)
            if not all(np.array_equal(a[rows], b, equal_nan=False) for a, b in zip(whole, part, strict=True)):
                return False
    return True


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
