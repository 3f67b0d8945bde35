"""Every row format, byte for byte against the NumPy codecs of `tests/oracle/rows.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dsv4_jax.errors import LayoutError
from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, Codes, RowFormat, codec, index_format, kv_format

from ..oracle import rows as oracle

KV_WIDTHS = [(512, 64), (32, 8), (10, 2), (64, 24), (136, 6)]  # head_dim, rope_dim
INDEX_WIDTHS = [16, 32, 34, 128]
FORMATS = [kv_format(name, *width) for name in KV_FORMATS for width in KV_WIDTHS] + [
    index_format(name, width) for name in INDEX_FORMATS for width in INDEX_WIDTHS
]
F32 = np.finfo(np.float32)


def label(fmt: RowFormat) -> str:
    return f"{'kv' if fmt.rope_dim else 'index'}-{fmt.name}-{fmt.dim}"


@functools.cache
def jitted(fmt: RowFormat, direction: str, dtype=jnp.float32):
    if direction == "encode":
        return jax.jit(lambda x: codec(fmt).encode(fmt, x))
    return jax.jit(lambda parts: codec(fmt).decode(fmt, parts, dtype))


def assert_bytes(actual, expected, what: str) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    nan = np.isnan(actual) & np.isnan(expected) if actual.dtype.kind == "f" else np.zeros(actual.shape, bool)
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[actual.dtype.itemsize]
    bad = (actual.view(width) != expected.view(width)) & ~nan
    assert not bad.any(), f"{what}: {bad.sum()} differ, at {np.argwhere(bad)[0]}: {actual[bad][:4]} {expected[bad][:4]}"


def check(fmt: RowFormat, x: np.ndarray, *, jit: bool = True) -> None:
    encode = jitted(fmt, "encode") if jit else functools.partial(codec(fmt).encode, fmt)
    decode = jitted(fmt, "decode") if jit else functools.partial(codec(fmt).decode, fmt)
    stored, expected = encode(x), oracle.encode(fmt, x)
    assert len(stored) == len(fmt.parts)
    for part, actual, want in zip(fmt.parts, stored, expected, strict=True):
        assert (str(actual.dtype), actual.shape[-1]) == (part.dtype, part.width)
        if fmt.dense_dtype == "float32":  # bit patterns survive, NaN payloads included
            actual, want = np.asarray(actual).view(np.uint32), want.view(np.uint32)
        assert_bytes(actual, want, f"{label(fmt)} {part.name}")
    assert_bytes(decode(stored), oracle.decode(fmt, expected), f"{label(fmt)} decoded")


@functools.cache
def ladder(dim: int) -> np.ndarray:
    """Rows at every magnitude, on every rounding tie and scale boundary, and with every odd value."""
    rng = np.random.default_rng(dim)
    x = [rng.standard_normal((24, dim)) * 10.0 ** rng.integers(-38, 38, (24, 1))]
    x += [rng.standard_normal((8, dim)) * 10.0 ** rng.uniform(-8, 8, (8, dim))]  # wide range within a row
    # Subnormals, the smallest normals, the largest numbers, zeros of both signs.
    x += [np.full((1, dim), v) for v in (0.0, -0.0, 1e-45, -1e-40, F32.tiny, -F32.tiny, F32.max, -F32.max)]
    x += [rng.choice([0.0, -0.0, 1e-42, F32.tiny, 1e-30, -3e-38], (4, dim))]
    # amax exactly at, one ulp under and one ulp over limit * 2^k, and around the amax floor.
    for limit in (448.0, 6.0, 1.0, 1e-4, 1.5 * 2.0**-125):
        for k in (-20, -1, 0, 7, 100):
            top = np.float32(limit * 2.0**k)
            for amax in (np.nextafter(top, np.float32(0)), top, np.nextafter(top, F32.max)):
                row = rng.uniform(-1, 1, dim).astype(np.float32) * amax
                row[0], row[-1] = amax, -amax
                x.append(row[None])
    # Midpoints of both grids, in a row whose scale is exactly one.
    e4m3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for grid, top in ((e4m3, 448.0), (np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32), 6.0)):
        ties = np.concatenate([(grid[1:] + grid[:-1]) / 2, -(grid[1:] + grid[:-1]) / 2, grid, -grid])
        ties = np.resize(ties, (-(-ties.size // (dim - 1)), dim - 1))
        for shift in range(min(dim, 32)):  # every group of a row sees the top value somewhere
            x.append(np.insert(ties[shift % len(ties)], shift, top)[None])
    for values in ((np.nan,), (np.inf,), (-np.inf,), (np.nan, np.inf, -np.inf)):
        row = rng.standard_normal((3, dim))
        row[0, rng.integers(dim)] = values[0]
        row[1] = rng.choice([*values, 1.0, 1e30], dim)
        row[2] = values[0]
        x.append(row)
    with np.errstate(over="ignore"):
        return np.concatenate(x).astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=label)
def test_ladder(fmt: RowFormat) -> None:
    check(fmt, ladder(fmt.dim))


def test_infinities_of_narrow_rows_are_what_their_codecs_say() -> None:
    for name, index, highest in (
        ("fp8", False, np.inf),
        ("fp8_per_entry", False, F32.max),
        ("fp8", True, np.inf),
        ("fp4", True, np.inf),
    ):
        fmt = index_format(name, 128) if index else kv_format(name, 512, 64)
        stored = codec(fmt).encode(fmt, jnp.zeros((1, fmt.dim)).at[0, :2].set(jnp.array([np.inf, -np.inf])))
        assert codec(fmt).decode(fmt, stored)[0, :3].tolist() == [highest, -highest, 0], label(fmt)
        assert codec(fmt).decode(fmt, stored, jnp.bfloat16)[0, :3].tolist() == [np.inf, -np.inf, 0], label(fmt)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.dim in (512, 128)], ids=label)
def test_eager_equals_jit(fmt: RowFormat) -> None:
    check(fmt, ladder(fmt.dim)[::7], jit=False)


@pytest.mark.parametrize("name", ["fp8", "fp8_per_entry", "bf16", "f32"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_kv_row(name: str, data: st.DataObject) -> None:
    x = data.draw(arrays(np.float32, (2, 136), elements=st.floats(width=32)))
    check(kv_format(name, 136, 6), x)


@pytest.mark.parametrize("name", ["fp4", "fp8", "bf16", "f32"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_index_key(name: str, data: st.DataObject) -> None:
    x = data.draw(arrays(np.float32, (2, 34), elements=st.floats(width=32)))
    check(index_format(name, 34), x)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.dim in (512, 128)], ids=label)
def test_decode_to_bf16_rounds_the_float32_value(fmt: RowFormat) -> None:
    x = ladder(fmt.dim)[:40]
    stored = oracle.encode(fmt, x)
    with np.errstate(over="ignore"):
        expected = oracle.decode(fmt, stored).astype(ml_dtypes.bfloat16)
    tiny = np.abs(expected.astype(np.float32)) < F32.tiny  # XLA may flush what f32 rows hold below it
    actual = np.where(tiny, expected, np.asarray(jitted(fmt, "decode", jnp.bfloat16)(stored)))
    assert_bytes(actual, expected, label(fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=label)
def test_never_written_rows_decode_to_zero(fmt: RowFormat) -> None:
    rows = len(ladder(fmt.dim))  # a shape that is compiled already
    zeros = tuple(np.zeros((rows, p.width), p.dtype) for p in fmt.parts)
    assert not np.asarray(jitted(fmt, "decode")(zeros)).any()


# What codes promise to users: the largest error, as a share of the value and as a share of the row's largest.
PROMISED = {"e4m3": (1 / 16, 2.0**-17), "e2m1": (0, 1 / 3), "bf16": (1 / 256, 0), "f32": (0, 0)}


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.quantised], ids=label)
def test_quantisation_error_bounds(fmt: RowFormat) -> None:
    rows = len(ladder(fmt.dim))  # about 200, a shape that is compiled already
    x = np.random.default_rng(0).standard_normal((rows, fmt.dim)).astype(np.float32)
    y = np.asarray(jitted(fmt, "decode")(jitted(fmt, "encode")(x)))
    first = 0
    for codes in (holds for holds in fmt.holds if isinstance(holds, Codes)):
        of_value, of_top = PROMISED[codes.code]
        dims = slice(first, first + codes.dims)
        bound = np.maximum(np.abs(x[:, dims]) * of_value, np.abs(x[:, dims]).max(1, keepdims=True) * of_top)
        assert (np.abs(x - y)[:, dims] <= bound).all(), codes
        first += codes.dims
    assert first == fmt.dim


def test_rows_encode_independently() -> None:
    """A row's bytes do not depend on its neighbours or on the batch shape."""
    fmt = kv_format("fp8", 136, 6)
    x = ladder(136)
    whole = jitted(fmt, "encode")(x)
    for i in (0, 17, 60):
        for part, one in zip(whole, jitted(fmt, "encode")(x[i : i + 1]), strict=True):
            assert_bytes(part[i : i + 1], one, f"row {i}")


KV_BYTES = {"fp8": 584, "fp8_per_entry": 580, "bf16": 1024, "f32": 2048}
INDEX_BYTES = {"fp4": 68, "fp8": 132, "bf16": 256, "f32": 512}


def test_row_bytes_at_v4_widths() -> None:
    assert {n: kv_format(n, 512, 64).row_bytes for n in KV_BYTES} == KV_BYTES
    assert {n: index_format(n, 128).row_bytes for n in INDEX_BYTES} == INDEX_BYTES


def test_unknown_formats_are_named() -> None:
    with pytest.raises(LayoutError, match="fp5"):
        kv_format("fp5", 512, 64)
    with pytest.raises(LayoutError, match="fp8_per_entry"):
        index_format("fp8_per_entry", 128)
