"""Which rows the Pallas kernels take: those of the package, and others by what their parts hold."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, RowFormat, Scales, codec, index_format, kv_format
from dsv4_jax.ops.gather import gather_rows
from dsv4_jax.pallas import attend, emit, gather, index_scores

from ..ops.test_append_gather import random_rows

KV = {"fp8", "fp8_per_entry", "bf16", "f32"}
KEYS = {"fp4", "fp8", "bf16", "f32"}


@pytest.mark.parametrize("widths", [(512, 64, 128), (96, 32, 32), (32, 8, 16), (76, 12, 34)])
def test_formats_of_the_package_are_taken(widths: tuple[int, int, int]) -> None:
    *of_row, of_key = widths

    def kv(kernel: ModuleType) -> set[str]:
        return {n for n in KV_FORMATS if kernel.unsupported_rows(kv_format(n, *of_row)) is None}

    def keys(kernel: ModuleType) -> set[str]:
        return {n for n in INDEX_FORMATS if kernel.unsupported_rows(index_format(n, of_key)) is None}

    assert kv(emit) >= KV and keys(emit) >= KEYS
    assert kv(gather) >= KV and keys(gather) >= KEYS
    assert keys(index_scores) >= KEYS
    assert kv(attend) == ({"fp8"} if widths[0] in (512, 96) else set())


def with_scales(fmt: RowFormat, group: int, width: int | None = None, floor: float | None = None) -> RowFormat:
    """The format with other scales."""
    *codes, part = fmt.parts
    (scales,) = fmt.scales
    other = Scales(scales.code, group, scales.floor if floor is None else floor)
    width = fmt.groups(other) if width is None else width
    return dataclasses.replace(fmt, parts=(*codes, dataclasses.replace(part, width=width, holds=other)))


ROW, KEY = kv_format("fp8", 512, 64), index_format("fp4", 128)


@pytest.mark.parametrize(
    ("fmt", "takers"),
    [
        (with_scales(ROW, 64, 16), {emit, gather, attend}),  # more padding
        (with_scales(ROW, 64, floor=1e-6), {emit, gather, attend}),
        (with_scales(ROW, 32), {gather}),
        (with_scales(ROW, 48), set()),
        (with_scales(KEY, 32, floor=1e-6), {emit, gather, index_scores}),
        (with_scales(KEY, 32, 8), {gather, index_scores}),
        (with_scales(KEY, 16), {gather, index_scores}),
        (with_scales(index_format("fp8", 128), 256), {emit, gather, index_scores}),
        (with_scales(index_format("fp8", 128), 64), set()),
    ],
    ids=lambda x: x.contents if isinstance(x, RowFormat) else "",
)
def test_other_scales(fmt: RowFormat, takers: set[ModuleType]) -> None:
    assert {k for k in (emit, gather, attend, index_scores) if k.unsupported_rows(fmt) is None} == takers
    for kernel in (emit, gather, attend, index_scores):
        assert fmt.contents in (kernel.unsupported_rows(fmt) or fmt.contents)


@pytest.mark.parametrize(
    "fmt",
    [with_scales(ROW, 32), with_scales(kv_format("fp8", 232, 24), 16), with_scales(KEY, 16)],
    ids=lambda f: f.contents,
)
def test_gather_reads_other_groups(fmt: RowFormat) -> None:
    rows = random_rows(np.random.default_rng(0), fmt, 20)
    ids = jnp.asarray([[3, 19], [0, 7]], jnp.int32)
    got = gather_rows(tuple(map(jnp.asarray, rows)), ids, fmt=fmt, dtype=jnp.float32, implementation="pallas")
    values = jax.jit(lambda parts: codec(fmt).decode(fmt, parts))(tuple(part[np.asarray(ids)] for part in rows))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(values))
