"""top_k against a sort. Subclass `TopKTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dsv4_jax.ops import top_k

from ..oracle import attention
from .op_test import OpTest

jit_top_k = jax.jit(top_k, static_argnames=("k", "implementation"))


class TopKTest(OpTest):
    op = "top_k"

    def check(self, scores: np.ndarray, counts: np.ndarray, k: int) -> None:
        scores, counts = scores.astype(np.float32), counts.astype(np.int32)
        indices, kept = map(np.asarray, jit_top_k(scores, counts, k=k, implementation=self.implementation))
        width = min(k, scores.shape[1])
        assert indices.shape == (len(scores), width) and indices.dtype == kept.dtype == np.int32
        for t, count in enumerate(counts):
            expected = attention.top_k(scores[t], count, k)
            assert int(kept[t]) == len(expected) == min(k, count)
            assert indices[t].tolist() == expected + [0] * (width - len(expected))

    @pytest.mark.parametrize("k", [1, 5, 16, 40])
    def test_equals_a_sort(self, k: int) -> None:
        rng = np.random.default_rng(k)
        self.check(rng.standard_normal((6, 24)).astype(np.float32), np.array([0, 1, 4, 5, 23, 24]), k)

    def test_ties_go_to_the_lowest_index(self) -> None:
        """ReLU scores are often exactly zero."""
        rng = np.random.default_rng(0)
        scores = rng.choice([0.0, 1.0, -1.0, 2.0], (8, 40)).astype(np.float32)
        self.check(scores, rng.integers(0, 41, 8), 12)
        self.check(np.zeros((2, 40), np.float32), np.array([40, 7]), 12)
        self.check(rng.choice(np.array([0.0, -0.0], np.float32), (2, 40)), np.array([40, 7]), 12)

    def test_zeros_of_both_signs_tie(self) -> None:
        self.check(np.array([[-0.0, 0.0, -1.0, 0.0, -0.0, 1.0]], np.float32), np.array([6]), 4)

    def test_nan_ranks_last_and_never_hides_a_number(self) -> None:
        rng = np.random.default_rng(1)
        scores = rng.standard_normal((6, 24)).astype(np.float32)
        scores[rng.random(scores.shape) < 0.4] = np.nan
        scores[5] = np.nan
        self.check(scores, np.array([24, 24, 10, 3, 0, 24]), 8)

    def test_infinite_scores(self) -> None:
        scores = np.array([[np.inf, -np.inf, 3, np.inf], [-np.inf, -np.inf, -np.inf, 1]], np.float32)
        self.check(scores, np.array([4, 4]), 3)

    def test_scores_close_to_each_other_or_far_apart(self) -> None:
        rng = np.random.default_rng(2)
        scores = rng.standard_normal((5, 40)).astype(np.float32)
        scores[0] = scores[0] * 1e-4 + 100
        scores[1] = -np.abs(scores[1]) - 1
        scores[2] *= 1e-30
        scores[3] *= 1e30
        scores[4, 1:] *= 1e-6
        self.check(scores, np.array([40, 40, 40, 40, 39]), 12)

    def test_garbage_behind_the_count_is_ignored(self) -> None:
        scores = np.full((1, 16), np.inf, np.float32)
        scores[0, :3] = [-5, -7, -6]
        self.check(scores, np.array([3]), 8)


class TestTopK(TopKTest):
    implementation = "xla"
