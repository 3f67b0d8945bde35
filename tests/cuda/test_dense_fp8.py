"""The dense FP8 kernel: its lowering on the CPU; on a GPU float64, and a row's bits alone and among others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import dense_fp8

from ..ops.test_dense_fp8 import MATRICES, DenseFp8Test

CODES, SCALES = jax.ShapeDtypeStruct((8, 4, 8192), jnp.uint8), jax.ShapeDtypeStruct((4, 4), jnp.uint8)


def lowered(rows: int, **options) -> str:
    call = jax.jit(functools.partial(dense_fp8, implementation="cuda", **options))
    x = jax.ShapeDtypeStruct((rows, options.get("groups", 1) * 512), jnp.float32)
    return call.trace(x, CODES, SCALES).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("assumed_library")
@pytest.mark.parametrize(("dtype", "spelled"), [(jnp.float32, "f32"), (jnp.bfloat16, "bf16")])
def test_lowers_to_one_ffi_call(dtype, spelled: str) -> None:
    text = lowered(3, groups=2, dtype=dtype)
    assert text.count("@dsv4_dense_fp8") == 1 and f"tensor<3x512x{spelled}>" in text
    assert "groups = 2 : i32" in text


@pytest.mark.usefixtures("assumed_library")
def test_more_rows_are_for_the_reference() -> None:
    lowered(256)
    with pytest.raises(ImplementationError, match="'cuda' cannot run: it takes up to 256 rows, not 257"):
        lowered(257)


@pytest.mark.gpu
class TestDenseFp8OnTheGpu(DenseFp8Test):
    implementation = "cuda"

    @pytest.mark.parametrize("name", MATRICES)
    def test_alone_and_among_others(self, name: str) -> None:
        x, weights, scales, _ = self.case(name, 256)
        groups = MATRICES[name][2]
        among = self.run(x, weights, scales, groups=groups)
        for first, size in ((0, 1), (3, 8), (100, 16), (31, 33), (180, 64), (9, 129)):
            alone = self.run(x[first : first + size], weights, scales, groups=groups)
            np.testing.assert_array_equal(alone, among[first : first + size])
