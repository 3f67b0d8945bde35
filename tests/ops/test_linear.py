"""linear_parts against float64. Subclass `LinearTest` with another `implementation` to test a kernel."""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.ops.linear import linear_parts

jit_linear = jax.jit(linear_parts, static_argnames=("widths", "dtype", "implementation"))


def operands(tokens: int, rows: int, depth: int, groups: int, dtype=jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    """x and weights, both exact in `dtype`; the weights of several groups three-dimensional."""
    rng = np.random.default_rng(tokens * rows + depth)
    x, weight = (rng.standard_normal(shape) for shape in ((tokens, groups * depth), (groups, rows // groups, depth)))
    return jnp.asarray(x, dtype).astype(jnp.float32), jnp.asarray(weight if groups > 1 else weight[0], dtype)


class LinearTest:
    implementation: ClassVar[Literal["xla", "cuda"]]

    def check(self, tokens: int, widths: tuple[int, ...], depth: int, groups: int = 1, dtype=jnp.bfloat16) -> None:
        x, weight = operands(tokens, sum(widths), depth, groups, dtype)
        got = jit_linear(x, weight, widths=widths, implementation=self.implementation)
        assert [y.shape for y in got] == [(tokens, n) for n in widths]
        parts = np.asarray(x, np.float64).reshape(tokens, groups, depth)
        want = np.einsum("tgk,gnk->tgn", parts, np.asarray(weight, np.float64).reshape(groups, -1, depth))
        want = want.reshape(tokens, -1)
        # The matrix units cut off what they add: up to 2^-23 of the sum for each 16 columns.
        np.testing.assert_allclose(np.concatenate(got, 1), want, rtol=0, atol=1e-4 * np.abs(want).max())

    @pytest.mark.parametrize(("tokens", "widths", "groups"), [(1, (128, 64, 24), 1), (3, (64,), 4)])
    def test_equals_float64(self, tokens: int, widths: tuple[int, ...], groups: int) -> None:
        self.check(tokens, widths, 128, groups)


class TestLinear(LinearTest):
    implementation = "xla"

    def test_float32_weights_are_not_rounded(self) -> None:
        self.check(5, (30, 7), 33, dtype=jnp.float32)

    def test_activations_are_rounded_to_bfloat16(self) -> None:
        (y,) = jit_linear(jnp.full((1, 1), 1.001), jnp.ones((1, 1), jnp.bfloat16))
        assert y.dtype == jnp.float32 and float(y[0, 0]) == 1.0

    def test_results_are_rounded_on_demand(self) -> None:
        (y,) = jit_linear(jnp.ones((1, 1)), jnp.full((1, 1), 1.001), dtype=jnp.bfloat16)
        assert y.dtype == jnp.bfloat16 and float(y[0, 0]) == 1.0
