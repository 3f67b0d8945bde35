"""route against float64. Subclass `RouteTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.ops import route

from .op_test import OpTest

jit_route = jax.jit(route, static_argnames=("top", "scale", "implementation"))
SIZES = {"flash": (64, 256, 6), "pro": (5, 384, 6), "tiny": (3, 8, 2), "all": (7, 5, 5)}  # tokens, experts, top


def shares(logits: np.ndarray, chosen: np.ndarray, scale: float) -> np.ndarray:
    score = np.sqrt(np.logaddexp(0, np.take_along_axis(logits.astype(np.float64), chosen, 1)))
    return scale * score / score.sum(1, keepdims=True)


class RouteTest(OpTest):
    op = "route"

    def run(self, logits: np.ndarray, top: int, scale: float = 1.5, **picks: np.ndarray) -> list[np.ndarray]:
        found = jit_route(logits, top=top, scale=scale, implementation=self.implementation, **picks)
        assert [x.dtype for x in found] == [np.int32, np.float32]
        return [np.asarray(x) for x in found]

    @pytest.mark.parametrize("size", SIZES)
    def test_chooses_by_score_plus_bias(self, size: str) -> None:
        tokens, experts, top = SIZES[size]
        rng = np.random.default_rng(tokens)
        logits = (4 * rng.standard_normal((tokens, experts))).astype(np.float32)
        bias = rng.standard_normal(experts).astype(np.float32)
        chosen, share = self.run(logits, top, bias=bias)
        sums = np.sqrt(np.logaddexp(0, logits.astype(np.float64))) + bias
        picked = np.take_along_axis(sums, chosen, 1)
        assert (np.diff(picked, axis=1) <= 1e-6).all()
        left = sums.copy()
        np.put_along_axis(left, chosen, -np.inf, 1)
        assert (left.max(1) <= picked.min(1) + 1e-6).all()
        np.testing.assert_allclose(share, shares(logits, chosen, 1.5), rtol=1e-5)

    @pytest.mark.parametrize("size", SIZES)
    def test_takes_those_given(self, size: str) -> None:
        tokens, experts, top = SIZES[size]
        rng = np.random.default_rng(tokens)
        logits = rng.standard_normal((tokens, experts)).astype(np.float32)
        given = rng.permuted(np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), axis=1)[:, :top]
        chosen, share = self.run(logits, top, chosen=given)
        np.testing.assert_array_equal(chosen, given)
        np.testing.assert_allclose(share, shares(logits, given, 1.5), rtol=1e-5)

    def test_given_ids_of_no_expert_and_given_twice(self) -> None:
        """No score is read beside the experts' own: such a token's shares are NaN. One named twice counts twice."""
        logits = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
        given = np.array([[0, 8, 1], [-1, 2, 3], [2**31 - 1, -(2**31), 4], [5, 7, 5]], np.int32)
        chosen, share = self.run(logits, 3, chosen=given)
        np.testing.assert_array_equal(chosen, given)
        assert np.isnan(share[:3]).any(1).all()
        np.testing.assert_allclose(share[3], shares(logits[3:], given[3:], 1.5)[0], rtol=1e-5)

    def test_of_equals_the_lower_number(self) -> None:
        logits = np.zeros((2, 256), np.float32)
        logits[1, 77] = 1
        chosen, share = self.run(logits, 6, bias=np.zeros(256, np.float32))
        np.testing.assert_array_equal(chosen, [range(6), [77, *range(5)]])
        np.testing.assert_allclose(share.sum(1), 1.5, rtol=1e-6)

    def test_logits_that_are_not_finite(self) -> None:
        logits = np.zeros((3, 256), np.float32)
        logits[0] = np.nan
        logits[1, 200], logits[1, 100] = np.nan, np.inf
        logits[2] = -np.inf
        chosen, share = self.run(logits, 6, bias=np.zeros(256, np.float32))
        assert all(len(set(row)) == 6 for row in chosen.tolist()) and ((chosen >= 0) & (chosen < 256)).all()
        assert set(chosen[1, :2]) == {100, 200}
        assert np.isnan(share[:2]).any(1).all()
        np.testing.assert_array_equal(share[2], 0)

    def test_alone_and_among_others(self) -> None:
        rng = np.random.default_rng(0)
        logits = rng.standard_normal((64, 256)).astype(np.float32)
        bias = rng.standard_normal(256).astype(np.float32)
        among = self.run(logits, 6, bias=bias)
        for token in (0, 31, 63):
            for got, want in zip(self.run(logits[token : token + 1], 6, bias=bias), among, strict=True):
                np.testing.assert_array_equal(got[0], want[token])


class TestRoute(RouteTest):
    implementation = "xla"


def test_no_tokens() -> None:
    chosen, share = route(jnp.zeros((0, 8)), bias=jnp.zeros(8), top=2)
    assert chosen.shape == share.shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": None}, "bias and chosen are not given, expected one of them"),
        ({"chosen": jnp.zeros((2, 3), jnp.int32)}, "bias and chosen are both given, expected one of them"),
        ({"bias": jnp.zeros(9)}, r"bias is float32 \[9\], expected float32 \[8\]"),
        ({"top": 9}, "top is 9, expected 1 to 8"),
        ({"logits": jnp.zeros((2, 8), jnp.bfloat16)}, r"logits is bfloat16 \[2, 8\], expected float32"),
    ],
)
def test_arguments_are_named(changes: dict, message: str) -> None:
    given = {"logits": jnp.zeros((2, 8)), "bias": jnp.zeros(8), "top": 3} | changes
    with pytest.raises(ShapeError, match=f"route: {message}"):
        route(**given)
