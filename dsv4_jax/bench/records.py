"""One measurement: an op at a shape with an implementation, timed, checked against the reference and judged."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from .. import ffi
from ..errors import CacheError
from ..ops.dispatch import has_kernel
from . import torch_ops
from .ceilings import Ceilings
from .ops import BATCHED_OPS, Problem, dispatch_op, problem
from .shapes import Case, Shape
from .targets import TARGETS, Target, verdict
from .timing import Timing, call_count, time_problem

__all__ = [
    "BASELINES",
    "IMPLEMENTATIONS",
    "Record",
    "default_implementations",
    "is_batch_invariant",
    "measure",
    "one_line",
    "outcome",
    "relative_error",
    "why_not",
]

ROOMS = ("cuda", "pallas", "triton")
BASELINES = ("lax.top_k", "torch")
IMPLEMENTATIONS = (*ROOMS, "xla", *BASELINES)
MOST_COMPARED = 1 << 24  # elements of a result that are compared: the first rows


@dataclasses.dataclass(frozen=True)
class Record:
    """See `dsv4_jax bench --help` for the terms. None: not measured, no such target.

    Attributes:
        us, kernel_us, kernels: wall time of a call; device time of its kernels, in all and by kernel.
        bytes, flops: what the shape cannot do without (see `shapes`).
        gb_per_s, tflop_per_s, of_copy, of_matmul: from `kernel_us` where there is one, else from `us`.
        floor_us, of_floor: the larger of bytes / copy and FLOPs / matmul ceiling, and its share of the time.
        verdict: "aim", "must" or "missed".
        relative_error: norm of the difference over norm of the reference; for ids, the share that differs.
        correct: whether that is within the op's tolerance.
        batch_invariant: rows have the same bits in smaller batches (only if asked for).
        problem: why there is no measurement.
    """

    op: str
    shape: str
    implementation: str
    batch: int
    context: int | None
    bytes: int
    flops: int
    floor_us: float
    us: float | None = None
    kernel_us: float | None = None
    kernels: dict[str, float] | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    of_copy: float | None = None
    of_matmul: float | None = None
    of_floor: float | None = None
    must_us: float | None = None
    aim_us: float | None = None
    peer_us: float | None = None
    verdict: str | None = None
    relative_error: float | None = None
    correct: bool | None = None
    batch_invariant: bool | None = None
    problem: str | None = None

    @property
    def best_us(self) -> float | None:
        return self.us if self.kernel_us is None else self.kernel_us


def default_implementations(op: str) -> list[str]:
    """The kernels that exist for an op, the reference and its baselines."""
    names = [room for room in ROOMS if has_kernel(dispatch_op(op), room)]
    return [*names, "xla", *(["lax.top_k"] if op == "top_k" else []), *(["torch"] if op in torch_ops.OPS else [])]


def why_not(op: str, implementation: str) -> str | None:
    """Why an implementation cannot be measured here, None if it can (or only trying it will tell)."""
    if implementation == "torch":
        return torch_ops.why_not(op)
    if implementation == "lax.top_k":
        return None if op == "top_k" else "a baseline of top_k"
    if implementation == "xla":
        return None
    if not has_kernel(dispatch_op(op), implementation):
        return "no kernel"
    if (backend := jax.default_backend()) != "gpu":
        return f"the backend is {backend}"
    return ffi.cuda_problem(dispatch_op(op)) if implementation == "cuda" else None


def measure(
    case: Case, batch: int, names: list[str], ceilings: Ceilings, *, quick: bool, invariance: bool = False, on_done=None
) -> list[Record]:
    """One record per implementation, all on the same arguments.

    What an implementation raises becomes its record's `problem`; `on_done()` follows each.
    """
    shape = case.make(batch)
    bytes_moved, flops = shape.bytes_moved, shape.flops
    floor = ceilings.floor_us(bytes_moved, flops)
    target = TARGETS.get((case.op, case.name, batch), Target())
    must, aim = target.limits(bytes_moved, ceilings.copy) if not quick else (None, None)
    base = Record(
        case.op, case.name, "", batch, case.context, bytes_moved, flops, floor, must_us=must, aim_us=aim,
        peer_us=target.peer,
    )  # fmt: skip
    records: list[Record] = []
    inputs, want = None, []
    for name in names:
        record = dataclasses.replace(base, implementation=name, problem=why_not(case.op, name))
        if record.problem is None:
            try:
                if inputs is None:
                    inputs = _inputs(case.op, shape, quick)
                    want = outcome(inputs, "xla")
                record = _measured(record, shape, inputs, want, ceilings, quick=quick, invariance=invariance)
            except Exception as error:  # an implementation may fail in any way; the others still count
                record = dataclasses.replace(record, problem=one_line(error))
        records.append(record)
        if on_done:
            on_done()
    return records


def _inputs(op: str, shape: Shape, quick: bool) -> Problem:
    calls = call_count(shape.bytes_moved, quick=quick)
    return problem(op, shape, calls, pool_rows=1 << (10 if quick else 20))


def _measured(
    record: Record, shape: Shape, inputs: Problem, want: list[np.ndarray], ceilings: Ceilings, *, quick: bool,
    invariance: bool,
) -> Record:  # fmt: skip
    repeats = 2 if quick else 12
    if record.implementation == "torch":
        us, got = torch_ops.measure(record.op, shape, inputs, repeats=repeats)
        timing = Timing(us, {"graph": us})  # replays of a CUDA graph: device time
    else:
        got = outcome(inputs, record.implementation)
        timing = time_problem(inputs, record.implementation, repeats=repeats)
    error = max(relative_error(a[: len(b)], b) for a, b in zip(got, want, strict=True))
    invariant = None
    if invariance and record.op in BATCHED_OPS and record.implementation not in BASELINES:
        invariant = is_batch_invariant(inputs, record.implementation, record.batch)
    us = timing.us if timing.kernel_us is None else timing.kernel_us
    return dataclasses.replace(
        record,
        us=timing.us,
        kernel_us=timing.kernel_us,
        kernels=timing.kernels,
        gb_per_s=record.bytes / us / 1e3,
        tflop_per_s=record.flops / us / 1e6,
        of_copy=1e6 * record.bytes / us / ceilings.copy,
        of_matmul=1e6 * record.flops / us / ceilings.matmul,
        of_floor=record.floor_us / us,
        verdict=verdict(us, record.must_us, record.aim_us),
        relative_error=error,
        correct=error <= (torch_ops.TOLERANCE if record.implementation == "torch" else inputs.tolerance),
        batch_invariant=invariant,
    )


def outcome(inputs: Problem, implementation: str, rows: slice | None = None) -> list[np.ndarray]:
    """What the first call gives; with `rows`, all of what a batched op gives for these rows of its batch."""

    def run(shared: Any, carry: Any, call: Any) -> Any:
        carry, out = inputs.apply(shared, carry, call, implementation)
        found = inputs.result(carry, out, call)
        return jax.tree.map(lambda x: x[: max(1, MOST_COMPARED * len(x) // x.size)], found) if compared else found

    call, compared = inputs.calls[0], rows is None
    if rows is not None:
        call = jax.tree.map(lambda x: x[rows], call)
    found = jax.jit(run)(inputs.shared, inputs.carry(), call)
    return [np.asarray(x) for x in jax.tree.leaves(found)]


def is_batch_invariant(inputs: Problem, implementation: str, batch: int) -> bool:
    """Whether rows of the first call have the same bits in batches of 1, 2, 16 and 64."""
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
