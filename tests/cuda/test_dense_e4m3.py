"""The kernels of e4m3 rows and weights: their lowering on the CPU; on a GPU the unit's bits, for any number of rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.ops import dense_e4m3
from dsv4_jax.ops.rounded_rows import RoundedRows

from ..ops.test_dense_e4m3 import MATRICES, DenseE4m3Test, codes_of
from ..ops.test_dense_fp8 import OnTheGpu
from ..oracle import matrix_unit
from .test_dense_fp8 import lowered
from .test_widths import constants


@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_two_ffi_calls() -> None:
    text = lowered(3, dense_e4m3, groups=2, dtype=jnp.bfloat16)
    assert text.count("@dsv4_round_rows") == text.count("@dsv4_dense_e4m3") == 1
    assert "tensor<3x512xbf16>" in text and "tensor<8x4xf32>" in text  # scales by blocks of columns, rows in fours
    assert "groups = 2 : i32" in text and "whole_rows = 512 : i32" in text and "shape = 0 : i32" in text


@pytest.mark.usefixtures("assumed_library")
def test_rows_that_are_rounded_lower_to_one_ffi_call() -> None:
    text = lowered(3, lambda x, *weights, **options: dense_e4m3(RoundedRows.of(x), *weights, **options))
    assert text.count("@dsv4_dense_e4m3") == 1 and "@dsv4_round_rows" not in text


def test_sizes_are_those_of_the_header() -> None:
    k = constants("dense/e4m3.cuh")
    assert (k["kE4m3Columns"], k["kE4m3Depth"]) == (matrix_unit.BLOCK, matrix_unit.DEPTH)


@pytest.mark.gpu
class TestDenseE4m3OnTheGpu(OnTheGpu, DenseE4m3Test):
    implementation = "cuda"

    @pytest.mark.parametrize("name", MATRICES)
    def test_has_the_bits_of_the_unit(self, name: str) -> None:
        x, codes, scales = self.case(name, 300)
        n, k, groups = MATRICES[name]
        few = np.r_[0, 5, 150, 299]
        of_rows = np.exp2(scales.astype(np.float32) - 127).repeat(128, 0)[:n]
        rounded, row_scales = codes_of(x[few])
        parts = matrix_unit.parts_of(n, k)
        want = matrix_unit.dense(rounded, row_scales, codes, of_rows, parts=parts, groups=groups)
        np.testing.assert_array_equal(self.run(x, codes, scales, groups=groups)[few], want)
        np.testing.assert_array_equal(self.run(x[few], codes, scales, groups=groups), want)
