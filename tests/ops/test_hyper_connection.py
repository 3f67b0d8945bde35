"""hyper_connection against float64. Subclass `HyperConnectionTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.ops import hyper_connection
from dsv4_jax.ops.hyper_connection import Written, connection_vector, hyper_head

from ..oracle import residual as oracle
from .op_test import OpTest

OPTIONS = ("iterations", "hc_eps", "eps", "dtype", "implementation")
jit_connection = jax.jit(hyper_connection, static_argnames=OPTIONS)
jit_head = jax.jit(hyper_head, static_argnames=OPTIONS[1:])
SIZES = {"flash": (70, 4, 4096), "pro": (9, 4, 7168), "one": (1, 4, 4096), "two streams": (5, 2, 48)}
EPS = {"hc_eps": 1e-6, "eps": 1e-6}
# Relative L2 of bfloat16 numbers whose sums are float32's: one in thousands is the other neighbour, 2^-8 away.
ROUNDED = 1e-4


def near(got: np.ndarray, want: np.ndarray, limit: float) -> bool:
    got = got.astype(np.float64)
    return bool(np.linalg.norm(got - want) <= limit * np.linalg.norm(want))


@dataclasses.dataclass
class Case:
    """Arguments by name, in NumPy."""

    arrays: dict[str, np.ndarray]
    outputs: tuple[np.ndarray, ...] = ()

    @classmethod
    def random(cls, size: tuple[int, int, int], outputs: int = 1, head: bool = False, dtype: Any = np.float32) -> Case:
        (tokens, n, width), rng = size, np.random.default_rng(0)
        rows = n if head else (2 + n) * n

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        def uniform(low: float, high: float, *shape: int) -> np.ndarray:
            return rng.uniform(low, high, shape).astype(np.float32)

        arrays = {
            "streams": (normal(tokens, n, width) * uniform(0.1, 8, tokens, 1, 1)).astype(dtype),
            "fn": normal(rows, n * width) * np.float32((n * width) ** -0.5),
            "base": normal(rows),
            "scale": uniform(0.5, 1.5, 1 if head else 3),
            "norm": uniform(0.5, 1.5, width),
            "post": uniform(0, 2, tokens, n),
            "comb": uniform(0, 1, tokens, n, n),
        }
        return cls(arrays, tuple(normal(tokens, width).astype(dtype) for _ in range(outputs)))

    def part(self, pick: slice | list[int]) -> Case:
        """The same of some tokens."""
        of_tokens = ("streams", "post", "comb")
        arrays = {name: x[pick] if name in of_tokens else x for name, x in self.arrays.items()}
        return Case(arrays, tuple(x[pick] for x in self.outputs))

    def given(self) -> list[Any]:
        a = self.arrays
        written = Written(self.outputs, a["post"], a["comb"]) if self.outputs else None
        vector = np.concatenate([a["norm"], a["base"], a["scale"]])
        return [a["streams"], a["fn"], np.pad(vector, (0, -vector.size % 64)), written]


class HyperConnectionTest(OpTest):
    op = "hyper_connection"

    def takes(self, size: tuple[int, int, int]) -> bool:
        return True

    def run(self, case: Case, **options: Any) -> list[np.ndarray]:
        options = EPS | {"iterations": 20, "implementation": self.implementation} | options
        return [np.asarray(x) for x in jit_connection(*case.given(), **options)]

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("outputs", [0, 1, 2])
    def test_is_that_of_float64(self, size: str, outputs: int) -> None:
        case = Case.random(SIZES[size], outputs)
        with self.asked(size=SIZES[size]):
            found = self.run(case)
            wanted = oracle.connection(case.arrays, case.outputs, iterations=20, **EPS)
            for got, want in zip(found, wanted, strict=True):
                assert got.dtype == np.float32
                assert near(got, want, 2e-6)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("outputs", [0, 1, 2])
    def test_bfloat16_streams_are_those_of_float64(self, size: str, outputs: int) -> None:
        """But for sums between two bfloat16 numbers. What follows is compared from the same streams on."""
        case = Case.random(SIZES[size], outputs, dtype=jnp.bfloat16)
        with self.asked(size=SIZES[size]):
            x, streams, post, comb = self.run(case)
            assert streams.dtype == jnp.bfloat16 and x.dtype == post.dtype == comb.dtype == np.float32
            want = oracle.widened(case.arrays, case.outputs)
            assert near(streams, want, ROUNDED) and (streams != want).mean() <= 1e-3
            of_new = case.arrays | {"streams": streams}
            want_x, _, *back = oracle.connection(of_new, (), iterations=20, **EPS)
            assert near(x, want_x, ROUNDED)
            for got, want in zip((post, comb), back, strict=True):
                assert near(got, want, 4e-6)

    def test_bfloat16_streams_are_rounded_before_they_are_mixed(self) -> None:
        case = Case.random((3, 4, 4096), 1, dtype=jnp.bfloat16)
        x, streams, *back = self.run(case)
        again, same, *others = self.run(Case(case.arrays | {"streams": streams}))
        for got, want in zip((x, streams, *back), (again, same, *others), strict=True):
            np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("size", SIZES)
    def test_head_of_bfloat16_streams_is_that_of_float64(self, size: str) -> None:
        case = Case.random(SIZES[size], 1, head=True, dtype=jnp.bfloat16)
        with self.asked(size=SIZES[size]):
            got = np.asarray(jit_head(*case.given(), **EPS, implementation=self.implementation))
            assert near(got, oracle.head(case.arrays, case.outputs, **EPS), ROUNDED)

    @pytest.mark.parametrize("size", SIZES)
    def test_head_is_that_of_float64(self, size: str) -> None:
        case = Case.random(SIZES[size], 1, head=True)
        with self.asked(size=SIZES[size]):
            got = np.asarray(jit_head(*case.given(), **EPS, implementation=self.implementation))
            assert near(got, oracle.head(case.arrays, case.outputs, **EPS), 2e-6)

    def test_rounds_x_alone(self) -> None:
        case = Case.random((5, 4, 4096))
        x, *rest = self.run(case)
        rounded, *same = self.run(case, dtype=jnp.bfloat16)
        np.testing.assert_array_equal(rounded, np.asarray(jnp.asarray(x).astype(jnp.bfloat16)))
        for got, want in zip(same, rest, strict=True):
            np.testing.assert_array_equal(got, want)

    def test_first_streams_stay(self) -> None:
        case = Case.random((3, 4, 4096), outputs=0)
        np.testing.assert_array_equal(self.run(case)[1], case.arrays["streams"])

    def test_comb_is_nearly_doubly_stochastic(self) -> None:
        _, _, _, comb = self.run(Case.random((6, 4, 4096)))
        np.testing.assert_allclose(comb.sum(1), 1, atol=1e-5)
        np.testing.assert_allclose(comb.sum(2), 1, atol=1e-2)

    @pytest.mark.parametrize("iterations", [1, 2])
    def test_iterations(self, iterations: int) -> None:
        case = Case.random((3, 4, 4096))
        want = oracle.connection(case.arrays, case.outputs, iterations=iterations, **EPS)[3]
        np.testing.assert_allclose(self.run(case, iterations=iterations)[3], want, rtol=1e-5)

    def test_tokens_that_are_not_finite_are_alone_with_it(self) -> None:
        case = Case.random((12, 4, 4096), outputs=2)
        among = self.run(case)
        case.arrays["streams"][1] = np.nan
        case.outputs[0][2, 7] = np.inf
        case.arrays["post"][4, 0] = np.nan
        kept = [i for i in range(12) if i not in (1, 2, 4)]
        found = self.run(case)
        for got, want in zip(found, among, strict=True):
            np.testing.assert_array_equal(got[kept], want[kept])
        assert np.isnan(found[0][[1, 2, 4]]).any(1).all()

    def test_streams_of_zeros(self) -> None:
        case = Case.random((2, 4, 4096), outputs=0)
        case.arrays["streams"][0] = 0
        x, streams, post, comb = self.run(case)
        assert not x[0].any() and not streams[0].any()
        assert np.isfinite(post).all() and np.isfinite(comb).all()


class TestHyperConnection(HyperConnectionTest):
    implementation = "xla"


def test_no_tokens() -> None:
    x, streams, post, comb = jit_connection(*Case.random((0, 4, 64)).given(), **EPS, iterations=20)
    assert (x.shape, streams.shape, post.shape, comb.shape) == ((0, 64), (0, 4, 64), (0, 4), (0, 4, 4))


F = jnp.float32
SMALL = {
    "streams": jnp.zeros((2, 4, 8)),
    "fn": jnp.zeros((24, 32)),
    "vector": jnp.zeros(64),
    "written": Written((jnp.zeros((2, 8)),), jnp.zeros((2, 4)), jnp.zeros((2, 4, 4))),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": jnp.zeros((2, 8))}, r"streams is float32 \[2, 8\], expected float32 \[T, n, D\]"),
        ({"streams": jnp.zeros((2, 4, 8), jnp.float16)}, r"streams is float16 \[2, 4, 8\], expected float32"),
        ({"fn": jnp.zeros((4, 32))}, r"fn is float32 \[4, 32\], expected float32 \[24, 32\]"),
        ({"vector": jnp.zeros(35)}, r"vector is float32 \[35\], expected float32 \[64\]"),
        ({"written": jnp.zeros(3)}, "written is .*, expected Written"),
        ({"written": SMALL["written"]._replace(outputs=())}, "written.outputs has not one or two arrays"),
        ({"written": SMALL["written"]._replace(outputs=(jnp.zeros((2, 9)),))}, r"written.outputs is float32 \[2, 9\]"),
        (
            {"written": SMALL["written"]._replace(outputs=(jnp.zeros((2, 8), jnp.bfloat16),))},
            r"written.outputs is bfloat16 \[2, 8\], expected float32",
        ),
        (
            {"streams": jnp.zeros((2, 4, 8), jnp.bfloat16)},
            r"written.outputs is float32 \[2, 8\], expected bfloat16",
        ),
        ({"written": SMALL["written"]._replace(comb=jnp.zeros((2, 16)))}, r"written.comb is float32 \[2, 16\], exp"),
        ({"written": SMALL["written"]._replace(post=jnp.zeros((3, 4)))}, r"written.post is float32 \[3, 4\], exp"),
        ({"iterations": 0}, "iterations must be an integer of at least 1, got 0"),
        ({"dtype": jnp.float16}, "dtype is float16, expected float32 or bfloat16"),
    ],
)
def test_arguments_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ShapeError, match=f"hyper_connection: {message}"):
        hyper_connection(**(SMALL | {"iterations": 20} | EPS | changes))


def test_arguments_of_the_head_are_named() -> None:
    given = SMALL | EPS | {"fn": jnp.zeros((4, 32))}
    with pytest.raises(ShapeError, match=r"hyper_head: vector is float32 \[128\], expected float32 \[64\]"):
        hyper_head(**(given | {"vector": jnp.zeros(128)}))
    with pytest.raises(ShapeError, match=r"hyper_head: fn is float32 \[24, 32\], expected float32 \[4, 32\]"):
        hyper_head(**(given | {"fn": jnp.zeros((24, 32))}))


def test_vector_is_in_order_and_padded() -> None:
    vector = connection_vector(jnp.full(40, 1.0), jnp.full(24, 2.0), jnp.full(3, 3.0))
    np.testing.assert_array_equal(vector, np.repeat([1, 2, 3, 0], (40, 24, 3, 61)).astype(np.float32))
