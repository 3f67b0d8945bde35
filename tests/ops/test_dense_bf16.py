"""dense_bf16 against float64. Subclass `DenseBf16Test` with another `implementation` to test a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.ops import dense_bf16

from .op_test import OpTest

jit_dense = jax.jit(dense_bf16, static_argnames=("groups", "dtype", "alike", "implementation"))
# Rows and columns of the weights.
MATRICES = {"flash": (256, 4096), "pro": (384, 7168), "least": (8, 2048), "tiles": (640, 384), "parts": (1536, 4096)}
MATRICES |= {"odd": (576, 384), "odd parts": (576, 2048), "two parts": (12800, 1024), "compressor": (1024, 7168)}


class DenseBf16Test(OpTest):
    op = "dense_bf16"

    def case(self, name: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        rng, (rows, columns) = np.random.default_rng(tokens), MATRICES[name]
        return tuple(rng.standard_normal((n, columns)).astype(jnp.bfloat16) for n in (tokens, rows))

    def run(self, x: np.ndarray, weights: np.ndarray, **options: Any) -> np.ndarray:
        return np.asarray(jit_dense(x, weights, **options, implementation=self.implementation))

    @pytest.mark.parametrize(
        ("name", "tokens"),
        [("flash", 1), ("flash", 70), ("pro", 9), ("least", 17), ("tiles", 5), ("parts", 16)]
        + [(name, tokens) for name in ("tiles", "parts", "odd", "odd parts", "two parts") for tokens in (33, 150)],
    )
    def test_equals_float64(self, name: str, tokens: int) -> None:
        x, weights = self.case(name, tokens)
        got, want = self.run(x, weights, alike=tokens > 16), x.astype(np.float64) @ weights.astype(np.float64).T
        assert got.dtype == np.float32 and got.shape == want.shape
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)

    @pytest.mark.parametrize("tokens", [3, 16])
    def test_groups_have_columns_of_their_own(self, tokens: int) -> None:
        x, weights = self.case("tiles", tokens)
        wide = np.concatenate([x, x[:, ::-1]], 1)
        parts = [self.run(part, half) for part, half in ((x, weights[:320]), (x[:, ::-1], weights[320:]))]
        got = {
            dtype: jit_dense(wide, weights, groups=2, dtype=dtype, implementation=self.implementation)
            for dtype in (jnp.float32, jnp.bfloat16)
        }
        np.testing.assert_allclose(got[jnp.float32], np.concatenate(parts, 1), rtol=0, atol=1e-3)
        rounded = got[jnp.bfloat16]
        assert rounded.dtype == jnp.bfloat16
        np.testing.assert_allclose(rounded.astype(jnp.float32), got[jnp.float32], rtol=2**-7, atol=1e-3)

    def test_float32_rows_are_taken_in_bf16(self) -> None:
        x, weights = self.case("least", 3)
        exact = x.astype(np.float32)
        np.testing.assert_array_equal(self.run(exact * (1 + 2**-12), weights), self.run(x, weights))


class TestDenseBf16(DenseBf16Test):
    implementation = "xla"


def test_no_tokens() -> None:
    assert dense_bf16(jnp.zeros((0, 64)), jnp.zeros((8, 64), jnp.bfloat16)).shape == (0, 8)


def test_refuses_other_shapes() -> None:
    x, weights = jnp.zeros((1, 64)), jnp.zeros((8, 64), jnp.bfloat16)
    for groups, columns in ((2, 128), (0, 0), (3, 192)):
        with pytest.raises(ShapeError, match=rf"x has 64 columns, {groups} groups of weights \[8, 64\] take {columns}"):
            dense_bf16(x, weights, groups=groups)
    with pytest.raises(ShapeError, match="dtype is float16, expected float32 or bfloat16"):
        dense_bf16(x, weights, dtype=jnp.float16)
    with pytest.raises(ShapeError, match=r"weights is float32 \[8, 64\], expected bfloat16 \[N, K\]"):
        dense_bf16(jnp.zeros((1, 64)), jnp.zeros((8, 64)))
