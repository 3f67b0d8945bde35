"""dense_fp8 against float64. Subclass `DenseFp8Test` with another `implementation` to test a kernel.

`DenseTest` has what holds of `dense_e4m3` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.errors import ShapeError
from dsv4_jax.formats.weights.fp8 import pack
from dsv4_jax.ops.rounded_rows import RoundedRows

from ..oracle import dense as oracle
from .op_test import OpTest

STATIC = ("groups", "dtype", "whole_rows", "implementation")
# Weights' rows and columns, and groups.
MATRICES = {
    "one_tile": (64, 128, 1),
    "odd": (192, 384, 1),
    "groups": (640, 512, 5),
    "deep": (128, 4224, 1),
    "parts": (512, 2048, 1),
}


class DenseTest(OpTest):
    """A product with FP8 weights.

    Attributes:
        multiply: the op, jitted.
        laid: codes and scales as released -> as the op takes them.
        matrices: (rows, columns, groups) by name.
    """

    multiply: ClassVar[Callable[..., jax.Array]]
    laid: ClassVar[Callable[..., tuple[jax.Array, jax.Array]]]
    matrices: ClassVar[dict[str, tuple[int, int, int]]]

    def run(self, x: np.ndarray | RoundedRows, codes: np.ndarray, scales: np.ndarray, **options: Any) -> np.ndarray:
        cls = type(self)
        return np.asarray(cls.multiply(x, *cls.laid(codes, scales), implementation=self.implementation, **options))

    def case(self, name: str, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, and codes and scales as released."""
        rng = np.random.default_rng(rows)
        n, k, groups = self.matrices[name]
        weights = oracle.random_matrix(rng, n, k)
        return rng.standard_normal((rows, groups * k)).astype(jnp.bfloat16), *weights

    def test_rounds_to_bf16_once(self) -> None:
        case = self.case("odd", 5)
        np.testing.assert_array_equal(self.run(*case, dtype=jnp.bfloat16), self.run(*case).astype(jnp.bfloat16))

    def test_float32_rows_are_taken_in_bf16(self) -> None:
        x, *weights = self.case("odd", 5)
        exact = x.astype(np.float32)
        np.testing.assert_array_equal(self.run(exact * (1 + 2**-12), *weights), self.run(x, *weights))


class OnTheGpu(DenseTest):
    """What a kernel promises of bits besides."""

    def test_alone_and_among_others(self) -> None:
        for name, (_, _, groups) in self.matrices.items():
            x, *weights = self.case(name, 300)
            among = self.run(x, *weights, groups=groups)
            for first, size in ((0, 1), (3, 8), (100, 16), (31, 33), (180, 64), (9, 129), (0, 256)):
                alone = self.run(x[first : first + size], *weights, groups=groups)
                np.testing.assert_array_equal(alone, among[first : first + size], err_msg=name)

    @pytest.mark.parametrize(("n", "k", "groups"), [(24576, 1024, 1), (8192, 4096, 8)])
    def test_a_share_of_rows_has_the_bits_of_the_whole(self, n: int, k: int, groups: int) -> None:
        """Of matrices whose shares alone would be cut into more parts of K: `wq_b` and `wo_a` on two and four GPUs."""
        rng = np.random.default_rng(n)
        codes, scales = oracle.random_matrix(rng, n, k)
        for rows in (1, 8, 64):
            x = rng.standard_normal((rows, groups * k)).astype(jnp.bfloat16)
            whole = self.run(x, codes, scales, groups=groups)
            for shares in (2, 4):
                size, own = n // shares, max(1, groups // shares)
                for i in range(shares):
                    part = slice(i * size, (i + 1) * size), slice(i * size // 128, (i + 1) * size // 128)
                    taken = x[:, i * own * k : (i + 1) * own * k] if groups > 1 else x
                    got = self.run(taken, codes[part[0]], scales[part[1]], groups=own, whole_rows=n)
                    np.testing.assert_array_equal(got, whole[:, part[0]])


class DenseFp8Test(DenseTest):
    op = "dense_fp8"
    multiply = jax.jit(ops.dense_fp8, static_argnames=STATIC)
    laid = staticmethod(pack)
    matrices = MATRICES

    @pytest.mark.parametrize("rows", [1, 17, 100])
    @pytest.mark.parametrize("name", MATRICES)
    def test_equals_float64(self, name: str, rows: int) -> None:
        x, codes, scales = self.case(name, rows)
        groups = MATRICES[name][2]
        want = oracle.product(x.astype(np.float64), oracle.dequantised(codes, scales), groups)
        got = self.run(x, codes, scales, groups=groups)
        assert got.dtype == np.float32 and got.shape == want.shape
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


class TestDenseFp8(DenseFp8Test):
    implementation = "xla"


@pytest.mark.parametrize("op", ["dense_fp8", "dense_e4m3"])
def test_no_rows(op: str) -> None:
    codes, scales = jnp.zeros((2, 3, 8192), jnp.uint8), jnp.zeros((1, 3), jnp.uint8)
    assert getattr(ops, op)(jnp.zeros((0, 384)), codes, scales).shape == (0, 128)


@pytest.mark.parametrize("op", ["dense_fp8", "dense_e4m3"])
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
def test_arguments_are_named(op: str, changes: dict, message: str) -> None:
    good = {"x": jnp.zeros((2, 384)), "codes": jnp.zeros((2, 3, 8192), jnp.uint8)}
    given = good | {"scales": jnp.zeros((1, 3), jnp.uint8)} | changes
    with pytest.raises(ShapeError, match=f"{op}: {message}"):
        getattr(ops, op)(**given)
