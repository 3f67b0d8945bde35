"""Products with bf16 weights: their lowering on the CPU; on a GPU float64, and a row's bits alone and among others."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import dense_bf16

from ..ops.test_dense_bf16 import DenseBf16Test


def lowered(rows: int, columns: int, tokens: int = 17, **options: Any) -> str:
    x, weights = (jax.ShapeDtypeStruct((n, columns), jnp.bfloat16) for n in (tokens, rows))
    call = jax.jit(functools.partial(dense_bf16, **options, implementation="cuda"))
    return call.trace(x, weights).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call() -> None:
    assert lowered(256, 4096).count("@dsv4_dense_bf16") == 1
    for rows, columns in ((520, 4096), (250, 4096), (256, 1024), (256, 4608)):
        with pytest.raises(ImplementationError, match=f"17 rows of x and 1 groups of weights {rows} x {columns}"):
            lowered(rows, columns)
    assert lowered(576, 384, tokens=16).count("@dsv4_dense_stream") == 1
    assert lowered(576, 384, tokens=400, alike=True).count("@dsv4_dense_stream") == 1
    assert lowered(256, 4096, tokens=1).count("@dsv4_dense_bf16") == 1  # the matrix alone decides


@pytest.mark.gpu
class TestDenseBf16OnTheGpu(DenseBf16Test):
    implementation = "cuda"

    @pytest.mark.parametrize("name", ["flash", "pro"])
    def test_alone_and_among_others(self, name: str) -> None:
        x, weights = self.case(name, 333)  # of 256 and more tokens another kernel's
        among = self.run(x, weights)
        for first, size in ((0, 1), (3, 8), (100, 16), (31, 64), (180, 17), (260, 73), (5, 200), (7, 256), (20, 313)):
            np.testing.assert_array_equal(self.run(x[first : first + size], weights), among[first : first + size])

    @pytest.mark.parametrize("name", ["tiles", "parts", "odd", "odd parts", "two parts", "compressor"])
    def test_any_number_of_rows_has_the_same_bits(self, name: str) -> None:
        x, weights = self.case(name, 300)
        among = self.run(x, weights, alike=True)
        for first, size in ((0, 1), (3, 8), (7, 9), (100, 16), (31, 17), (2, 64), (235, 65), (9, 128), (171, 129)):
            part = self.run(x[first : first + size], weights, alike=True)
            np.testing.assert_array_equal(part, among[first : first + size])

    @pytest.mark.parametrize("name", ["tiles", "parts"])
    def test_few_rows_alone_and_among_others(self, name: str) -> None:
        x, weights = self.case(name, 16)
        among = self.run(x, weights)
        for first, size in ((0, 1), (3, 8), (7, 9), (13, 3)):
            np.testing.assert_array_equal(self.run(x[first : first + size], weights), among[first : first + size])
