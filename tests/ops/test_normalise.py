"""normalise against float64. Subclass `NormaliseTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.ops import Columns, normalise

from .op_test import OpTest

jit_normalise = jax.jit(normalise, static_argnames=("eps", "dtype", "implementation"))


class NormaliseTest(OpTest):
    op = "normalise"

    @pytest.mark.parametrize(("tokens", "width"), [(1, 1024), (5, 1536), (3, 4), (2, 8192)])
    def test_equals_float64(self, tokens: int, width: int) -> None:
        rng = np.random.default_rng(width)
        matrix = rng.standard_normal((tokens, width + 12)).astype(np.float32)
        weight = rng.standard_normal(width).astype(np.float32)
        values = Columns(jnp.asarray(matrix), 8, (width,))
        got = np.asarray(
            jit_normalise(values, weight, eps=1e-6, dtype=jnp.bfloat16, implementation=self.implementation)
        )
        x = matrix[:, 8 : 8 + width].astype(np.float64)
        want = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * weight
        assert got.dtype == jnp.bfloat16 and got.shape == want.shape
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-8, atol=1e-6)

    @pytest.mark.parametrize(("start", "width"), [(8, 1024), (0, 4), (4, 512)])
    def test_bfloat16_is_taken_as_its_float32(self, start: int, width: int) -> None:
        rng = np.random.default_rng(width)
        matrix = jnp.asarray(rng.standard_normal((5, 1536)), jnp.bfloat16)
        weight = rng.standard_normal(width).astype(np.float32)
        got, want = (
            jit_normalise(
                Columns(x, start, (width,)), weight, eps=1e-6, dtype=jnp.bfloat16, implementation=self.implementation
            )
            for x in (matrix, matrix.astype(jnp.float32))
        )
        np.testing.assert_array_equal(got, want)

    def test_alone_and_among_others(self) -> None:
        x = np.random.default_rng(0).standard_normal((40, 1024)).astype(np.float32)
        options = dict(eps=1e-6, dtype=jnp.bfloat16, implementation=self.implementation)
        among, alone = (jit_normalise(rows, np.ones(1024, np.float32), **options) for rows in (x, x[7:8]))
        np.testing.assert_array_equal(alone[0], among[7])


class TestNormalise(NormaliseTest):
    implementation = "xla"


def test_no_tokens() -> None:
    assert normalise(jnp.zeros((0, 8)), jnp.ones(8), eps=1e-6).shape == (0, 8)


def test_refuses_other_shapes() -> None:
    with pytest.raises(ShapeError, match=r"weight is float32 \[9\], expected float32 \[8\]"):
        normalise(jnp.zeros((1, 8)), jnp.ones(9), eps=1e-6)
    with pytest.raises(ShapeError, match="dtype is float16, expected float32 or bfloat16"):
        normalise(jnp.zeros((1, 8)), jnp.ones(8), eps=1e-6, dtype=jnp.float16)
