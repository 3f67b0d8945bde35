"""index_scores in Pallas: the op's test class interpreted, the lowering for CUDA, and large pools on the GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.formats import INDEX_FORMATS, Scales, index_format
from dsv4_jax.ops import index_scores
from dsv4_jax.ops.index_scores import IndexScoresArguments
from dsv4_jax.ops.registry import Choice
from dsv4_jax.pallas import index_scores as kernel

from ..ops.arg_specs import ScoreSpec
from ..ops.test_index_scores import IndexScoresTest, jit_scores
from ..oracle import attention
from ..oracle import rows as oracle_rows
from .lowering import lowers_for_cuda

NAMES = [name for name in INDEX_FORMATS if kernel.unsupported_rows(index_format(name, 128)) is None]
formats = pytest.mark.parametrize("name", NAMES)


class TestIndexScores(IndexScoresTest):
    implementation = "pallas"


def check_nan_and_distant_scales() -> None:
    """A NaN key has a NaN score, and no other key has; groups of one key may lie 2^30 apart, queries far from 1."""
    fmt = index_format("fp4", 64)
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (16, 32), dtype=np.uint8), rng.integers(100, 131, (16, 2), dtype=np.uint8)
    pool[1][5, 1] = 0xFF
    queries = rng.standard_normal((1, 16, 64)).astype(jnp.bfloat16) * np.exp2(rng.integers(-40, 40, (1, 16, 1)))
    weights = rng.standard_normal((1, 16)).astype(np.float32)
    scores = np.asarray(
        jit_scores(
            pool,
            queries.astype(jnp.bfloat16),
            weights,
            np.array([[1, 0]], np.int32),
            np.array([16], np.int32),
            base=0,
            rows_per_block=8,
            fmt=fmt,
            implementation="pallas",
        )
    )
    keys = oracle_rows.decode(fmt, pool)[[*range(8, 16), *range(8)]]
    (expected,) = attention.index_scores(np.asarray(queries, np.float32), weights, [keys])
    np.testing.assert_allclose(scores[0], expected, rtol=1e-4)
    assert np.flatnonzero(np.isnan(scores[0])).tolist() == [13]


def test_nan_and_distant_scales() -> None:
    check_nan_and_distant_scales()


@pytest.mark.gpu
def test_nan_and_distant_scales_on_the_gpu() -> None:
    check_nan_and_distant_scales()


@formats
def test_lowers_for_cuda(name: str) -> None:
    fmt = index_format(name, 128)
    pool = tuple(jax.ShapeDtypeStruct((5000, p.width), p.dtype) for p in fmt.parts)
    shapes = [((2, 64, 128), jnp.bfloat16), ((2, 64), jnp.float32), ((2, 20), jnp.int32), ((2,), jnp.int32)]
    call = lambda *x: kernel.call(IndexScoresArguments(*x, base=640, rows_per_block=64, fmt=fmt), interpret=False)  # noqa: E731
    assert lowers_for_cuda(call, pool, *(jax.ShapeDtypeStruct(*s) for s in shapes)) == 1


@pytest.mark.gpu
class TestIndexScoresOnTheGpu(IndexScoresTest):
    implementation = "pallas"

    @formats
    @pytest.mark.parametrize("heads", [64, 5])
    def test_many_blocks(self, name: str, heads: int) -> None:
        spec = ScoreSpec(5, heads, 45, 32, index_format(name, 128))
        self.check(spec, np.array([0, 1, 1440, 1025, 1023]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "pallas") for name in INDEX_FORMATS), ("fp4", "cuda"), ("fp8", "cuda")]
)
def test_a_million_tokens_of_context(name: str, implementation: Choice) -> None:
    """262,144 keys at the end of a pool of more than 2^31 elements; equal to those of a small pool, bit for bit."""
    fmt, per_block, blocks = index_format(name, 128), 64, 4096
    rng = np.random.default_rng(0)
    rows = max(per_block * blocks, 2**32 // fmt.parts[0].bytes + 64) // per_block * per_block
    small = [rng.integers(0, 0x77, (per_block * blocks, p.width)).astype(p.dtype) for p in fmt.parts]
    match fmt.scales:
        case (Scales("ue8m0"),):
            small[1][:] = rng.integers(118, 125, small[1].shape)
        case (Scales("power_of_two"),):
            small[1][:] = np.exp2(rng.integers(-9, -6, small[1].shape))
        case _:
            small = list(oracle_rows.encode(fmt, rng.standard_normal(small[0].shape)))
    end = jax.jit(lambda part: jnp.zeros((rows, part.shape[1]), part.dtype).at[-part.shape[0] :].set(part))
    queries = jnp.asarray(rng.standard_normal((2, 64, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((2, 64)), jnp.float32)
    table = np.stack([rng.permutation(blocks) for _ in range(2)])
    count = jnp.asarray([per_block * blocks, 200_003], jnp.int32)

    def run(pool, offset, implementation):
        ids = jnp.asarray(table + offset, jnp.int32)
        return np.asarray(
            index_scores(
                pool,
                queries,
                weights,
                ids,
                count,
                base=0,
                rows_per_block=per_block,
                fmt=fmt,
                implementation=implementation,
            )
        )

    few = tuple(map(jnp.asarray, small))
    scores = run(few, 0, implementation)
    np.testing.assert_allclose(scores, run(few, 0, "xla"), rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(run(tuple(map(end, few)), rows // per_block - blocks, implementation), scores)
