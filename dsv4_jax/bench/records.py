"""The record of a benchmark run: one JSON object, the same from every benchmark. Imports no jax.

    {"schema": 1, "commit": "1d7c694", "date": "2026-11-21", "device": "NVIDIA H200", "command": "...",
     "software": {"jax": "0.11.2"}, "quick": false, "ceilings": {"copy_gb_per_s": 4270}, "note": "...",
     "rows": [{"table": "ops", "op": "attend", "shape": "csa-flash", "batch": 64, ...}, ...]}

`commit` is the short hash of the code that was measured, with a plus sign if files differed from it. A row names its
table: "ops" has `Measurement`s, "steps" and "models" what `step.measure_step` and `model.measure_model` report.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["SCHEMA", "Measurement", "commit", "dumps", "new_record"]

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One op at a shape with an implementation: a row of the table `ops`. None: not measured.

    Attributes:
        op, shape, batch, context: see `shapes.Case`.
        implementation: ours, or a baseline such as "lax.top_k".
        variant: how it was run where that is not the default, such as "latency".
        timer: what `kernel_us` comes from: "profiler"; if there is only `us`, "wall".
        us, kernel_us, kernels: wall time of a call; device time of its kernels, in all and by kernel.
        bytes, flops: what the shape cannot do without (see `shapes`).
        gb_per_s, tflop_per_s, of_copy, of_matmul: from `kernel_us` where there is one, else from `us`.
        floor_us, of_floor: the larger of bytes / copy and FLOPs / matmul ceiling, and its share of the time.
        relative_error: norm of the difference over norm of the reference; for ids, the share that differs.
        correct: whether that is within the op's tolerance.
        problem: why there is no measurement.
    """

    op: str
    shape: str
    batch: int
    implementation: str
    variant: str | None = None
    timer: str | None = None
    context: int | None = None
    bytes: int | None = None
    flops: int | None = None
    floor_us: float | None = None
    us: float | None = None
    kernel_us: float | None = None
    kernels: dict[str, float] | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    of_copy: float | None = None
    of_matmul: float | None = None
    of_floor: float | None = None
    relative_error: float | None = None
    correct: bool | None = None
    problem: str | None = None

    @property
    def best_us(self) -> float | None:
        """The time that counts: of the kernels, or wall time where there is no other."""
        return self.us if self.kernel_us is None else self.kernel_us


def new_record(
    rows: Sequence[Mapping[str, Any]],
    *,
    device: str,
    command: str,
    software: Mapping[str, str],
    ceilings: Mapping[str, float],
    quick: bool = False,
) -> dict[str, Any]:
    """Makes the record of a run of today, of the code in this checkout."""
    return {
        "schema": SCHEMA,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": device,
        "command": command,
        "software": dict(software),
        "quick": quick,
        "ceilings": dict(ceilings),
        "rows": [dict(row) for row in rows],
    }


def dumps(record: Mapping[str, Any]) -> str:
    """Writes the record as a text of JSON, one row a line: nulls left out, numbers in six digits."""
    top = json.dumps(_brief({name: value for name, value in record.items() if name != "rows"}), allow_nan=False)
    rows = ",\n".join(json.dumps(_brief(row), allow_nan=False) for row in record["rows"])
    return f'{top[:-1]}, "rows": [\n{rows}\n]}}\n'


def _brief(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _brief(item) for name, item in value.items() if item is not None}
    return [_brief(item) for item in value] if isinstance(value, list | tuple) else value


@functools.cache
def commit() -> str | None:
    """Returns the short hash of the checkout this code is in, "+" after it if tracked files differ; None if it is in
    none.

    The environment's `DSV4_COMMIT` is taken instead: machines that get a copy of the files have no history.
    """
    if named := os.environ.get("DSV4_COMMIT"):
        return named

    def git(*words: str) -> str:
        folder = pathlib.Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=7", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
