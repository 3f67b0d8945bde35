"""The kernels of e4m3 rows and weights: their lowering on the CPU; on a GPU the unit's bits, for any number of rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import dense_e4m3

from ..ops.test_dense_e4m3 import MATRICES, DenseE4m3Test, codes_of
from ..oracle import dense as oracle
from ..oracle import matrix_unit
from .test_widths import constants

CODES, SCALES = jax.ShapeDtypeStruct((8, 4, 8192), jnp.uint8), jax.ShapeDtypeStruct((4, 4), jnp.uint8)


def lowered(rows: int, **options) -> str:
    call = jax.jit(functools.partial(dense_e4m3, implementation="cuda", **options))
    x = jax.ShapeDtypeStruct((rows, options.get("groups", 1) * 512), jnp.float32)
    return call.trace(x, CODES, SCALES).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_two_ffi_calls() -> None:
    text = lowered(3, groups=2, dtype=jnp.bfloat16)
    assert text.count("@dsv4_round_rows") == text.count("@dsv4_dense_e4m3") == 1
    assert "tensor<3x512xbf16>" in text and "tensor<8x4xf32>" in text  # scales by blocks of columns, rows in fours
    assert "groups = 2 : i32" in text and "whole_rows = 512 : i32" in text and "shape = 0 : i32" in text


@pytest.mark.usefixtures("assumed_library")
def test_more_rows_are_for_the_reference() -> None:
    with pytest.raises(ImplementationError, match="'cuda' cannot run: it takes up to 65536 rows, not 65537"):
        lowered((1 << 16) + 1)


def test_sizes_are_those_of_the_header() -> None:
    k = constants("dense/e4m3.cuh")
    assert (k["kE4m3Columns"], k["kE4m3Depth"]) == (matrix_unit.BLOCK, matrix_unit.DEPTH)


@pytest.mark.gpu
class TestDenseE4m3OnTheGpu(DenseE4m3Test):
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

    @pytest.mark.parametrize("name", MATRICES)
    def test_alone_and_among_others(self, name: str) -> None:
        x, codes, scales = self.case(name, 300)
        groups = MATRICES[name][2]
        among = self.run(x, codes, scales, groups=groups)
        for first, size in ((0, 1), (3, 8), (100, 16), (31, 33), (180, 64), (9, 129), (0, 256)):
            alone = self.run(x[first : first + size], codes, scales, groups=groups)
            np.testing.assert_array_equal(alone, among[first : first + size])

    def test_a_share_of_rows_has_the_bits_of_the_whole(self) -> None:
        codes, scales = oracle.random_matrix(np.random.default_rng(0), 8192, 1024)
        x = np.random.default_rng(1).standard_normal((9, 1024)).astype(jnp.bfloat16)
        whole = self.run(x, codes, scales)
        for first in (0, 4096):
            half = slice(first, first + 4096), slice(first // 128, (first + 4096) // 128)
            got = self.run(x, codes[half[0]], scales[half[1]], whole_rows=8192)
            np.testing.assert_array_equal(got, whole[:, half[0]])
