"""The experts' kernels with rows of e4m3: on a GPU the unit's bits, whatever the shape."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import moe_e4m3 as kernel
from dsv4_jax.formats.weights import fp4_e4m3
from dsv4_jax.formats.weights.fp4 import gate_up_rows
from dsv4_jax.ops import moe_e4m3
from dsv4_jax.ops.moe import PARTS, checked

from ..ops.test_moe import EXPERTS, HIDDEN, INTER, LIMIT, TOP
from ..ops.test_moe_e4m3 import MoeE4m3Test
from ..oracle import experts as plain
from ..oracle import matrix_unit

SHAPES = range(1, 6)  # that are compiled
MOVED = 6e-3  # relative L2, where the unit's 14 bits move one number in 400 between the products to another code
SIZES = (1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 100, 121, 255)  # tokens


def case_of(spread: int, tokens: int) -> tuple[tuple[np.ndarray, ...], tuple[jax.Array, ...], list[dict]]:
    """Rows of which one token has NaN and one names an expert thrice; packed weights of which one expert's scales are
    `spread` further apart than 12 binades; and these as released.
    """
    rng = np.random.default_rng(spread)
    weights = plain.random_weights(rng, EXPERTS, HIDDEN, INTER)
    for name, row in (("gate", 3), ("down", 70)):
        weights[2][name][1][row, 4:8] = [122, 110 - spread, 117, 110]
    parts = [[np.stack([w[name][i] for w in weights]) for name in plain.NAMES] for i in (0, 1)]
    (gate_up,) = fp4_e4m3.pack(*(gate_up_rows(gate, up) for gate, up, _ in parts))
    (down,) = fp4_e4m3.pack(*(x for _, _, x in parts))
    x = (rng.standard_normal((tokens, HIDDEN)) * np.exp2(rng.integers(-12, 6, (tokens, 1)))).astype(jnp.bfloat16)
    chosen = rng.permuted(np.tile(np.arange(2 * EXPERTS, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP]
    chosen[1] = [2, 1, 2, 3, 2, 1]
    chosen[2, 0] = 2
    x[2, 17] = np.nan
    return (x, chosen, rng.random((tokens, TOP), np.float32)), (gate_up, down), weights


@pytest.mark.parametrize("spread", [0, 13])
def test_what_the_unit_makes_is_what_the_reference_makes(spread: int) -> None:
    """But for its 14 bits: where they move a number to another code, a step of it."""
    rows, packed, weights = case_of(spread, 5)
    got = np.stack(list(sums_of_the_unit(*rows, weights)))
    want = np.asarray(moe_e4m3(*rows, *packed, limit=LIMIT, routed=2 * EXPERTS, implementation="xla"))
    assert np.isnan(got[2]).all() and np.isnan(want[2]).all()
    got, want = np.delete(got, 2, 0), np.delete(want, 2, 0)
    assert 0 < np.linalg.norm(got - want) <= MOVED * np.linalg.norm(want)


@pytest.mark.gpu
class TestMoeE4m3OnTheGpu(MoeE4m3Test):
    implementation = "cuda"
    tokens = 300
    tolerance = MOVED  # what has its exact bits is below

    def of_shape(self, shape: int, *args: np.ndarray, poison: int | None = None) -> np.ndarray:
        """In the compiled shape of this number; `poison`: the byte that memory holds before."""

        @jax.jit
        def run(*args: jax.Array) -> jax.Array:
            return kernel.call(checked("moe_e4m3", *args, LIMIT, 0, 2 * EXPERTS, 1), shape)

        if poison is not None:
            for size in (1 << 20, 1 << 24, 1 << 26, 1 << 26):  # what the call takes next lies where these lay
                jax.block_until_ready(jnp.full(size, poison, jnp.uint8))
        return np.asarray(run(*args))

    def test_alone_and_in_any_shape(self) -> None:
        """With the bits of its token among others, of memory full of NaN and of zeros."""
        rows, packed, _ = self.case(self.tokens)
        among = self.run(*rows, *packed)
        for size in SIZES:
            part = tuple(x[7 : 7 + size] for x in rows)
            np.testing.assert_array_equal(self.run(*part, *packed), among[7 : 7 + size])
        for shape in SHAPES:
            for poison in (0xFF, 0x7F, 0):
                np.testing.assert_array_equal(self.of_shape(shape, *rows, *packed, poison=poison), among)

    def test_all_tokens_at_two_experts(self) -> None:
        """Several items an expert, and experts of none."""
        (x, chosen, share), packed, weights = self.case(1000)
        chosen[:] = [5, 2, 9, 10, 11, 12]
        got = self.run(x, chosen, share, *packed)
        want = self.oracle.experts(x.astype(np.float64), chosen, share, weights, LIMIT)
        assert np.linalg.norm(got - want) <= self.tolerance * np.linalg.norm(want)
        np.testing.assert_array_equal(self.run(x[640:641], chosen[:1], share[640:641], *packed), got[640:641])

    @pytest.mark.parametrize(
        ("hidden", "inter", "here", "top"), [(256, 256, 1, 1), (768, 512, 9, 16), (256, 768, 8, 3)]
    )
    def test_other_sizes(self, hidden: int, inter: int, here: int, top: int) -> None:
        """Shapes agree, and no place of the workspace is taken twice."""
        rng = np.random.default_rng(hidden + inter)
        weights = plain.random_weights(rng, here, hidden, inter)
        parts = [[np.stack([w[name][i] for w in weights]) for name in plain.NAMES] for i in (0, 1)]
        (gate_up,) = fp4_e4m3.pack(*(gate_up_rows(gate, up) for gate, up, _ in parts))
        (down,) = fp4_e4m3.pack(*(x for _, _, x in parts))
        x = rng.standard_normal((150, hidden)).astype(jnp.bfloat16)
        chosen = rng.integers(-2, here + 2, (150, top), dtype=np.int32)
        share = rng.random((150, top), np.float32)
        want = self.oracle.experts(x.astype(np.float64), chosen, share, weights, LIMIT)
        first = None
        for shape in SHAPES:
            run = jax.jit(lambda *args, n=shape: kernel.call(checked("moe_e4m3", *args, LIMIT, 0, here, 1), n))
            got = np.asarray(run(x, chosen, share, gate_up, down))
            assert np.linalg.norm(got - want) <= self.tolerance * np.linalg.norm(want)
            np.testing.assert_array_equal(got, np.asarray(run(x, chosen, share, gate_up, down)))
            first = got if first is None else first
            np.testing.assert_array_equal(got, first)

    @pytest.mark.parametrize("spread", [0, 13])
    def test_has_the_bits_of_the_unit(self, spread: int) -> None:
        """Also of an expert whose scales spread so far that 32 columns are added up at a time."""
        rows, packed, weights = case_of(spread, 130)
        few = np.r_[0, 1, 2, 77, 129]
        want = np.stack(list(sums_of_the_unit(*(x[few] for x in rows), weights)))
        np.testing.assert_array_equal(self.run(*rows, *packed)[few], want)
        np.testing.assert_array_equal(self.run(*(x[few] for x in rows), *packed), want)


def sums_of_the_unit(x: np.ndarray, chosen: np.ndarray, share: np.ndarray, weights: list[dict]) -> Iterator[np.ndarray]:
    """What the kernel computes of each token, bit for bit: products by the simulated unit."""
    for token, experts, of_token in zip(x, chosen, share, strict=True):
        parts = np.zeros((PARTS, HIDDEN), np.float32)
        for e in sorted(set(experts.tolist()) & set(range(EXPERTS))):
            whole = np.float32(0)
            for one in of_token[experts == e]:
                whole = whole + one
            part = matrix_unit.expert(token[None], whole, weights[e], LIMIT)[0]
            parts[e * PARTS // (2 * EXPERTS)] += part
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        yield parts[0]
