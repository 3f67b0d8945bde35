"""The record of a benchmark run: one JSON object, the same from every benchmark. Imports no jax.

    {"schema": 1, "commit": "1d7c694", "date": "2026-11-21", "device": "NVIDIA H200", "command": "...",
     "software": {"jax": "0.11.2"}, "quick": false, "ceilings": {"copy_gb_per_s": 4270}, "note": "...",
     "rows": [{"table": "ops", "op": "attend", "shape": "csa-flash", "batch": 64, ...}, ...]}

`commit` is the short hash of the code that was measured, with a plus sign if files differed from it. A row names its
table in `TABLES`, which says what a row may hold; what a row leaves out is null. Files of this form in
`benchmarks/records/` are what `dsv4-jax bench --render` makes the pages of results from.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..errors import OptionError
from ..untrusted import read_json
from .targets import elsewhere

__all__ = ["SCHEMA", "TABLES", "Measurement", "Table", "check", "commit", "dumps", "load", "new_record"]

SCHEMA = 1
_MAX_BYTES = 1 << 26  # of a file
Row: TypeAlias = Mapping[str, Any]
# "number": one, or [low, high] of several runs; "parts": numbers, or settings, by name.
Kind: TypeAlias = Literal["text", "number", "flag", "parts"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One op at a shape with an implementation: a row of the table `ops`. None: not measured, or no such target.

    Attributes:
        op, shape, batch, context: see `shapes.Case`.
        implementation: ours, a baseline of `measure.BASELINES`, or another system.
        variant: how it was run where that is not the default, such as "latency", "warm" or "8x4".
        tuning: a setting tried beside the default: kept in the record, not shown.
        timer: what `kernel_us` comes from: "graph" (CUDA-graph replays) or "profiler"; if there is only `us`,
            "wall", or "chain" (what an executable takes more with one more of them).
        us, kernel_us, kernels: wall time of a call; device time of its kernels, in all and by kernel.
        bytes, flops: what the shape cannot do without (see `shapes`).
        gb_per_s, tflop_per_s, of_copy, of_matmul: from `kernel_us` where there is one, else from `us`.
        floor_us, of_floor: the larger of bytes / copy and FLOPs / matmul ceiling, and its share of the time.
        required_us, goal_us: targets, or as shares of the copy ceiling required_of_copy, goal_of_copy.
        peer_us: the best other system's time.
        verdict: "goal", "required" or "missed".
        relative_error: norm of the difference over norm of the reference; for ids, the share that differs.
        correct: whether that is within the op's tolerance.
        batch_invariant: rows have the same bits in smaller batches (only if asked for).
        problem: why there is no measurement.
    """

    op: str
    shape: str
    batch: int
    implementation: str
    variant: str | None = None
    tuning: bool = False
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
    required_us: float | None = None
    goal_us: float | None = None
    required_of_copy: float | None = None
    goal_of_copy: float | None = None
    peer_us: float | None = None
    verdict: str | None = None
    relative_error: float | None = None
    correct: bool | None = None
    batch_invariant: bool | None = None
    problem: str | None = None

    @property
    def best_us(self) -> float | None:
        """The time that counts: of the kernels, or wall time where there is no other."""
        return self.us if self.kernel_us is None else self.kernel_us


@dataclasses.dataclass(frozen=True)
class Table:
    """Describes what rows of a table hold.

    Attributes:
        fields: name -> kind of value.
        key: the fields that identify a row: of two rows with the same key the one of the later record is shown.
    """

    fields: Mapping[str, Kind]
    key: tuple[str, ...]


def _fields(**kinds: str) -> dict[str, Kind]:
    """Returns kinds by name, of several names a kind: `text="what unit"`."""
    return {name: kind for kind, names in kinds.items() for name in names.split()}  # type: ignore[misc]


def _kind(annotation: str) -> Kind:
    base = annotation.removesuffix(" | None")
    kinds: dict[str, Kind] = {"str": "text", "bool": "flag", "int": "number", "float": "number"}
    return kinds.get(base, "parts")


