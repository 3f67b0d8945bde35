"""The CUDA finish_queries: its lowering and what it refuses on the CPU, the op's test class on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops.columns import Product
from dsv4_jax.ops.queries import finish_queries

from ..ops.test_queries import QueriesTest, jit_finish, model


@pytest.mark.parametrize(("dim", "pairs", "qat"), [(512, 32, False), (128, 32, True)])
@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call(dim: int, pairs: int, qat: bool) -> None:
    shapes = [((2, 8, dim), jnp.float32), ((2,), jnp.int32), ((pairs,), jnp.float32)]
    traced = jax.jit(finish(qat)).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@dsv4_finish_queries") == 1


@pytest.mark.parametrize(
    ("dim", "pairs", "qat", "reason"),
    [(64, 8, False, "it takes heads of 128 or 512"), (512, 32, True, "it rotates and rounds heads of 128")],
)
@pytest.mark.usefixtures("assumed_library")
def test_what_the_kernel_cannot_take_is_refused(dim: int, pairs: int, qat: bool, reason: str) -> None:
    with pytest.raises(ImplementationError, match=f"queries: .*'cuda' cannot run: {reason}"):
        finish(qat)(jnp.zeros((2, 8, dim)), jnp.zeros(2, jnp.int32), jnp.zeros(pairs))


@pytest.mark.parametrize(("columns", "target"), [(512, "dsv4_query_product"), (448, "dsv4_finish_queries")])
@pytest.mark.usefixtures("assumed_library")
def test_a_product_that_is_not_made_yet_is_the_kernels(columns: int, target: str) -> None:
    """Of columns that its ring is shorter than, else it is made before."""
    s = jax.ShapeDtypeStruct
    queries = Product(s((6, columns), jnp.bfloat16), s((1024, columns), jnp.bfloat16), (2, 512))
    traced = jax.jit(finish(False)).trace(queries, s((6,), jnp.int32), s((32,), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{target}") == 1 and ("dot_general" in text) == (columns == 448)


def finish(qat: bool):
    return functools.partial(finish_queries, eps=1e-6, rotate=qat, round_fp4=qat, implementation="cuda")


@pytest.mark.gpu
class TestQueriesOnTheGpu(QueriesTest):
    implementation = "cuda"

    @pytest.mark.parametrize("qat", [False, True])
    def test_of_a_product_of_the_indexer(self, qat: bool) -> None:
        """As of the product that is made before, but where another sum in its last bit rounds otherwise."""
        rng = np.random.default_rng(qat)
        x, weights = (jnp.asarray(rng.standard_normal((n, 512)), jnp.bfloat16) for n in (200, 8 * 128))
        at, freq = jnp.asarray(rng.integers(0, 1 << 20, 200), jnp.int32), rng.uniform(0, 1, 32).astype(np.float32)
        product = Product(x, weights, (8, 128))
        steps = dict(rotate=qat, round_fp4=qat, implementation="cuda")
        out, made = (np.asarray(jit_finish(q, at, freq, **steps), np.float32) for q in (product, product.cut()))
        assert (out != made).mean() < 1e-3
        alone = jit_finish(Product(x[70:71], weights, (8, 128)), at[70:71], freq, **steps)
        np.testing.assert_array_equal(np.asarray(alone, np.float32), out[70:71])

    @pytest.mark.parametrize(("tokens", "heads", "columns"), [(600, 2, 1024), (130, 5, 576)])
    def test_of_a_product(self, tokens: int, heads: int, columns: int) -> None:
        """Against float64, and a token's bits alone."""
        rng = np.random.default_rng(tokens)
        x, weights = (rng.standard_normal((n, columns)).astype(jnp.bfloat16) for n in (tokens, heads * 512))
        position, freq = rng.integers(0, 1 << 20, tokens), rng.uniform(0, 1, 32).astype(np.float32)
        products = x.astype(np.float64) @ weights.astype(np.float64).T

        def run(first: int, last: int) -> np.ndarray:
            queries = Product(jnp.asarray(x[first:last]), jnp.asarray(weights), (heads, 512))
            at = jnp.asarray(position[first:last], jnp.int32)
            return np.asarray(jit_finish(queries, at, freq, eps=1e-6, implementation="cuda")).astype(np.float64)

        out = run(0, tokens)
        expected = model(products.reshape(tokens, heads, 512), position, freq, 1e-6, False)
        np.testing.assert_allclose(out, expected, rtol=2**-7, atol=1e-3)
        for first, last in ((0, 1), (60, 70), (tokens - 1, tokens)):
            np.testing.assert_array_equal(run(first, last), out[first:last])

    def takes(self, *, dim: int, rotate: bool) -> bool:
        return dim == 128 or (dim == 512 and not rotate)
