"""top_k in Pallas: the op's test class interpreted, the lowering for CUDA, and long rows on the GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import top_k
from dsv4_jax.ops.registry import Choice
from dsv4_jax.ops.top_k import TopKArguments
from dsv4_jax.pallas import top_k as kernel

from ..ops.test_top_k import TopKTest
from .lowering import lowers_for_cuda


def check_long(scores: np.ndarray, counts: np.ndarray, k: int, implementation: Choice = "pallas") -> None:
    """Against a stable sort, which is fast enough for long rows."""
    call = jax.jit(functools.partial(top_k, k=k, implementation=implementation))
    indices, kept = call(scores, counts.astype(np.int32))
    width = min(k, scores.shape[1])
    for t, count in enumerate(counts):
        ranked = np.where(np.isnan(scores[t, :count]), -np.inf, scores[t, :count])
        expected = np.argsort(-ranked, kind="stable")[:k]
        assert int(kept[t]) == len(expected)
        np.testing.assert_array_equal(indices[t], np.pad(expected, (0, width - len(expected))))


class TestTopK(TopKTest):
    implementation = "pallas"

    def test_several_chunks(self) -> None:
        """Two chunks, then a merge; the only high score of token 1 is the last one of the row."""
        rng = np.random.default_rng(0)
        scores = rng.choice(np.linspace(-1, 1, 50), (4, kernel.CHUNK + 100)).astype(np.float32)
        scores[1, -1] = 5
        check_long(scores, np.array([kernel.CHUNK + 100, kernel.CHUNK + 100, kernel.CHUNK, 3]), 20)

    def test_several_levels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel, "CHUNK", 32)
        monkeypatch.setattr(kernel, "MERGED", 2)
        rng = np.random.default_rng(1)
        scores = rng.standard_normal((3, 300)).astype(np.float32)
        check_long(scores, np.array([300, 299, 150]), 20)

    def test_large_k_is_refused(self) -> None:
        scores = np.random.default_rng(2).standard_normal((1, 1100)).astype(np.float32)
        with pytest.raises(ImplementationError, match=r"top_k: .*'pallas' cannot run: it keeps at most 1024"):
            check_long(scores, np.array([1100]), 1050)


@pytest.mark.parametrize(
    ("entries", "k", "kernels"), [(2048, 512, 2), (32_768, 512, 3), (262_144, 1024, 4), (1 << 20, 1000, 5)]
)
def test_lowers_for_cuda(entries: int, k: int, kernels: int) -> None:
    shapes = [((2, entries), jnp.float32), ((2,), jnp.int32)]
    call = lambda *x: kernel.call(TopKArguments(*x, k), interpret=False)  # noqa: E731
    assert lowers_for_cuda(call, *(jax.ShapeDtypeStruct(*s) for s in shapes)) == kernels


@pytest.mark.gpu
class TestTopKOnTheGpu(TopKTest):
    implementation = "pallas"

    @pytest.mark.parametrize("k", [1, 512, 1000, 1024])
    @pytest.mark.parametrize("entries", [1024, 8191, 32_768, 262_144, 1_000_003])
    def test_long_rows(self, entries: int, k: int) -> None:
        rng = np.random.default_rng(entries + k)
        scores = rng.standard_normal((7, entries)).astype(np.float32)
        scores[1] = np.round(scores[1])  # many ties
        scores[2] = 0
        scores[3, rng.random(entries) < 0.5] = np.nan
        scores[4] = -np.inf
        scores[5] *= 1e-30
        counts = np.array([entries, entries, entries - 1, entries // 2, entries, 0, 5])
        with self.asked(entries=entries):
            check_long(scores, counts, k, self.implementation)

    def test_many_rows(self) -> None:
        rng = np.random.default_rng(0)
        check_long(
            rng.standard_normal((256, 5000)).astype(np.float32), rng.integers(0, 5001, 256), 512, self.implementation
        )
