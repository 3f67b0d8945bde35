"""Columns in the CUDA kernels: read in place where they can be. Their lowering on the CPU, their bytes on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda.calls import float_columns
from dsv4_jax.ops import append, index_scores
from dsv4_jax.ops.columns import Columns
from dsv4_jax.ops.compress import CompressorInputs, compress_csa
from dsv4_jax.ops.queries import finish_queries

from ..ops.test_columns import CUT, IN_PLACE, INDEX, KV, ColumnsTest
from ..pallas.test_append import random_epilogue
from ..pallas.test_compress import STREAMS, plan_of, stream_of


@pytest.mark.parametrize(
    ("start", "total", "dtype", "in_place"),
    [(8, 64, "float32", True), (6, 64, "float32", False), (8, 66, "float32", False), (8, 64, "bfloat16", False)],
)
def test_what_is_read_in_place(start: int, total: int, dtype: str, in_place: bool) -> None:
    matrix = jnp.arange(3 * total, dtype=jnp.dtype(dtype)).reshape(3, total)
    columns = Columns(matrix, start, (5, 4))
    found, first = float_columns(columns)
    assert (found is matrix) == in_place and found.dtype == jnp.float32
    np.testing.assert_array_equal(found[:, first : first + 20].reshape(3, 5, 4), columns.cut())


@pytest.mark.parametrize("start", [IN_PLACE, CUT])
@pytest.mark.usefixtures("assumed_library")
def test_lowers_without_a_slice(start: int) -> None:
    """All kernels of a layer on columns of one matrix: none of them is cut, or all but the scalar-loaded weights."""
    plan, table = plan_of(np.arange(4), 1)
    rng = np.random.default_rng(0)
    streams = [stream_of(kind, plan, table, fmt, 0, rng) for kind, fmt in STREAMS["csa+index"]]
    epilogue = random_epilogue(rng, KV)
    pool = tuple(jnp.zeros((8, p.width), p.dtype) for p in KV.parts)
    keys = tuple(jnp.zeros((64, p.width), p.dtype) for p in INDEX.parts)

    def call(matrix: jax.Array):
        def of(*tail: int) -> Columns:
            return Columns(matrix, start, tail)

        ids = jnp.arange(4, dtype=jnp.int32)
        index = finish_queries(of(4, 128), ids, jnp.ones(32), rotate=True, round_fp4=True, implementation="cuda")
        fed = [
            CompressorInputs(
                s.state, s.pool, of(2 * s.geometry.fmt.dim), of(2 * s.geometry.fmt.dim), s.epilogue, s.geometry
            )
            for s in streams
        ]
        return (
            append(pool, of(512), ids, fmt=KV, epilogue=epilogue, position=ids, implementation="cuda"),
            compress_csa(fed, plan, table, implementation="cuda"),
            finish_queries(of(2, 512), ids, jnp.ones(32), eps=1e-6, implementation="cuda"),
            index_scores(
                keys,
                index,
                of(4),
                jnp.zeros((4, 2), jnp.int32),
                ids,
                base=0,
                rows_per_block=32,
                fmt=INDEX,
                scale=0.5,
                implementation="cuda",
            ),
        )

    trace = functools.partial(jax.jit(call).trace, jax.ShapeDtypeStruct((4, 1040), jnp.float32))
    text = trace().lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.slice") == (0 if start == IN_PLACE else 7)
    assert text.count("tensor<4x1040xf32>") >= 1 and f"first_weight = {start}" in text


@pytest.mark.gpu
class TestColumnsOnTheGpu(ColumnsTest):
    implementation = "cuda"
    starts = (IN_PLACE, CUT)
    steps = tuple(f"{name} {kind}" for name in ("csa+index", "hca") for kind in ("decode", "verify", "prefill"))


del ColumnsTest  # its own tests run where it stands
