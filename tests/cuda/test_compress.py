"""The CUDA compressors: lowering and refusals on the CPU, the op's test class on a GPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dsv4_jax.cuda import compress as kernel
from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import index_format
from dsv4_jax.ops.compress import CompressorInputs

from ..pallas.test_compress import (
    FP4,
    FP8,
    STREAMS,
    CompiledCompressTest,
    arguments_of,
    arrays,
    plan_of,
    run,
    stream_of,
)


@pytest.mark.gpu
class TestCudaCompressOnTheGpu(CompiledCompressTest):
    implementation = "cuda"

    def takes(self, *, name: str) -> bool:
        return name in ("csa", "csa+index", "index-fp8", "hca")


@pytest.mark.parametrize(("rows", "count", "history"), [(64, 1, 0), (2, 300, 1)], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", ["csa+index", "csa", "index-fp8", "hca"])
@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call_in_place(name: str, rows: int, count: int, history: int) -> None:
    plan, table = plan_of(np.arange(rows), count)
    kinds, fmts = zip(*STREAMS[name], strict=True)
    rng = np.random.default_rng(0)
    streams = [stream_of(k, plan, table, f, 0, rng) for k, f in zip(kinds, fmts, strict=True)]

    def call(operands, plan, table):
        made = [CompressorInputs(*a, s.geometry) for a, s in zip(operands, streams, strict=True)]
        return kernel.call(arguments_of(kinds, made, plan, table))

    operands = [arrays(s) for s in streams]
    text = jax.jit(call).trace(operands, plan, table).lower(lowering_platforms=("cuda",)).as_text()
    target = "dsv4_compress_hca" if name == "hca" else "dsv4_compress_csa"
    assert text.count(f"@{target}") == 1
    assert text.count("output_operand_alias<") == sum(1 + len(f.parts) for f in fmts)
    assert ("history = true" in text) == bool(history)


@pytest.mark.parametrize("name", ["csa+index", "hca"])
@pytest.mark.usefixtures("assumed_library")
def test_the_kernel_gets_the_angles_of_first_positions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = []
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda *_, **__: lambda *operands, **__: given.extend(operands) or [0] * 9)
    plan, table = plan_of(np.array([3, 126, 131]), 3)
    kinds, fmts = zip(*STREAMS[name], strict=True)
    rng = np.random.default_rng(0)
    streams = [stream_of(k, plan, table, f, 0, rng) for k, f in zip(kinds, fmts, strict=True)]
    kernel.call(arguments_of(kinds, streams, plan, table))
    ratio = streams[0].geometry.ratio
    first = np.asarray(plan.token_position) // ratio * ratio
    angles = (first.astype(np.float32)[:, None] * np.asarray(streams[0].epilogue.inv_freq)).astype(np.float64)
    tables = [x for x in given if x.shape == angles.shape and x.dtype == np.float32]
    assert len(tables) == 2 * len(streams) and first.any()
    for cosine, sine in zip(tables[::2], tables[1::2], strict=True):
        np.testing.assert_allclose(cosine, np.cos(angles), atol=1e-6)
        np.testing.assert_allclose(sine, np.sin(angles), atol=1e-6)


def test_which_streams_the_kernels_take() -> None:
    plan, table = plan_of(np.arange(2), 1)
    rng = np.random.default_rng(0)
    stream = lambda kind, fmt: stream_of(kind, plan, table, fmt, 0, rng)  # noqa: E731
    assert kernel.stores(stream("csa", FP8)) is None and kernel.stores(stream("index", FP4)) is None
    assert "not of 128 bf16" in (kernel.stores(stream("index", index_format("bf16", 128))) or "")
    assert "not of 64 e2m1" in (kernel.stores(stream("index", index_format("fp4", 64))) or "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("csa+index-f32", ".* not of 512 f32"), ("hca-raw", "it has no raw HCA state")],
)
@pytest.mark.usefixtures("assumed_library")
def test_what_the_kernels_cannot_take_is_refused(name: str, reason: str) -> None:
    plan, table = plan_of(np.array([3, 127]), 1)
    kinds, fmts = zip(*STREAMS[name], strict=True)
    rng = np.random.default_rng(0)
    streams = [stream_of(k, plan, table, f, 0, rng) for k, f in zip(kinds, fmts, strict=True)]
    with pytest.raises(ImplementationError, match=f"compress: .*'cuda' cannot run: {reason}"):
        run(kinds, streams, plan, table, "cuda")
