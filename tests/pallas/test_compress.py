"""compress in Pallas: the op's test class interpreted, the lowering for CUDA, and V4's widths on the GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.formats import RowFormat, index_format, kv_format
from dsv4_jax.layout import CacheLayout
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.ops.compress import (
    CompressArguments,
    CompressorGeometry,
    CompressorInputs,
    compress_csa,
    compress_hca,
)
from dsv4_jax.ops.epilogue import Epilogue
from dsv4_jax.ops.numerics import inv_frequencies
from dsv4_jax.pallas import compress as kernel
from dsv4_jax.plan import StepPlan

from ..ops.op_test import OpTest
from ..ops.test_compress import CompressTest, check_chunkings
from ..oracle.close import assert_rows_close
from .lowering import lowers_for_cuda

Kind = Literal["csa", "index", "online", "raw"]
BLOCK_TOKENS = 128
FP8, FP4 = kv_format("fp8", 512, 64), index_format("fp4", 128)
F32, INDEX_F32 = kv_format("f32", 512, 64), index_format("f32", 128)


@pytest.mark.slow
class TestCompress(CompressTest):
    implementation = "pallas"
    tokens = 32  # interpreted kernels are slow; still several entries of every kind


def plan_of(starts: np.ndarray, count: int, draft: int = 0) -> tuple[StepPlan, np.ndarray]:
    """A step of `count` tokens for each of the rows, in slots 1, 2, ..., and the block table for it."""
    layout = CacheLayout(DSV4Config.flash(), draft_tokens=draft)
    rows = [StepSequence(slot, int(start), count) for slot, start in enumerate(starts, 1)]
    plan = build_plan(layout, rows, dataclasses.replace(shape_for(layout, rows), history=count > 1 + draft))
    columns = (int(max(starts)) + count) // BLOCK_TOKENS + 1
    table = np.arange((len(rows) + 1) * columns, dtype=np.int32).reshape(-1, columns)
    table[0] = 0
    return plan, table


def stream_of(kind: Kind, plan: StepPlan, table: np.ndarray, fmt: RowFormat, draft: int, rng) -> CompressorInputs:
    """Random operands at V4's ratios; the state is what random tokens before the step would have left."""
    ratio, width, parts = {"csa": (4, 2, 4), "index": (4, 2, 4), "online": (128, 1, 3), "raw": (128, 1, 2)}[kind]
    ring = {"online": draft + 2 if draft else 1, "raw": 128 + draft}.get(kind, 8 + draft)
    per_block = BLOCK_TOKENS // ratio
    geometry = CompressorGeometry(ratio, 1, len(table), ring, per_block * int(table.max() + 1), per_block, fmt)
    rows = geometry.base + per_block * int(table.max() + 1)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    state = draw(2 * len(table) * ring, parts * fmt.dim)
    if kind == "online":  # a positive sum
        state = state.at[:, fmt.dim : 2 * fmt.dim].set(jnp.abs(state[:, fmt.dim : 2 * fmt.dim]) + 1)
    pool = tuple(jnp.zeros((rows, p.width), p.dtype) for p in fmt.parts)
    inv_freq = jnp.asarray(inv_frequencies(64, 160000.0))
    epilogue = Epilogue(jnp.abs(draw(fmt.dim)) + 0.5, inv_freq, hadamard=kind == "index")
    tokens = plan.num_tokens
    return CompressorInputs(
        state, pool, draw(tokens, width * fmt.dim), 3 * draw(tokens, width * fmt.dim), epilogue, geometry
    )


def arrays(stream: CompressorInputs):
    return stream.state, stream.pool, stream.kv, stream.score, stream.epilogue


def arguments_of(
    kinds: tuple[Kind, ...], made: list[CompressorInputs], plan: StepPlan, table: jax.Array
) -> CompressArguments:
    """What an implementation is given for these compressors."""
    return CompressArguments("csa" if kinds[0] == "index" else kinds[0], tuple(made), plan, table)


def run(kinds: tuple[Kind, ...], streams: list[CompressorInputs], plan: StepPlan, table: np.ndarray, implementation):
    @jax.jit
    def call(operands, plan, table):
        made = [CompressorInputs(*a, s.geometry) for a, s in zip(operands, streams, strict=True)]
        if kinds[0] in ("online", "raw"):
            return [compress_hca(made[0], plan, table, mode=kinds[0], implementation=implementation)]
        return compress_csa(made, plan, table, implementation=implementation)

    return call([arrays(s) for s in streams], plan, table)


