"""dense_e4m3 against float64 of the same codes. Subclass `DenseE4m3Test` with another `implementation`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.formats.activations import quantise_rows
from dsv4_jax.formats.weights.fp8_e4m3 import pack
from dsv4_jax.ops import dense_e4m3
from dsv4_jax.ops.dense_e4m3 import dense_e4m3_rounding
from dsv4_jax.ops.rounded_rows import RoundedRows

from ..oracle import dense as oracle
from ..oracle import matrix_unit
from .test_dense_fp8 import STATIC, DenseTest

# Weights' rows and columns, and groups; all numbers of parts of K, and blocks of K in odd numbers.
MATRICES = {
    "one_tile": (64, 128, 1),
    "odd": (192, 384, 1),
    "groups": (640, 512, 5),
    "two_parts": (128, 1024, 1),
    "four_parts": (192, 2048, 1),
    "wide": (512, 256, 2),
}


def codes_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and their scales as float32."""
    codes, scales = (np.asarray(y) for y in quantise_rows(jnp.asarray(x)))
    return codes, np.exp2(scales.astype(np.float32) - 127)


class DenseE4m3Test(DenseTest):
    op = "dense_e4m3"
    multiply = jax.jit(dense_e4m3, static_argnames=STATIC)
    laid = staticmethod(pack)
    matrices = MATRICES

    def case(self, name: str, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As of any product; sizes of blocks differ, so that the order of sums shows."""
        x, *weights = super().case(name, rows)
        sizes = np.exp2(np.random.default_rng(rows).integers(-6, 6, (rows, x.shape[1] // 128))).repeat(128, 1)
        return (x.astype(np.float32) * sizes).astype(jnp.bfloat16), *weights

    @pytest.mark.parametrize("rows", [1, 17, 100])
    @pytest.mark.parametrize("name", MATRICES)
    def test_equals_float64_of_the_same_codes(self, name: str, rows: int) -> None:
        assert 5e-3 < self.rounding(*self.case(name, rows), MATRICES[name][2]) < 5e-2

    def test_columns_share_their_scale_in_128s(self) -> None:
        """Half of the columns are so much less than the others that few codes are left for them, and count as much."""
        x, codes, scales = self.case("odd", 17)
        small = np.arange(codes.shape[1]) % 128 >= 64
        x = (x.astype(np.float32) * np.where(small, 2.0**-14, 1)).astype(jnp.bfloat16)
        codes = codes & 0x87 | np.where(small, 0x70, 0x08).astype(np.uint8)  # exponents 7 and -6
        assert 2e-2 < self.rounding(x, codes, scales) < 1e-1

    @pytest.mark.parametrize("rows", [1, 18, 300])
    def test_rows_that_are_rounded_before(self, rows: int) -> None:
        x, *weights = self.case("groups", rows)
        x[0, 5] = np.nan
        rounded = RoundedRows.of(jnp.asarray(x))
        assert rounded.scales.shape == (20, -(-rows // 4) * 4) and not rounded.scales[:, rows:].any()
        got, want = self.run(rounded, *weights, groups=5), self.run(x, *weights, groups=5)
        np.testing.assert_array_equal(got, want)
        assert np.isnan(got[0, : got.shape[1] // 5]).all() and not np.isnan(got[1:]).any()

    @pytest.mark.parametrize("rows", [3, 700])
    @pytest.mark.parametrize("name", ["groups", "two_parts", "four_parts", "wide"])
    def test_rounds_for_the_next_product(self, name: str, rows: int) -> None:
        x, *weights = self.case(name, rows)
        x[1, 5] = np.nan
        groups = MATRICES[name][2]
        made = dense_e4m3_rounding(x, *pack(*weights), groups=groups, implementation=self.implementation)
        plain = jnp.asarray(self.run(x, *weights, groups=groups, dtype=jnp.bfloat16))
        if plain.shape[1] % (groups * 128) or rows < 512 or self.implementation == "xla":
            np.testing.assert_array_equal(made.astype(np.float32), plain.astype(np.float32))
            return
        assert isinstance(made, RoundedRows)
        want = RoundedRows.of(plain)
        np.testing.assert_array_equal(made.codes, want.codes)
        np.testing.assert_array_equal(made.scales, want.scales)

    def rounding(self, x: np.ndarray, codes: np.ndarray, scales: np.ndarray, groups: int = 1) -> float:
        """Compares a product with float64 of the same codes. Returns what rounding the rows costs of it."""
        rounded, row_scales = codes_of(x)
        values = rounded.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * row_scales.repeat(128, 1)
        want = oracle.product(values, oracle.dequantised(codes, scales), groups)
        got = self.run(x, codes, scales, groups=groups)
        assert got.dtype == np.float32 and got.shape == want.shape
        assert np.linalg.norm(got - want) <= 3e-4 * np.linalg.norm(want)
        exact = oracle.product(x.astype(np.float64), oracle.dequantised(codes, scales), groups)
        return float(np.linalg.norm(want - exact) / np.linalg.norm(exact))


class TestDenseE4m3(DenseE4m3Test):
    implementation = "xla"


@pytest.mark.parametrize("shape", [(), (128,), (2, 3, 128), (2, 200)])
def test_only_rows_are_rounded(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=f"x has {len(shape)} dimensions|rows have 200 columns"):
        RoundedRows.of(jnp.ones(shape))
    assert RoundedRows.of(np.ones((2, 128)).tolist()).shape == (2, 128)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["groups", "four_parts"])
def test_the_unit_has_the_same_products(name: str) -> None:
    """The reference and the simulated kernel differ by what the unit cuts off, and by nothing else."""
    x, codes, scales = TestDenseE4m3().case(name, 3)
    n, k, groups = MATRICES[name]
    of_rows = np.exp2(scales.astype(np.float32) - 127).repeat(128, 0)[:n]
    unit = matrix_unit.dense(*codes_of(x), codes, of_rows, parts=matrix_unit.parts_of(n, k), groups=groups)
    got = TestDenseE4m3().run(x, codes, scales, groups=groups)
    assert 0 < np.linalg.norm(got - unit) <= 3e-4 * np.linalg.norm(unit)
