"""swiglu against float64. Subclass `SwigluTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.ops import Columns, swiglu

from .op_test import OpTest

jit_swiglu = jax.jit(swiglu, static_argnames=("limit", "dtype", "implementation"))


class SwigluTest(OpTest):
    op = "swiglu"

    def test_equals_float64(self) -> None:
        matrix = 20 * np.random.default_rng(0).standard_normal((5, 2 * 640)).astype(np.float32)
        gate, up = (Columns(jnp.asarray(matrix), start, (640,)) for start in (0, 640))
        got = np.asarray(jit_swiglu(gate, up, limit=10.0, dtype=jnp.bfloat16, implementation=self.implementation))
        clamped = np.minimum(matrix[:, :640].astype(np.float64), 10)
        want = clamped / (1 + np.exp(-clamped)) * np.clip(matrix[:, 640:], -10, 10)
        assert got.dtype == jnp.bfloat16 and got.shape == want.shape
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-8, atol=1e-6)

    @pytest.mark.parametrize("width", [640, 636])
    def test_bfloat16_is_taken_as_its_float32(self, width: int) -> None:
        matrix = jnp.asarray(20 * np.random.default_rng(0).standard_normal((5, 2 * width)), jnp.bfloat16)
        how = dict(limit=10.0, dtype=jnp.bfloat16, implementation=self.implementation)
        got, want = (
            jit_swiglu(Columns(x, 0, (width,)), Columns(x, width, (width,)), **how)
            for x in (matrix, matrix.astype(jnp.float32))
        )
        np.testing.assert_array_equal(got, want)


class TestSwiglu(SwigluTest):
    implementation = "xla"


def test_refuses() -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ShapeError, match=r"up is float32 \[2, 4\], expected float \[2, 8\]"):
        swiglu(x, x[:, :4], limit=1.0)
    with pytest.raises(ShapeError, match="limit is -1, expected a number >= 0"):
        swiglu(x, x, limit=-1)
    with pytest.raises(ShapeError, match="dtype is float16, expected float32 or bfloat16"):
        swiglu(x, x, limit=1.0, dtype=jnp.float16)