STREAMS: dict[str, tuple[tuple[Kind, RowFormat], ...]] = {
    "csa": (("csa", FP8),),
    "csa+index": (("csa", FP8), ("index", FP4)),
    "index-fp8": (("index", index_format("fp8", 128)),),
    "csa+index-f32": (("csa", F32), ("index", INDEX_F32)),
    "hca": (("online", FP8),),
    "hca-f32": (("online", F32),),
    "hca-raw": (("raw", F32),),
}


every_stream = pytest.mark.parametrize("name", STREAMS)


@pytest.mark.parametrize(("rows", "count"), [(64, 1), (1, 8192)], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", ["csa+index", "hca", "hca-raw"])
def test_lowers_for_cuda(name: str, rows: int, count: int) -> None:
    plan, table = plan_of(np.arange(rows), count)
    kinds, fmts = zip(*STREAMS[name], strict=True)
    rng = np.random.default_rng(0)
    streams = [stream_of(k, plan, table, f, 0, rng) for k, f in zip(kinds, fmts, strict=True)]

    def call(operands, plan, table):
        made = [CompressorInputs(*a, s.geometry) for a, s in zip(operands, streams, strict=True)]
        return kernel.call(arguments_of(kinds, made, plan, table), interpret=False)

    assert lowers_for_cuda(call, [arrays(s) for s in streams], plan, table) == 1


def check(name: str, starts: np.ndarray, count: int, draft: int, implementation: str) -> None:
    plan, table = plan_of(starts, count, draft)
    kinds, fmts = zip(*STREAMS[name], strict=True)
    rng = np.random.default_rng(count)
    streams = [stream_of(k, plan, table, f, draft, rng) for k, f in zip(kinds, fmts, strict=True)]
    call = functools.partial(run, kinds, streams, plan, table)
    for (state, pool), (want_state, want_pool), fmt in zip(call(implementation), call("xla"), fmts, strict=True):
        assert_rows_close(None, [state], [want_state])
        assert_rows_close(fmt, pool, want_pool)
        assert any(np.asarray(part).any() for part in pool)


class CompiledCompressTest(OpTest):
    """On a GPU, at V4's widths, against the reference."""

    op = "compress"

    def check(self, name: str, starts: np.ndarray, count: int, draft: int) -> None:
        with self.asked(name=name):
            check(name, starts, count, draft, self.implementation)

    @pytest.mark.parametrize("batch", [1, 2, 16, 64, 256])
    @every_stream
    def test_decode(self, name: str, batch: int) -> None:
        """The first row completes an entry of either ratio; the others stand anywhere."""
        starts = np.random.default_rng(batch).integers(0, 1000, batch)
        starts[0] = 127
        self.check(name, starts, 1, 0)

    @pytest.mark.parametrize("draft", [1, 3])
    @every_stream
    def test_verify(self, name: str, draft: int) -> None:
        self.check(name, np.arange(124, 124 + 9), 1 + draft, draft)

    @pytest.mark.parametrize(("rows", "count"), [(1, 4096), (3, 333)])
    @every_stream
    def test_prefill(self, name: str, rows: int, count: int) -> None:
        self.check(name, np.array([0, 129, 1030])[:rows] + (5 if rows == 1 else 0), count, 0)


@pytest.mark.gpu
class TestCompressOnTheGpu(CompiledCompressTest):
    implementation = "pallas"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("formats", "hca_state", "implementation"),
    [(formats, state, "pallas") for formats in (("fp8", "fp4"), ("f32", "f32")) for state in ("online", "raw")]
    + [(("fp8", "fp4"), "online", "cuda")],
)
def test_every_chunking_gives_the_same_bytes_on_the_gpu(formats: tuple[str, str], hca_state, implementation) -> None:
    """V4's widths and ratios, all leaves of a cache, past two HCA entries."""
    cfg = DSV4Config.tiny(
        head_dim=512,
        rope_dim=64,
        index_head_dim=128,
        sliding_window=128,
        hca_ratio=128,
        layer_types=(AttentionType.CSA, AttentionType.HCA),
    )
    check_chunkings(CacheLayout(cfg, *formats, hca_state=hca_state), (300, 77, 1), implementation, 300, 3)
