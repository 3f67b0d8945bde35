"""The CUDA top_k: its lowering and what it refuses on the CPU, the op's test classes on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import top_k as kernel
from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import top_k

from ..ops.test_top_k import jit_top_k
from ..pallas.test_top_k import TestTopKOnTheGpu as LongRows
from ..pallas.test_top_k import check_long


@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call() -> None:
    args = (jax.ShapeDtypeStruct((3, 32_768), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32))
    call = functools.partial(top_k, k=512, implementation="cuda")
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_top_k") == 1 and "tensor<3x512xi32>" in text


@pytest.mark.parametrize(("width", "k"), [(1100, 1050), (262_145, 3)])
@pytest.mark.usefixtures("assumed_library")
def test_what_the_kernel_cannot_take_is_refused(width: int, k: int) -> None:
    scores = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    count = np.full(1, width, np.int32)
    with pytest.raises(ImplementationError, match=r"top_k: .*'cuda' cannot run: it (keeps|takes rows of) at most"):
        jit_top_k(scores, count, k=k, implementation="cuda")


def hard_rows(width: int) -> np.ndarray:
    """Rows of which bounds and bins hold too many, too few, or unevenly many scores."""
    rng = np.random.default_rng(width)
    scores = rng.standard_normal((11, width)).astype(np.float32)
    scores[0] = scores[0] * 0.01 + 100  # all within one bin of the bound
    scores[1] = -np.abs(scores[1]) - 1
    scores[2, rng.random(width) < 0.97] = 0  # zeros of both signs around the k-th
    scores[2] *= np.where(rng.random(width) < 0.5, -1, 1)
    scores[3] = np.round(scores[3] * 64) / 64
    scores[4].sort()
    scores[5] = np.repeat(scores[5, : width // 16 + 1], 16)[:width]  # neighbours are equal
    scores[6] *= 1e30
    scores[6, rng.random(width) < 0.001] = np.inf
    scores[7, :-700] -= 100  # the greatest lie in one place
    scores[8, 1:] *= 1e-6  # one far above all others
    scores[9] = -0.0
    scores[9, ::7] = 0
    scores[10] = np.where(rng.random(width) < 0.01, scores[10], -np.inf)
    return scores


# Every cut of a row: one block of one to sixteen chunks of 2,048 scores, clusters of two to eight blocks; and rows of
# which an SM has several at once.
CUTS = (
    *((2048, 11), (2050, 11), (8192, 11), (16_384, 11), (32_768, 11), (40_000, 60)),
    *((65_536, 11), (65_536, 22), (131_072, 22), (262_144, 11)),
    *((8190, 280), (16_384, 280), (32_768, 140)),
)


class TestTopKOnTheGpu(LongRows):
    implementation = "cuda"

    def takes(self, *, entries: int) -> bool:
        return entries <= kernel.MAX_SCORES

    @pytest.mark.parametrize("k", [3, 512, 1024])
    @pytest.mark.parametrize(("width", "rows"), CUTS)
    def test_hard_rows(self, width: int, rows: int, k: int) -> None:
        scores = np.resize(hard_rows(width), (rows, width))
        counts = np.full(rows, width)
        counts[11:] = np.random.default_rng(k).integers(0, width + 1, rows - 11)
        check_long(scores, counts, k, "cuda")

    @pytest.mark.parametrize(("width", "rows"), CUTS)
    def test_rows_without_a_bound(self, width: int, rows: int) -> None:
        """Fewer finite scores than k, all in one block: it has its share of k, the others have not."""
        scores = np.full((rows, width), -np.inf, np.float32)
        scores[:, :1800:3] = np.random.default_rng(width).standard_normal((rows, 600))
        scores[::2, 2000:] = np.nan
        scores.view(np.int32)[1::4, 2000:] = 0x7F800001  # a NaN whose upper half is that of infinity
        check_long(scores, np.full(rows, width), 1024, "cuda")

    @pytest.mark.parametrize("width", [2048, 65_536, 262_144])
    def test_does_not_depend_on_the_batch(self, width: int) -> None:
        """More rows take fewer blocks each."""
        scores = np.tile(hard_rows(width)[:4], (16, 1))
        counts = np.full(len(scores), width - 1)
        together = jit_top_k(scores, counts.astype(np.int32), k=512, implementation="cuda")[0]
        for t in range(4):
            alone = jit_top_k(scores[t : t + 1], counts[:1].astype(np.int32), k=512, implementation="cuda")[0]
            np.testing.assert_array_equal(together[t::4], np.broadcast_to(alone, (16, alone.shape[1])))


del LongRows  # its own tests run where it stands
