"""finish_queries against float64. Subclass `QueriesTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.formats import index_format
from dsv4_jax.ops.columns import Columns, Product
from dsv4_jax.ops.queries import finish_queries

from ..oracle import rows as oracle
from .op_test import OpTest

jit_finish = jax.jit(finish_queries, static_argnames=("eps", "rotate", "round_fp4", "implementation"))
SHAPES = {"attend": (5, 3, 512), "index": (7, 4, 128), "small": (3, 2, 64)}


def fp4_round_trip(q: np.ndarray) -> np.ndarray:
    fmt = index_format("fp4", q.shape[-1])
    return oracle.decode(fmt, oracle.encode(fmt, q))


def model(q: np.ndarray, position: np.ndarray, freq: np.ndarray, eps: float | None, rotate: bool) -> np.ndarray:
    """The definition in float64, without the FP4 rounding."""
    q = q.astype(np.float64)
    if eps is not None:
        q = q / np.sqrt((q * q).mean(-1, keepdims=True) + eps)
    pairs = q[..., -2 * len(freq) :].reshape(*q.shape[:-1], -1, 2)
    angle = (position[:, None].astype(np.float32) * freq).astype(np.float64)[:, None]  # float32, as the model has it
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    rotary = np.stack([turned.real, turned.imag], -1).reshape(*q.shape[:-1], -1)
    q = np.concatenate([q[..., : -2 * len(freq)], rotary], -1)
    if rotate:
        n = q.shape[-1]
        bits = np.arange(n)[:, None] & np.arange(n)
        q = q @ np.where(np.bitwise_count(bits) % 2, -1.0, 1.0) / np.sqrt(n)
    return q


class QueriesTest(OpTest):
    op = "queries"

    def run(self, q, position, freq, **steps) -> np.ndarray:
        args = (q.astype(np.float32), position.astype(np.int32), freq)
        out = jit_finish(*args, **steps, implementation=self.implementation)
        assert out.shape == q.shape and out.dtype in (jnp.float32, jnp.bfloat16)
        return np.asarray(out).astype(np.float64)

    def case(self, shape: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(len(shape))
        tokens, heads, dim = SHAPES[shape]
        pairs = 32 if dim > 64 else 8
        freq = (10_000.0 ** -(np.arange(pairs) / pairs)).astype(np.float32)
        return rng.standard_normal((tokens, heads, dim)) * 3, rng.integers(0, 1 << 20, tokens), freq

    @pytest.mark.parametrize(("eps", "rotate"), [(None, False), (1e-6, False), (None, True)])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_equals_float64(self, shape: str, eps: float | None, rotate: bool) -> None:
        q, position, freq = self.case(shape)
        expected = model(q, position, freq, eps, rotate)
        # half a step of bf16, or a few of float32
        tolerance = 1e-5 if self.implementation == "xla" else 2**-8
        with self.asked(dim=q.shape[-1], rotate=rotate):
            actual = self.run(q, position, freq, eps=eps, rotate=rotate)
            np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=2e-5)

    @pytest.mark.parametrize(("shape", "start"), [("index", 64), ("index", 4), ("attend", 8)])
    def test_bfloat16_columns_are_as_their_float32(self, shape: str, start: int) -> None:
        """Bit for bit, where they lie or (no multiple of 16 bytes) cut."""
        q, position, freq = self.case(shape)
        tokens, heads, dim = q.shape
        matrix = np.random.default_rng(start).standard_normal((tokens, start + heads * dim + 64)).astype(jnp.bfloat16)
        columns = Columns(jnp.asarray(matrix), start, (heads, dim))
        made = jit_finish(columns, jnp.asarray(position, jnp.int32), freq, eps=1e-6, implementation=self.implementation)
        wide = np.asarray(columns.cut(), np.float32)
        np.testing.assert_array_equal(np.asarray(made).astype(np.float64), self.run(wide, position, freq, eps=1e-6))

    def test_fp4_rounding(self) -> None:
        q, position, freq = self.case("index")
        q[0, 0] = 0
        q[1, 1, :32] *= 1e-30
        q[2, 2, 5] = 1e30
        expected = fp4_round_trip(model(q, position, freq, None, True).astype(np.float32))
        actual = self.run(q, position, freq, rotate=True, round_fp4=True)
        # A value within a float32 step of a midpoint may go either way.
        assert (actual != expected).mean() <= 1e-3
        assert not actual[0, 0].any()

    def test_nan_and_infinity_in_a_group(self) -> None:
        q, position, freq = self.case("index")
        q[0, 0, 3], q[1, 1, 40] = np.nan, np.inf
        actual = self.run(q, position * 0, freq, round_fp4=True)
        expected = fp4_round_trip(q.astype(np.float32))
        np.testing.assert_array_equal(actual, expected)
        assert np.isnan(actual[0, 0, :32]).all() and np.isfinite(actual[0, 0, 32:]).all()


class TestQueries(QueriesTest):
    implementation = "xla"

    def test_of_a_product_that_is_not_made_yet(self) -> None:
        q, position, freq = self.case("small")
        x, weights = q[:, 0].astype(jnp.bfloat16), q.reshape(-1, 64)[:4].astype(jnp.bfloat16)
        product = Product(jnp.asarray(x), jnp.asarray(weights), (1, 4))
        made = (x.astype(np.float32) @ weights.astype(np.float32).T)[:, None]
        actual, expected = (jit_finish(v, position, freq[:2], eps=1e-6) for v in (product, made))
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