TABLES: dict[str, Table] = {
    "ops": Table(
        {f.name: _kind(str(f.type)) for f in dataclasses.fields(Measurement)},
        ("op", "shape", "batch", "implementation", "variant", "timer"),
    ),
    # Whole decode steps, or of prefill with `chunk` tokens a request, as `step.measure_step` reports them; times are of
    # one step.
    "steps": Table(
        _fields(
            text="model implementation key_split verdict problem",
            number="layers batch context chunk loop compile_s cache_gb temp_mb command_buffers custom_calls step_ms "
            "dispatch_us first_dispatch_us floor_ms over_floor gb_per_s kernel_ms required_over_floor goal_over_floor "
            "tokens_per_s required_ms goal_ms",
            flag="cache_in_place",
            parts="floor_us kernels xla",
        ),
        ("model", "batch", "context", "chunk", "loop", "implementation", "key_split"),
    ),
    # Steps of whole layers with weights as released, of prefill with `chunk` tokens a request, as
    # `model.measure_model` reports them. `experts`: how many a layer reads, on average; `kinds`: layers of each kind of
    # attention; `layer_ms`: of the step, head and all; `token_ms`: of a step with drafts over the tokens it gives if
    # `model.ACCEPTED` of them are accepted.
    "models": Table(
        _fields(
            text="model implementation key_split exchange verdict problem",
            number="layers batch context chunk devices tensor drafts loop compile_s weights_gb cache_gb temp_mb "
            "launches tokens_per_s experts token_ms exchange_ms required_ms goal_ms "
            "step_ms layer_ms dispatch_us first_dispatch_us floor_ms layer_floor_ms over_floor moved_gb gb_per_s "
            "kernel_ms required_over_floor goal_over_floor",
            flag="cache_in_place",
            parts="kinds floor_us kernels xla exchange_us",
        ),
        (
            "model",
            "layers",
            "batch",
            "context",
            "chunk",
            "loop",
            "implementation",
            "key_split",
            "devices",
            "tensor",
            "drafts",
            "exchange",
        ),
    ),
    # Prompts continued by `dsv4-jax generate`, as it reports them; `bench_step_ms`: the step as `models` times it.
    "generate": Table(
        _fields(
            text="model weights kv_format index_format",
            number="layers devices tensor prompts decode_steps drafts max_batch chunk_tokens prompt_tokens new_tokens "
            "decoded decode_calls decode_rows cached_tokens cache_bytes load_s compile_s prefill_s decode_s "
            "prefill_tokens_per_s decode_tokens_per_s step_ms bench_step_ms",
            flag="prefix_caching",
            parts="host_us",
        ),
        ("model", "layers", "devices", "tensor", "prompts", "prompt_tokens", "decode_steps", "drafts"),
    ),
    # Blocks between the device and pinned host memory: times, and shares of the copy ceiling.
    "swap": Table(
        _fields(
            text="ids direction implementation problem",
            number="blocks us latency_us kernel_us gb_per_s of_copy kernel_of_copy required_of_copy",
        ),
        ("blocks", "ids", "direction", "implementation"),
    ),
    # The storage tier against the disk of the same round; shares: median, least and most of the rounds.
    "store": Table(
        _fields(
            text="what",
            number="load_from load_to write_gb_per_s read_gb_per_s write_share write_shares read_share read_shares",
        ),
        ("what", "load_from"),
    ),
    # Simulated traces: what a policy finds and moves.
    "simulate": Table(
        _fields(
            text="trace policy options",
            number="hit_rate host_hit_rate of_endless of_clairvoyant recomputed_tokens out_gib in_gib "
            "first_token_mean_s first_token_p99_s steps",
        ),
        ("trace", "policy"),
    ),
    # Single numbers, such as the manager's times.
    "facts": Table(
        _fields(text="subject what unit verdict", number="measured at_least at_most"),
        ("subject", "what", "unit"),
    ),
}
_TOP = _fields(text="commit date device command note", number="schema", flag="quick", parts="software ceilings")
_REQUIRED = ("schema", "commit", "date", "device", "command", "rows")


def new_record(
    rows: Sequence[Row],
    *,
    device: str,
    command: str,
    software: Mapping[str, str],
    ceilings: Mapping[str, float],
    quick: bool = False,
) -> dict[str, Any]:
    """Makes the record of a run of today, of the code in this checkout; rows as `targets.elsewhere` leaves them."""
    return {
        "schema": SCHEMA,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": device,
        "command": command,
        "software": dict(software),
        "quick": quick,
        "ceilings": dict(ceilings),
        "rows": [elsewhere(row, device) for row in rows],
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


def load(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Reads the records of a folder, by file name, from the oldest to the newest (by date, then by name).

    Raises:
        OptionError: there is none, or a file does not hold a record that `check` accepts.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.name] = check(read_json(path, _MAX_BYTES))
        except (OptionError, ValueError) as error:
            raise OptionError(f"{path}: {error}") from None
    if not found:
        raise OptionError(f"there are no records in {folder}")
    return dict(sorted(found.items(), key=lambda item: (item[1]["date"], item[0].removesuffix(".json"))))


def check(record: Any) -> dict[str, Any]:
    """Returns the record if it is one to keep, else raises `OptionError`, which names the row and the field."""
    if not isinstance(record, dict) or not isinstance(record.get("rows"), list):
        raise OptionError("not an object with rows")
    if record.get("schema") != SCHEMA:
        raise OptionError(f"schema {record.get('schema')!r}, expected {SCHEMA}")
    _check_values(record, {**_TOP, "rows": "list"}, "the record")
    for name in _REQUIRED:
        if not record.get(name):
            raise OptionError(f"the record says no {name}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]):
        raise OptionError(f"date {record['date']!r} is not YYYY-MM-DD")
    if record.get("quick"):
        raise OptionError("a quick run measures nothing")
    for i, row in enumerate(record["rows"]):
        table = TABLES.get(str(row.get("table"))) if isinstance(row, dict) else None
        if table is None:
            raise OptionError(f"row {i} names no table of {', '.join(TABLES)}")
        _check_values(row, {**table.fields, "table": "text"}, f"row {i}")
    return record


def _check_values(values: Mapping[str, Any], kinds: Mapping[str, str], where: str) -> None:
    for name, value in values.items():
        if name not in kinds:
            raise OptionError(f"{where} has an unknown field {name!r}")
        if value is not None and not _fits(value, kinds[name]):
            raise OptionError(f"{where}: {name} is {value!r}, expected {kinds[name]}")


def _fits(value: Any, kind: str) -> bool:
    if kind != "number":
        return isinstance(value, {"text": str, "flag": bool, "parts": dict, "list": list}[kind])
    if isinstance(value, list):
        return len(value) == 2 and all(_fits(x, kind) and not isinstance(x, list) for x in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
