"""Named argument shapes that every implementation of an op is tested with."""

from __future__ import annotations

from dsv4_jax.bench.shapes import QUICK
from dsv4_jax.bench.shapes import AttendShape as AttendSpec
from dsv4_jax.bench.shapes import ScoreShape as ScoreSpec
from dsv4_jax.formats import RowFormat, index_format, kv_format

__all__ = ["ATTEND", "ATTEND_V4", "INDEX_SCORES", "AttendSpec", "ScoreSpec"]

_V4 = {case.op: case.make(case.batches[0]) for case in QUICK}  # V4 widths, shared with the benchmark


def _kv(name: str, dim: int = 32, rope: int = 8) -> RowFormat:
    return kv_format(name, dim, rope)


ATTEND = {
    "swa": AttendSpec(5, 4, 8, 0, _kv("fp8")),
    "csa": AttendSpec(7, 4, 8, 6, _kv("fp8")),
    "hca_many_tokens": AttendSpec(37, 2, 4, 19, _kv("fp8")),
    "fp8_per_entry": AttendSpec(3, 4, 8, 5, _kv("fp8_per_entry")),
    "bf16": AttendSpec(3, 4, 8, 5, _kv("bf16")),
    "f32_window_of_one": AttendSpec(3, 1, 1, 5, _kv("f32")),
    "v4_widths": _V4["attend"],
}
# The same at widths that kernels are built for: what they have in common with the reference.
ATTEND_V4 = {
    name: AttendSpec(spec.tokens, spec.heads, spec.window, spec.entries, _kv(spec.fmt.name, 512, 64))
    for name, spec in ATTEND.items()
}

INDEX_SCORES = {
    "fp4": ScoreSpec(5, 16, 3, 8, index_format("fp4", 32)),
    "fp8": ScoreSpec(5, 16, 3, 8, index_format("fp8", 32)),
    "bf16": ScoreSpec(3, 4, 2, 4, index_format("bf16", 16)),
    "f32_many_tokens": ScoreSpec(37, 4, 2, 4, index_format("f32", 16)),
    "v4_widths": _V4["index_scores"],
    "v4_fp8": ScoreSpec(5, 16, 3, 16, index_format("fp8", 128)),
}
