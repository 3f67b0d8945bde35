"""`Columns` of a wider matrix, position bias and weight scale give the bytes of plain, prepared arrays.

Subclass `ColumnsTest` with another `implementation` to test kernels, at V4's widths.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.formats import index_format, kv_format
from dsv4_jax.ops.append import encode
from dsv4_jax.ops.columns import Columns
from dsv4_jax.ops.compress import CompressorInputs, compress_csa, compress_hca

from ..pallas.test_append import random_epilogue, random_values
from ..pallas.test_compress import STREAMS, plan_of, stream_of
from .test_append_gather import jit_append
from .test_index_scores import jit_scores
from .test_queries import jit_finish

KV, INDEX = kv_format("fp8", 512, 64), index_format("fp4", 128)
IN_PLACE, CUT = 16, 3  # first columns: one that kernels can start at, one that they cannot


def placed(values: Any, start: int) -> Columns:
    """The values among columns of NaN."""
    values = np.asarray(values, np.float32)
    width = int(np.prod(values.shape[1:]))
    matrix = np.full((len(values), -(-(start + width) // 4) * 4 + 8), np.nan, np.float32)
    matrix[:, start : start + width] = values.reshape(-1, width)
    return Columns(jnp.asarray(matrix), start, values.shape[1:])


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype


class ColumnsTest:
    implementation: ClassVar[Literal["xla", "pallas", "cuda"]]
    starts: ClassVar[tuple[int, ...]]
    steps: ClassVar[tuple[str, ...]]

    @pytest.mark.parametrize("finished", [True, False])
    def test_append(self, finished: bool) -> None:
        rng = np.random.default_rng(0)
        values, ids = random_values(rng, 5, KV.dim), jnp.asarray([3, 12, 0, 11, 5], jnp.int32)  # 12: not stored
        pool = tuple(jnp.asarray(rng.integers(0, 100, (12, p.width)), p.dtype) for p in KV.parts)
        position = jnp.asarray(rng.integers(0, 1 << 20, 5), jnp.int32)
        how: dict[str, Any] = {}
        if finished:
            how = dict(epilogue=random_epilogue(rng, KV), position=position)
        write = functools.partial(jit_append, pool, row_ids=ids, fmt=KV, implementation=self.implementation)
        rows = jax.jit(functools.partial(encode, fmt=KV, implementation=self.implementation))
        for start in self.starts:
            columns = placed(values, start)
            assert_same(write(values=columns, **how), write(values=values, **how))
            assert_same(rows(columns, **how), rows(values, **how))

    @pytest.mark.parametrize(
        ("heads", "dim", "steps"), [(3, 512, dict(eps=1e-6)), (4, 128, dict(rotate=True, round_fp4=True))]
    )
    def test_queries(self, heads: int, dim: int, steps: dict[str, Any]) -> None:
        rng = np.random.default_rng(dim)
        q = rng.standard_normal((7, heads, dim)).astype(np.float32)
        position, freq = rng.integers(0, 1 << 20, 7).astype(np.int32), rng.uniform(0, 1, 32).astype(np.float32)
        epilogue = functools.partial(jit_finish, position=position, inv_freq=freq, **steps)
        for start in self.starts:
            columns = placed(q.reshape(7, -1), start).reshape(-1, heads, dim)
            got, want = (epilogue(x, implementation=self.implementation) for x in (columns, q))
            assert_same(got, want)

    def test_index_scores(self) -> None:
        rng = np.random.default_rng(0)
        tokens, heads, per_block, scale = 3, 61, 32, 0.011
        pool = tuple(rng.integers(0, 127, (128, p.width)).astype(p.dtype) for p in INDEX.parts)
        queries = jnp.asarray(rng.standard_normal((tokens, heads, INDEX.dim)), jnp.bfloat16)
        weights = rng.standard_normal((tokens, heads)).astype(np.float32)
        table, count = rng.integers(0, 4, (tokens, 3)).astype(np.int32), np.array([96, 40, 0], np.int32)
        score = functools.partial(
            jit_scores,
            pool,
            queries,
            table=table,
            count=count,
            base=0,
            rows_per_block=per_block,
            fmt=INDEX,
            implementation=self.implementation,
        )
        expected = score(weights=weights * np.float32(scale))
        assert np.isfinite(expected[0]).all()
        for start in self.starts:
            assert_same(score(weights=placed(weights, start), scale=scale), expected)

    def test_compress(self) -> None:
        for step in self.steps:
            name, kind = step.split()
            rows, count, draft = {"decode": (9, 1, 0), "verify": (9, 2, 1), "prefill": (3, 150, 0)}[kind]
            plan, table = plan_of(np.arange(121, 121 + rows), count, draft)
            assert (plan.history_seqs.size > 0) == (kind == "prefill")
            for start in self.starts:
                self.check_compress(name, plan, table, draft, start)

    def check_compress(self, name: str, plan: Any, table: np.ndarray, draft: int, start: int) -> None:
        rng = np.random.default_rng(start)
        streams = [stream_of(kind, plan, table, fmt, draft, rng) for kind, fmt in STREAMS[name]]
        plain, columns = [], []
        for s in streams:
            kv, score = np.asarray(s.kv), np.asarray(s.score)
            ape = rng.standard_normal((s.geometry.ratio, score.shape[1])).astype(np.float32)
            biased = score + ape[np.asarray(plan.token_position) % s.geometry.ratio]
            plain.append((s.state, s.pool, jnp.asarray(kv), jnp.asarray(biased), s.epilogue, None))
            # Both are columns of one matrix, as they are of a stacked product.
            both = placed(np.concatenate([kv, score], 1), start).matrix
            kv, score = (Columns(both, first, (kv.shape[1],)) for first in (start, start + kv.shape[1]))
            columns.append((s.state, s.pool, kv, score, s.epilogue, jnp.asarray(ape)))

        @jax.jit
        def call(operands: Any, plan: Any, table: Any) -> Any:
            made = [CompressorInputs(*a[:5], s.geometry, a[5]) for a, s in zip(operands, streams, strict=True)]
            if name == "hca":
                return compress_hca(made[0], plan, table, implementation=self.implementation)
            return compress_csa(made, plan, table, implementation=self.implementation)

        got, want = call(columns, plan, table), call(plain, plan, table)
        assert_same(got, want)
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(want))


class TestColumns(ColumnsTest):
    implementation = "xla"
    starts = (CUT,)
    steps = ("csa decode",)
