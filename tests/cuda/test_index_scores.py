"""The CUDA index_scores: its lowering and what it refuses on the CPU, the op's test class on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.cuda.widths import INDEX_ROWS
from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import INDEX_FORMATS, RowFormat, index_format
from dsv4_jax.ops import index_scores

from ..ops.arg_specs import ScoreSpec
from ..ops.test_index_scores import IndexScoresTest, jit_scores
from ..oracle import rows as oracle_rows


@pytest.mark.parametrize("name", ["fp4", "fp8"])
@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call(name: str) -> None:
    fmt = index_format(name, 128)
    pool = tuple(jax.ShapeDtypeStruct((5000, p.width), p.dtype) for p in fmt.parts)
    shapes = [((2, 64, 128), jnp.float32), ((2, 64), jnp.float32), ((2, 20), jnp.int32), ((2,), jnp.int32)]
    call = functools.partial(index_scores, base=640, rows_per_block=32, fmt=fmt, implementation="cuda")
    args = (pool, *(jax.ShapeDtypeStruct(*s) for s in shapes))
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_index_scores") == 1 and "tensor<2x640xf32>" in text
    assert "transpose" not in text  # the kernel takes the queries as they are
    assert "base = 640 : i32" in text and "rows_per_block = 32 : i32" in text


@pytest.mark.parametrize(
    ("name", "heads", "dim", "per_block", "base", "reason"),
    [
        ("bf16", 4, 128, 32, 0, "built for rows of .* not of 128 bf16"),
        ("fp4", 4, 64, 32, 0, "not of 64 e2m1"),
        ("fp8", 65, 128, 32, 0, "64 heads, not 65"),
        ("fp8", 4, 128, 8, 0, "a multiple of 16 keys, not 8"),
        ("fp4", 4, 128, 32, 6, "a base that is a multiple of 4, not 6"),
    ],
)
@pytest.mark.usefixtures("assumed_library")
def test_what_the_kernel_cannot_take_is_refused(
    name: str, heads: int, dim: int, per_block: int, base: int, reason: str
) -> None:
    fmt = index_format(name, dim)
    rng = np.random.default_rng(0)
    pool = tuple(np.zeros((4 * per_block, p.width), p.dtype) for p in fmt.parts)
    args = (
        pool,
        rng.standard_normal((1, heads, dim)).astype(np.float32),
        np.ones((1, heads), np.float32),
        np.ones((1, 2), np.int32),
        np.full(1, 3, np.int32),
    )
    with pytest.raises(ImplementationError, match=f"index_scores: .*'cuda' cannot run: .*{reason}"):
        jit_scores(*args, base=base, rows_per_block=per_block, fmt=fmt, implementation="cuda")


@pytest.mark.gpu
class TestIndexScoresOnTheGpu(IndexScoresTest):
    implementation = "cuda"

    def takes(self, *, fmt: RowFormat, per_block: int) -> bool:
        return fmt in INDEX_ROWS and per_block % 16 == 0

    @pytest.mark.parametrize("name", INDEX_FORMATS)
    @pytest.mark.parametrize("heads", [64, 5])
    @pytest.mark.parametrize("per_block", [32, 96])
    def test_many_blocks(self, name: str, heads: int, per_block: int) -> None:
        spec = ScoreSpec(5, heads, 45, per_block, index_format(name, 128))
        last = 45 * per_block
        self.check(spec, np.array([0, 1, last, last - 15, last // 2 + 7]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp4", "fp8"])
def test_odd_scales_and_nan_on_the_gpu(name: str) -> None:
    """Never-written rows score 0; scales over the whole range of ue8m0 count; a NaN reaches its own key only."""
    fmt = index_format(name, 128)
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 0x77, (128, fmt.parts[0].width)).astype(np.uint8)
    if name == "fp4":
        scale = rng.integers(1, 230, (128, 4)).astype(np.uint8)
        scale[5] = 0
        scale[9, 2] = 0xFF
    else:
        scale = np.exp2(rng.integers(-120, 100, (128, 1))).astype(np.float32)
        scale[5] = 0
        codes[9, 77] = 0xFF
    queries, weights = rng.standard_normal((1, 64, 128)), rng.standard_normal((1, 64))
    scores = [
        np.array(
            index_scores(
                (jnp.asarray(codes), jnp.asarray(scale)),
                jnp.asarray(queries, jnp.bfloat16),
                jnp.asarray(weights, jnp.float32),
                jnp.arange(4, dtype=jnp.int32)[None],
                jnp.full(1, 128, jnp.int32),
                base=0,
                rows_per_block=32,
                fmt=fmt,
                implementation=implementation,
            )
        )[0]
        for implementation in ("cuda", "xla")
    ]
    assert np.isnan(scores[0][9]) and scores[0][5] == 0
    for score in scores:
        score[9] = 0
    # Relative to each key's own size: the scales differ by hundreds of orders of magnitude.
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-30)


@pytest.mark.gpu
@pytest.mark.parametrize(("scales", "bound"), [("equal", 1e-6), ("spread", 1e-4), ("odd", 1e-4)])
def test_fp8_products_of_fp4_queries_on_the_gpu(scales: str, bound: float) -> None:
    """Errors relative to the sum of all magnitudes, sum_h |w| sum_d |q k|, a key's score is made of.

    The products are aligned to the largest of a step and cut off 2^-13 below its leading bit. With equal scales all
    are multiples of a quarter and their sum is below 2^11: nothing is lost. Elsewhere a product of FP4 numbers has
    four bits and loses some only 2^10 below the largest.
    """
    fmt = index_format("fp4", 128)
    rng = np.random.default_rng(2)
    rows, tokens, heads = 416, 3, 61
    codes = rng.integers(0, 0x77, (rows, fmt.parts[0].width)).astype(np.uint8)
    codes ^= rng.integers(0, 2, codes.shape).astype(np.uint8) << 7
    low, high = {"equal": (124, 125), "spread": (116, 125), "odd": (1, 230)}[scales]
    scale = rng.integers(low, high, (rows, 4)).astype(np.uint8)
    scale[5] = 0
    scale[9, 2] = 0xFF
    keys = oracle_rows.decode(fmt, (codes, scale)).astype(np.float64)
    keys[5] = 0
    exponent = rng.integers(0 if scales == "equal" else -6, 1, (tokens, heads, 4, 1))
    queries = rng.choice(oracle_rows.E2M1, (tokens, heads, 4, 32)) * rng.choice([-1, 1], (tokens, heads, 4, 32))
    queries = (queries * np.exp2(exponent)).reshape(tokens, heads, 128)
    queries[1] = rng.standard_normal((heads, 128)).astype(np.float32)  # takes bf16 products
    queries[2, 60, 127] = 1 + 2**-7  # this token, too
    queries = queries.astype(ml_dtypes.bfloat16)
    weights = rng.standard_normal((tokens, heads)).astype(np.float32)
    table = np.broadcast_to(np.arange(rows // 32, dtype=np.int32), (tokens, rows // 32))

    def run(first: int, last: int) -> np.ndarray:
        part = (jnp.asarray(x[first:last]) for x in (queries, weights, table))
        return np.asarray(
            index_scores(
                (jnp.asarray(codes), jnp.asarray(scale)),
                *part,
                jnp.full(last - first, rows, jnp.int32),
                base=0,
                rows_per_block=32,
                fmt=fmt,
                implementation="cuda",
            )
        )

    scores = run(0, tokens)
    for t in range(tokens):
        np.testing.assert_array_equal(run(t, t + 1)[0], scores[t])  # the batch does not matter
    assert np.isnan(scores[:, 9]).all() and (scores[:, 5] == 0).all()
    with np.errstate(invalid="ignore"):
        products = np.asarray(queries, np.float64) @ keys.T
        expected = np.einsum("th,ths->ts", weights, np.maximum(products, 0))
        size = np.einsum("th,ths->ts", np.abs(weights), np.abs(np.asarray(queries, np.float64)) @ np.abs(keys).T)
    error = np.abs(scores - expected) / np.where(size > 0, size, 1)
    error[:, 9] = 0
    np.testing.assert_array_less(error[0], bound)
    np.testing.assert_array_less(error[1:], 1e-6)


def fp4_queries(rng: np.random.Generator, tokens: int, heads: int) -> np.ndarray:
    queries = rng.choice(oracle_rows.E2M1, (tokens, heads, 128)) * rng.choice([-1, 1], (tokens, heads, 128))
    return (queries * np.exp2(rng.integers(-6, 1, (tokens, heads, 1)))).astype(ml_dtypes.bfloat16)


@pytest.mark.gpu
def test_fp8_products_of_fp8_keys_on_the_gpu() -> None:
    """Errors relative to the sum of all magnitudes; a NaN reaches its own key only, whatever the weights."""
    fmt = index_format("fp8", 128)
    rng = np.random.default_rng(3)
    rows, tokens, heads = 416, 3, 61
    codes = rng.integers(0, 0x7F, (rows, 128)).astype(np.uint8) | rng.integers(0, 2, (rows, 128)).astype(np.uint8) << 7
    codes[9, 77] = 0xFF
    scale = np.exp2(rng.integers(-20, 20, (rows, 1))).astype(np.float32)
    scale[5] = 0
    queries = fp4_queries(rng, tokens, heads)
    queries[1] = rng.standard_normal((heads, 128))  # takes bf16 products
    weights = rng.standard_normal((tokens, heads)).astype(np.float32)
    weights[0, ::2] = 0
    table = np.broadcast_to(np.arange(rows // 32, dtype=np.int32), (tokens, rows // 32))
    scores = np.asarray(
        index_scores(
            (jnp.asarray(codes), jnp.asarray(scale)),
            jnp.asarray(queries),
            jnp.asarray(weights),
            jnp.asarray(table),
            jnp.full(tokens, rows, jnp.int32),
            base=0,
            rows_per_block=32,
            fmt=fmt,
            implementation="cuda",
        )
    )
    assert np.isnan(scores[:, 9]).all() and (scores[:, 5] == 0).all()
    codes[9, 77] = 0
    keys = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    wide = queries.astype(np.float64)
    expected = np.einsum("th,ths->ts", weights, np.maximum(wide @ keys.T, 0))
    size = np.einsum("th,ths->ts", np.abs(weights), np.abs(wide) @ np.abs(keys).T)
    error = np.abs(scores - expected) / np.where(size > 0, size, 1)
    error[:, 9] = 0
    np.testing.assert_array_less(error[0::2], 1e-4)
    np.testing.assert_array_less(error[1], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp4", "fp8"])
def test_tokens_that_share_their_keys_on_the_gpu(name: str) -> None:
    """Many tokens, runs of which are of one request: scores are those of each among few, to the bit."""
    fmt = index_format(name, 128)
    rng = np.random.default_rng(4)
    blocks, tokens, width = 40, 523, 12
    pool = oracle_rows.encode(fmt, rng.standard_normal((blocks * 32, 128)).astype(np.float32))
    queries = fp4_queries(rng, tokens, 64)
    queries[30::101] = rng.standard_normal((64, 128))  # these take bf16 products, and their neighbours FP8 ones
    weights = rng.standard_normal((tokens, 64)).astype(np.float32)
    owner = np.cumsum(rng.random(tokens) < 0.1)
    table = rng.integers(0, blocks, (tokens, width)).astype(np.int32)[owner]
    counts = rng.integers(0, 32 * width + 1, tokens).astype(np.int32)

    def run(first: int, last: int) -> np.ndarray:
        part = (jnp.asarray(x[first:last]) for x in (queries, weights, table, counts))
        return np.asarray(jit_scores(pool, *part, base=0, rows_per_block=32, fmt=fmt, implementation="cuda"))

    scores = run(0, tokens)
    for first in range(0, tokens, 250):
        np.testing.assert_array_equal(run(first, min(first + 250, tokens)), scores[first : first + 250])
