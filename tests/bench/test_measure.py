"""What is measured: that calls do what their shape says, and that errors and failures are seen."""

from __future__ import annotations

import dataclasses
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_ops

from dsv4_jax.bench import measure, timing
from dsv4_jax.bench.ops import problem
from dsv4_jax.bench.shapes import OPS, QUICK, CompressShape, GatherShape
from dsv4_jax.bench.timing import Ceilings
from dsv4_jax.formats import index_format, kv_format

FP8 = kv_format("fp8", 512, 64)
CEILINGS = Ceilings(4e12, 8e14)


def case(op: str):
    return next(c for c in QUICK if c.op == op)


@pytest.mark.parametrize(
    "shape",
    [
        CompressShape("index", 2, index_format("fp8", 128)),
        CompressShape("index", 1, index_format("fp8", 128), 12),
        CompressShape("csa", 1, FP8, 1, index_format("fp4", 128)),
        CompressShape("hca", 2, FP8),
        CompressShape("hca_raw", 1, FP8, 256),
    ],
    ids=lambda s: f"{s.kind}-{s.rows}x{s.length}",
)
@pytest.mark.slow
def test_a_compressor_writes_the_rows_that_are_compared(shape):
    """In each pool exactly one row per entry, and they are the ones `result` looks at."""

    def changed(old, new) -> set[int]:
        return set(np.flatnonzero((np.asarray(old) != np.asarray(new)).any(1)).tolist())

    inputs = problem(shape, 2, pool_rows=0)

    @jax.jit
    def step(shared, carry, call):
        carry, _ = inputs.apply(shared, carry, call, "xla")
        return carry, inputs.result(carry, None, call)

    before = inputs.carry()
    for call in inputs.calls:
        after, compared = step(inputs.shared, before, call)
        emitted, ring = (np.asarray(x) for x in call[-2:])
        assert len(emitted) == shape.rows * max(1, shape.length // shape.ratio)
        for one, old, new, (decoded, rows) in zip(shape.compressors, before, after, compared, strict=True):
            assert set().union(*map(changed, old[1], new[1])) == set(emitted.tolist())
            state = changed(old[0], new[0])
            assert state <= set(ring.tolist()) and len(state) == shape.rows * min(shape.length, shape.ring)
            assert decoded.shape == (len(emitted), one.fmt.dim) and rows.shape == (len(ring), one.state_width)
        before = after


def test_calls_differ_and_a_pool_is_as_large_as_asked():
    inputs = problem(GatherShape(16, FP8), 3, pool_rows=512)
    ids = [tuple(np.asarray(call).tolist()) for call in inputs.calls]
    assert len(set(ids)) == 3 and {part.shape[0] for part in inputs.shared} == {512}
    appends = problem(case("append").make(3), 3, pool_rows=64)
    rows = np.concatenate([np.asarray(call[-1]) for call in appends.calls])
    assert len(set(rows.tolist())) == 9  # no call overwrites another's rows


@pytest.mark.slow
def test_a_measurement_is_complete_and_consistent():
    done = []
    (made,) = measure.measure(case("gather"), 64, ["xla"], CEILINGS, quick=True, on_done=lambda: done.append(1))
    assert made.problem is None and done == [1] and made.us > 0 and made.kernel_us is None
    assert made.bytes == 64 * 1612 and made.floor_us == pytest.approx(64 * 1612 / 4e12 * 1e6)
    assert made.gb_per_s == pytest.approx(made.bytes / made.us / 1e3)
    assert made.of_copy == pytest.approx(made.of_floor) == pytest.approx(made.floor_us / made.us)
    assert (made.relative_error, made.correct) == (0.0, True)


def test_failures_are_kept(monkeypatch):
    """Not there, not here, and one that raises: each says why, and the others are still measured."""
    monkeypatch.setattr(measure, "why_not", lambda op, name: "not here" if name == "cuda" else None)
    names = ["cuda", "lax.top_k", "xla"]

    def broken(*args, **kwargs):
        raise RuntimeError("first line\n  second line")

    monkeypatch.setattr(jax.lax, "top_k", broken)
    found = {r.implementation: r for r in measure.measure(case("top_k"), 2, names, CEILINGS, quick=True)}
    assert found["cuda"].problem == "not here" and found["cuda"].us is None
    assert found["lax.top_k"].problem == "RuntimeError: first line second line"
    monkeypatch.undo()
    assert measure.why_not("gather", "pallas") == "the backend is cpu"
    assert measure.why_not("append", "triton") == "no kernel"
    assert measure.why_not("gather", "lax.top_k") == "a baseline of top_k"
    assert all("xla" in measure.default_implementations(op) for op in OPS)


def test_a_wrong_result_is_seen(monkeypatch):
    """One wrong id of a thousand: the result counts as not correct."""
    honest = measure.outcome

    def off(inputs, implementation, rows=None):
        found = [x.copy() for x in honest(inputs, "xla", rows)]
        if implementation == "lax.top_k":
            found[0][0, 0] += 1
        return found

    monkeypatch.setattr(measure, "outcome", off)
    (made,) = measure.measure(case("top_k"), 2, ["lax.top_k"], CEILINGS, quick=True)
    assert made.correct is False and made.relative_error == pytest.approx(1 / (2 * 512))


def test_relative_error():
    x = np.array([3.0, 4.0], np.float32)
    assert measure.relative_error(x, x) == 0
    assert measure.relative_error(x + np.float32([0, 1]), x) == pytest.approx(0.2)
    assert measure.relative_error(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    inf = np.array([1, -np.inf], np.float32)
    assert measure.relative_error(inf, inf) == 0
    for wrong in ([1, 0], [1, np.nan], [np.nan, -np.inf], [np.inf, -np.inf]):
        assert measure.relative_error(np.array(wrong, np.float32), inf) == np.inf


def test_kernel_times(monkeypatch, tmp_path):
    """GPU streams are summed by kernel; a real CPU trace has none."""
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jnp.ones(8) + np.float32(1))
    assert list(tmp_path.rglob("*.xplane.pb")) and timing.kernel_times(tmp_path) == {}

    def line(name, *events):
        return SimpleNamespace(name=name, events=[SimpleNamespace(name=n, duration_ns=ns) for n, ns in events])

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", ("host", 9000))]),
        SimpleNamespace(
            name="/device:GPU:0",
            lines=[
                line("Stream #13(Compute)", ("attend", 2000.0), ("copy", 500.0), ("attend", 4000.0)),
                line("Stream #14(MemcpyD2D)", ("copy", 250.0)),
                line("XLA Ops", ("attend", 7000.0)),
            ],
        ),
    ]
    data = SimpleNamespace(from_file=lambda path: SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", data)
    assert timing.kernel_times(pathlib.Path(tmp_path)) == {"attend": 6.0, "copy": 0.75}


@pytest.mark.every_case  # torch is there on Python 3.11 alone
@pytest.mark.parametrize("op", torch_ops.OPS)
def test_torch_computes_the_same(monkeypatch, capsys, op):
    """The baseline's functions, on the CPU (only their timing needs a GPU)."""
    pytest.importorskip("torch")
    monkeypatch.setattr(torch_ops, "DEVICE", "cpu")
    shape = case(op).make(2)
    if op == "index_scores":
        assert torch_ops.main([op]) == 1 and capsys.readouterr().out == "index_scores: the backend is cpu\n"
        shape = dataclasses.replace(shape, fmt=index_format("fp8", 128))
    inputs = problem(shape, 1, pool_rows=256)
    shared, call = (jax.tree.map(torch_ops._tensor, x) for x in (inputs.shared, inputs.calls[0]))
    for got, want in zip(torch_ops._call(op, shape)(shared, call), measure.outcome(inputs, "xla"), strict=True):
        assert measure.relative_error(got.float().numpy(), want.astype(np.float32)) < torch_ops.TOLERANCE


def test_call_count_fits_the_memory():
    assert timing.call_count(1000) == timing.MAX_CALLS
    assert timing.call_count(1 << 30) == 8 and timing.call_count(1 << 40) == timing.MIN_CALLS
