"""index_scores against float64. Subclass `IndexScoresTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.ops import index_scores

from ..oracle import attention
from ..oracle import rows as oracle_rows
from .arg_specs import INDEX_SCORES, ScoreSpec
from .op_test import OpTest

jit_scores = jax.jit(index_scores, static_argnames=("base", "rows_per_block", "fmt", "scale", "implementation"))


class IndexScoresTest(OpTest):
    op = "index_scores"

    def check(self, spec: ScoreSpec, counts: np.ndarray, seed: int = 0) -> None:
        with self.asked(fmt=spec.fmt, per_block=spec.rows_per_block):
            self.check_scores(spec, counts, seed)

    def check_scores(self, spec: ScoreSpec, counts: np.ndarray, seed: int) -> None:
        rng = np.random.default_rng(seed)
        fmt, per_block = spec.fmt, spec.rows_per_block
        units = spec.blocks + 6
        base = units * per_block  # the second layer of the pool
        values = rng.standard_normal((2 * units * per_block, fmt.dim)).astype(np.float32)
        parts = oracle_rows.encode(fmt, values)
        stored = oracle_rows.decode(fmt, parts)
        table = np.stack([rng.permutation(np.arange(1, units))[: spec.blocks] for _ in range(spec.tokens)])
        queries = rng.standard_normal((spec.tokens, spec.heads, fmt.dim)).astype(np.float32)
        if fmt.dense_dtype == "bfloat16":  # kernels round the queries to bf16
            queries = queries.astype(ml_dtypes.bfloat16).astype(np.float32)
        weights = rng.standard_normal((spec.tokens, spec.heads)).astype(np.float32)  # negative ones too
        scores = np.asarray(
            jit_scores(
                parts,
                queries,
                weights,
                table.astype(np.int32),
                counts.astype(np.int32),
                base=base,
                rows_per_block=per_block,
                fmt=fmt,
                implementation=self.implementation,
            )
        )
        assert scores.shape == (spec.tokens, spec.blocks * per_block) and scores.dtype == np.float32
        keys = [
            np.concatenate([stored[base + b * per_block :][:per_block] for b in table[t]])[: counts[t]]
            for t in range(spec.tokens)
        ]
        for t, expected in enumerate(attention.index_scores(queries, weights, keys)):
            np.testing.assert_allclose(scores[t, : counts[t]], expected, rtol=1e-4, atol=1e-3)
            assert (scores[t, counts[t] :] == -np.inf).all()

    @pytest.mark.parametrize("name", INDEX_SCORES)
    def test_equals_float64(self, name: str) -> None:
        spec = INDEX_SCORES[name]
        counts = np.random.default_rng(1).integers(0, spec.blocks * spec.rows_per_block + 1, spec.tokens)
        counts[0], counts[-1] = 0, spec.blocks * spec.rows_per_block
        self.check(spec, counts)


class TestIndexScores(IndexScoresTest):
    implementation = "xla"
