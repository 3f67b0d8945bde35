"""attend against a float64 NumPy model: the Pallas body interpreted, its lowering for CUDA, and the merge."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import RowFormat, codec, kv_format
from dsv4_jax.ops import attend
from dsv4_jax.ops.append import WindowView
from dsv4_jax.ops.attend import AttendArguments
from dsv4_jax.pallas import attend as kernel

from ..ops.arg_specs import ATTEND_V4
from ..ops.test_attend import AttendTest
from .lowering import lowers_for_cuda

FMT = kv_format("fp8", 512, 64)
SCALE = 512**-0.5


class TestPallasAttend(AttendTest):
    implementation = "pallas"
    specs = ATTEND_V4
    tolerance: ClassVar[dict[str, float]] = dict(rtol=0, atol=0.05)  # bf16 queries and weights; values of size 1
    large = tolerance

    def takes(self, *, fmt: RowFormat) -> bool:
        return fmt.name == "fp8"


def make_rows(rng: np.random.Generator, rows: int):
    """Random fp8 rows: any finite e4m3 code, scales from 2^-9 to 2^-3, so that values stay near 1."""
    nope = rng.integers(0, 0x7F, (rows, 448)) | rng.integers(0, 2, (rows, 448)) << 7
    rope = rng.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16).view(np.uint16)
    scale = rng.integers(127 - 11, 127 - 4, (rows, 8))
    return jnp.asarray(nope, jnp.uint8), jnp.asarray(rope), jnp.asarray(scale, jnp.uint8)


def decode(rows):
    """The float64 values of fp8 rows."""
    nope, rope, scale = (np.asarray(x) for x in rows)
    values = nope.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = np.exp2(scale[:, :7].astype(np.float64) - 127).repeat(64, 1)
    return np.concatenate([values * factor, rope.view(ml_dtypes.bfloat16).astype(np.float64)], 1)


def make_case(rng: np.random.Generator, tokens: int, heads: int, window: int, entries: int, *, count=None):
    """Arguments of `attend`: random ids, ragged windows and counts."""
    first = rng.integers(0, window + 1, tokens)
    visible = np.arange(window)[None] >= first[:, None]
    case = {
        "queries": jnp.asarray(rng.standard_normal((tokens, heads, 512)), jnp.bfloat16),
        "sink": jnp.asarray(rng.standard_normal(heads), jnp.float32),
        "window": make_rows(rng, 3 * window),
        "window_ids": jnp.asarray(rng.integers(0, 3 * window, (tokens, window)), jnp.int32),
        "window_visible": jnp.asarray(visible),
        "entries": None,
        "entry_ids": None,
        "entry_count": None,
    }
    if entries:
        count = rng.integers(0, entries + 1, tokens) if count is None else np.asarray(count)
        case |= {
            "entries": make_rows(rng, 2 * entries),
            "entry_ids": jnp.asarray(rng.integers(0, 2 * entries, (tokens, entries)), jnp.int32),
            "entry_count": jnp.asarray(count, jnp.int32),
        }
    return case


def model(case):
    """The definition in float64: (out, lse)."""
    window = decode(case["window"])
    q = np.asarray(case["queries"].astype(jnp.float32), np.float64)
    outs, lses = [], []
    for t in range(q.shape[0]):
        keys = window[np.asarray(case["window_ids"][t])][np.asarray(case["window_visible"][t])]
        if case["entries"] is not None:
            pool = decode(case["entries"])
            keys = np.concatenate([keys, pool[np.asarray(case["entry_ids"][t])[: int(case["entry_count"][t])]]])
        z = q[t] @ keys.T * SCALE
        weights = np.exp(z)
        outs.append(weights @ keys / (weights.sum(1) + np.exp(np.asarray(case["sink"], np.float64)))[:, None])
        with np.errstate(divide="ignore"):
            lses.append(np.log(weights.sum(1)))
    return np.stack(outs), np.stack(lses)


def check(case, got):
    out, lse = (np.asarray(x, np.float64) for x in got)
    want_out, want_lse = model(case)
    assert np.linalg.norm(out - want_out) <= 3e-3 * np.linalg.norm(want_out)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=0, atol=1e-3)


def run(case, implementation="pallas", fmt=FMT, **last_steps):
    call = functools.partial(attend, scale=SCALE, fmt=fmt, implementation=implementation, **last_steps)
    return jax.jit(lambda c: call(**c))(arguments_of(case))


def arguments_of(case):
    """What `attend` takes, in its order."""
    window = WindowView(case["window"], case["window_ids"], case["window_visible"])
    return {"queries": case["queries"], "sink": case["sink"], "window": window} | {
        name: case[name] for name in ("entries", "entry_ids", "entry_count")
    }


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(
    ("tokens", "heads", "window", "entries"),
    [(3, 4, 128, 200), (2, 64, 70, 64), (2, 130, 60, 70), (1, 16, 128, 0)],
    ids=["ragged", "flash-heads", "many-heads", "window-only"],
)
def test_matches_float64(implementation, tokens, heads, window, entries):
    case = make_case(np.random.default_rng(tokens * heads), tokens, heads, window, entries)
    check(case, run(case, implementation))


def test_output_turned_back_and_rounded():
    case = make_case(np.random.default_rng(4), 2, 4, 60, 0)
    last = dict(inverse_rope=(jnp.array([3, 70_001], jnp.int32), jnp.linspace(1e-4, 1, 32)), dtype=jnp.bfloat16)
    got, want = (run(case, i, **last)[0] for i in ("pallas", "xla"))
    assert got.dtype == want.dtype == jnp.bfloat16
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.linalg.norm(got - want) <= 4e-3 * np.linalg.norm(want)


def test_token_without_keys_gives_zero_and_minus_infinity():
    case = make_case(np.random.default_rng(1), 3, 4, 64, 64, count=[0, 5, 64])
    case["window_visible"] = case["window_visible"].at[0].set(False)
    out, lse = run(case)
    assert not np.asarray(out[0]).any()
    assert np.isneginf(np.asarray(lse[0])).all()
    check(case, (out, lse))


@pytest.mark.slow
def test_unseen_rows_may_hold_anything():
    rng = np.random.default_rng(2)
    case = make_case(rng, 3, 4, 64, 100, count=[0, 40, 99])
    case["window_ids"] = jnp.where(case["window_visible"], case["window_ids"] % 180, 180 + case["window_ids"] % 12)
    counted = jnp.arange(100)[None] < case["entry_count"][:, None]
    case["entry_ids"] = jnp.where(counted, case["entry_ids"] % 190, 190 + case["entry_ids"] % 10)
    clean = run(case)
    poison = lambda parts, row: tuple(p.at[row:].set(np.iinfo(p.dtype).max) for p in parts)  # noqa: E731
    dirty = run(case | {"window": poison(case["window"], 180), "entries": poison(case["entries"], 190)})
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_rows_do_not_depend_on_the_batch():
    case = make_case(np.random.default_rng(3), 5, 8, 64, 300)
    whole = run(case)
    per_token = {"queries", "window_ids", "window_visible", "entry_ids", "entry_count"}
    for t in (0, 4):
        alone = run({k: v[t : t + 1] if k in per_token else v for k, v in case.items()})
        for a, b in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(a[t]), np.asarray(b[0]))


@pytest.mark.parametrize("name", ["bf16", "fp8_per_entry"])
def test_other_formats_are_refused(name):
    fmt = kv_format(name, 64, 16)
    rng = np.random.default_rng(4)
    case = make_case(rng, 2, 4, 16, 20)
    rows = codec(fmt).encode(fmt, jnp.asarray(rng.standard_normal((48, 64)), jnp.float32))
    case |= {"queries": case["queries"][..., :64], "window": rows, "entries": rows}
    with pytest.raises(ImplementationError, match=r"attend: .*'pallas' cannot run: it does not decode rows of"):
        run(case, "pallas", fmt)


def test_a_large_sink_takes_all_the_mass():
    case = make_case(np.random.default_rng(5), 1, 4, 64, 0)
    out, lse = run(case | {"sink": jnp.full(4, 300.0, jnp.float32)})
    np.testing.assert_allclose(np.asarray(out), 0, atol=1e-30)
    np.testing.assert_allclose(np.asarray(lse), model(case)[1], atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["pallas", "cuda"])
@pytest.mark.parametrize(
    ("tokens", "heads", "window", "entries"),
    [(1, 64, 128, 512), (257, 64, 128, 512), (5, 16, 130, 77), (3, 128, 128, 1024), (2, 130, 60, 300), (4, 64, 128, 0)],
)
def test_on_the_gpu(implementation, tokens, heads, window, entries):
    case = make_case(np.random.default_rng(tokens), tokens, heads, window, entries)
    check(case, run(case, implementation))


@pytest.mark.gpu
def test_nan_and_odd_scales_on_the_gpu():
    """A NaN code reaches its own dim of every head that sees it; scale codes 0 and 140 decode exactly."""
    case = make_case(np.random.default_rng(8), 2, 64, 64, 64, count=[64, 64])
    nope, rope, scale = case["entries"]
    scale = scale.at[:4, 0].set(140).at[4:8, 1].set(0)
    nope = nope.at[:4, :64].set(nope[:4, :64] & np.uint8(0x87))
    case["entries"] = (nope, rope, scale)
    check(case, run(case, "cuda"))
    row = int(case["entry_ids"][1, 5])
    out, _ = run(case | {"entries": (nope.at[row, 100].set(0x7F), rope, scale)}, "cuda")
    assert np.isnan(np.asarray(out[1])).all()  # the logits of every head are NaN


@pytest.mark.parametrize("heads", [64, 128])
def test_lowers_for_cuda(heads):
    case = make_case(np.random.default_rng(6), 2, heads, 128, 512)
    call = lambda *arrays: kernel.call(AttendArguments(*arrays, scale=SCALE, fmt=FMT), interpret=False)  # noqa: E731
    assert lowers_for_cuda(call, *arguments_of(case).values()) == 1
