"""dense_fp8 against float64. Subclass `DenseFp8Test` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.formats.weights.fp8 import pack
from dsv4_jax.ops import dense_fp8

from ..oracle import dense as oracle
from .op_test import OpTest

jit_dense = jax.jit(dense_fp8, static_argnames=("groups", "dtype", "whole_rows", "implementation"))
# Weights' rows and columns, and groups.
MATRICES = {
    "one_tile": (64, 128, 1),
    "odd": (192, 384, 1),
    "groups": (640, 512, 5),
    "deep": (128, 4224, 1),
    "parts": (512, 2048, 1),
}


class DenseFp8Test(OpTest):
    op = "dense_fp8"

    def run(self, x: np.ndarray, weights: np.ndarray, scales: np.ndarray, **options) -> np.ndarray:
        return np.asarray(jit_dense(x, weights, scales, implementation=self.implementation, **options))

    def case(self, name: str, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """x, packed codes, scales, and what comes out in float64."""
        rng = np.random.default_rng(rows)
        n, k, groups = MATRICES[name]
        codes, scales = oracle.random_matrix(rng, n, k)
        x = rng.standard_normal((rows, groups * k)).astype(jnp.bfloat16)
        want = oracle.product(x.astype(np.float64), oracle.dequantised(codes, scales), groups)
        return x, *pack(codes, scales), want

    @pytest.mark.parametrize("rows", [1, 17, 100])
    @pytest.mark.parametrize("name", MATRICES)
    def test_equals_float64(self, name: str, rows: int) -> None:
        x, weights, scales, want = self.case(name, rows)
        got = self.run(x, weights, scales, groups=MATRICES[name][2])
        assert got.dtype == np.float32 and got.shape == want.shape
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)

    def test_rounds_to_bf16_once(self) -> None:
        x, weights, scales, _ = self.case("odd", 5)
        got = self.run(x, weights, scales, dtype=jnp.bfloat16)
        np.testing.assert_array_equal(got, self.run(x, weights, scales).astype(jnp.bfloat16))

    def test_float32_rows_are_taken_in_bf16(self) -> None:
        x, weights, scales, _ = self.case("odd", 5)
        exact = x.astype(np.float32)
        np.testing.assert_array_equal(self.run(exact * (1 + 2**-12), weights, scales), self.run(x, weights, scales))


class TestDenseFp8(DenseFp8Test):
    implementation = "xla"


def test_no_rows() -> None:
    codes, scales = jnp.zeros((2, 3, 8192), jnp.uint8), jnp.zeros((1, 3), jnp.uint8)
    assert dense_fp8(jnp.zeros((0, 384)), codes, scales).shape == (0, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": jnp.zeros((2, 3, 4096), jnp.uint8)}, r"codes is uint8 \[2, 3, 4096\], expected uint8 \[tiles, st"),
        ({"scales": jnp.zeros((2, 3), jnp.uint8)}, r"scales is uint8 \[2, 3\], expected uint8 \[1, 3\]"),
        ({"x": jnp.zeros((2, 256))}, r"x has 256 columns, 1 groups of weights \[128, 384\] take 384"),
        ({"groups": 3, "x": jnp.zeros((2, 1152))}, "x has 1152 columns, 3 groups of weights .*, and rows in 64s each"),
        ({"groups": 0}, "x has 384 columns, 0 groups"),
        ({"dtype": jnp.float16}, "dtype is float16, expected float32 or bfloat16"),
        ({"whole_rows": 64}, "whole_rows must be an integer from 128 to 2147483647, got 64"),
        ({"x": jnp.zeros((2, 384), jnp.int32)}, r"x is int32 \[2, 384\], expected float"),
    ],
)
def test_arguments_are_named(changes: dict, message: str) -> None:
    good = {"x": jnp.zeros((2, 384)), "codes": jnp.zeros((2, 3, 8192), jnp.uint8)}
    given = good | {"scales": jnp.zeros((1, 3), jnp.uint8)} | changes
    with pytest.raises(ShapeError, match=f"dense_fp8: {message}"):
        dense_fp8(**given)
