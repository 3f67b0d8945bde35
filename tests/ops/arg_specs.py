"""Named argument shapes that every implementation of an op is tested with."""

from __future__ import annotations

import dataclasses

from dsv4_jax.formats import RowFormat, index_format, kv_format


@dataclasses.dataclass(frozen=True)
class AttendSpec:
    tokens: int
    heads: int
    window: int
    entries: int  # most compressed keys per token; 0: SWA
    fmt: RowFormat


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
    tokens: int
    heads: int
    blocks: int
    rows_per_block: int
    fmt: RowFormat


def _kv(name: str, dim: int = 32, rope: int = 8) -> RowFormat:
    return kv_format(name, dim, rope)


ATTEND = {
    "swa": AttendSpec(5, 4, 8, 0, _kv("fp8")),
    "csa": AttendSpec(7, 4, 8, 6, _kv("fp8")),
    "hca_many_tokens": AttendSpec(37, 2, 4, 19, _kv("fp8")),
    "fp8_per_entry": AttendSpec(3, 4, 8, 5, _kv("fp8_per_entry")),
    "bf16": AttendSpec(3, 4, 8, 5, _kv("bf16")),
    "f32_window_of_one": AttendSpec(3, 1, 1, 5, _kv("f32")),
    "v4_widths": AttendSpec(2, 16, 128, 64, _kv("fp8", 512, 64)),
}

INDEX_SCORES = {
    "fp4": ScoreSpec(5, 16, 3, 8, index_format("fp4", 32)),
    "fp8": ScoreSpec(5, 16, 3, 8, index_format("fp8", 32)),
    "bf16": ScoreSpec(3, 4, 2, 4, index_format("bf16", 16)),
    "f32_many_tokens": ScoreSpec(37, 4, 2, 4, index_format("f32", 16)),
    "v4_widths": ScoreSpec(2, 64, 2, 32, index_format("fp4", 128)),
}
