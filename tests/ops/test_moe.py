"""moe against float64. Subclass `MoeTest` with another `implementation` to test a kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.errors import ShapeError
from dsv4_jax.formats.weights import fp4
from dsv4_jax.formats.weights.fp4 import gate_up_rows
from dsv4_jax.ops import moe
from dsv4_jax.ops.exchange import sum_in_pairs

from ..oracle import experts as oracle
from .op_test import OpTest

HIDDEN, INTER, LIMIT = 512, 256, 1.0
EXPERTS, TOP = 8, 6
STATIC = ("limit", "first", "routed", "implementation")


class MoeTest(OpTest):
    """Attributes, to be replaced for `moe_e4m3`:

    multiply: the op, jitted.
    codec: of its weights.
    oracle: what comes out in float64.
    tolerance: of its relative L2 distance.
    """

    op = "moe"
    tokens = 40
    multiply: ClassVar[Callable[..., jax.Array]] = jax.jit(moe, static_argnames=STATIC)
    codec: ClassVar[ModuleType] = fp4
    oracle: ClassVar[ModuleType] = oracle
    tolerance = 2e-3

    def run(self, *args: Any, first: int = 0, routed: int = 2 * EXPERTS) -> np.ndarray:
        settings = dict(limit=LIMIT, first=first, routed=routed, implementation=self.implementation)
        return np.asarray(type(self).multiply(*args, **settings))

    def case(self, tokens: int) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], list[dict]]:
        """x, chosen and share; packed weights; and these as released."""
        rng = np.random.default_rng(1)
        weights = oracle.random_weights(rng, EXPERTS, HIDDEN, INTER)
        x = rng.standard_normal((tokens, HIDDEN)).astype(jnp.bfloat16)
        chosen = rng.permuted(np.tile(np.arange(2 * EXPERTS, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP]
        return (
            (x, chosen, rng.random((tokens, TOP), np.float32)),
            self.packed(weights),
            weights,
        )

    def packed(self, weights: list[dict]) -> tuple[np.ndarray, ...]:
        parts = [[np.stack([w[name][i] for w in weights]) for name in oracle.NAMES] for i in (0, 1)]
        (gate_up,) = self.codec.pack(*(gate_up_rows(gate, up) for gate, up, _ in parts))
        return (gate_up, *self.codec.pack(*(x for _, _, x in parts)))

    @pytest.mark.parametrize("first", [0, 4])
    def test_against_float64_and_among_others(self, first: int) -> None:
        (x, chosen, share), packed, weights = self.case(self.tokens)
        got = self.run(x, chosen, share, *packed, first=first)
        want = self.oracle.experts(x.astype(np.float64), chosen, share, weights, LIMIT, first)
        assert got.dtype == np.float32 and np.linalg.norm(got - want) <= self.tolerance * np.linalg.norm(want)
        x[:7], chosen[:7], share[:7] = x[20:27] * 3, chosen[20:27], share[20:27]
        among = self.run(x, chosen, share, *packed, first=first)
        np.testing.assert_array_equal(among[7:], got[7:])

    def test_devices_with_a_part_of_the_experts(self) -> None:
        """Their sums, added in pairs, are bit by bit that of one device with all; tokens may be theirs in turn."""
        (x, chosen, share), packed, _ = self.case(8)
        whole = self.run(x, chosen % EXPERTS, share, *packed, routed=EXPERTS)
        here = EXPERTS // 4
        parts = [
            self.run(
                x, chosen % EXPERTS - first, share, *(part[first : first + here] for part in packed), routed=EXPERTS
            )
            for first in range(0, EXPERTS, here)
        ]
        np.testing.assert_array_equal(sum_in_pairs(parts), whole)

    @pytest.mark.parametrize("tokens", [1, 2, 40])
    def test_experts_named_twice_and_ids_of_none(self, tokens: int) -> None:
        """Each counts as often as it is named, of fewer experts than a token has; what is no expert adds nothing."""
        (x, chosen, share), packed, weights = self.case(tokens)
        chosen[:] = [2, 1, 2, 3, 2, 1]
        chosen[1::3] = [3, -1, 3, 2**31 - 1, 12, -(2**31)]
        few = [part[:4] for part in packed]
        want = self.oracle.experts(x.astype(np.float64), chosen, share, weights[:4], LIMIT)
        for _ in range(2):  # the second finds in its memory what the first has left
            got = self.run(x, chosen, share, *few)
            assert np.linalg.norm(got - want) <= self.tolerance * np.linalg.norm(want)


class TestMoe(MoeTest):
    implementation = "xla"

    def test_others_are_not_added(self) -> None:
        """A token that chose none of the experts here gets zeros, whatever they would make of it."""
        (x, chosen, share), packed, _ = self.case(4)
        chosen[1] = EXPERTS + np.arange(TOP)
        x[1] = np.inf
        got = self.run(x, chosen, share, *packed)
        assert not got[1].any() and np.isfinite(got).all()


def test_no_tokens() -> None:
    weights = jnp.zeros((8, 8, 4, 4352), jnp.uint8), jnp.zeros((8, 8, 2, 4352), jnp.uint8)
    pairs = jnp.zeros((0, TOP), jnp.int32)
    assert moe(jnp.zeros((0, HIDDEN)), pairs, pairs.astype(jnp.float32), *weights, limit=1.0).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": jnp.zeros((2, TOP), jnp.int32)}, r"share is int32 \[2, 6\], expected float"),
        ({"chosen": jnp.zeros((3, TOP), jnp.int32)}, r"chosen is int32 \[3, 6\], expected int32"),
        ({"down": jnp.zeros((8, 8, 2, 4096), jnp.uint8)}, r"down is uint8 \[8, 8, 2, 4096\]"),
        ({"down": jnp.zeros((7, 8, 2, 4352), jnp.uint8)}, r"down is uint8 \[7, 8, 2, 4352\]"),
        ({"routed": 0}, "routed must be an integer from 8 to"),
        ({"routed": 16, "first": 9}, "first must be an integer from 0 to 8, got 9"),
        ({"first": jnp.zeros(2, jnp.int32)}, r"first is int32 \[2\], expected int32 \[\]"),
        ({"limit": None}, "limit is None, expected a number >= 0"),
        ({"shards": 2.0}, "shards must be an integer from 1 to"),
        (
            {"down": jnp.zeros((0, 8, 2, 4352), jnp.uint8), "gate_up": jnp.zeros((0, 8, 4, 4352), jnp.uint8)},
            "gate_up and down hold no experts",
        ),
        ({"shards": 3}, "2 tokens are not those of 3 devices"),
        ({"x": jnp.zeros((2, 640))}, r"x has 640 columns; gate_up .* are not experts of 640 x 256"),
        ({"down": jnp.zeros((8, 8, 3, 4352), jnp.uint8)}, "x has 512 columns; .* are not experts of 512 x 384"),
    ],
)
@pytest.mark.parametrize("op", [ops.moe, ops.moe_e4m3])
def test_arguments_are_named(op: Callable[..., jax.Array], changes: dict, message: str) -> None:
    good = {"x": jnp.zeros((2, HIDDEN)), "chosen": jnp.zeros((2, TOP), jnp.int32), "share": jnp.zeros((2, TOP))}
    weights = {"gate_up": jnp.zeros((8, 8, 4, 4352), jnp.uint8), "down": jnp.zeros((8, 8, 2, 4352), jnp.uint8)}
    with pytest.raises(ShapeError, match=f"{op.__name__}: {message}"):
        op(**(good | weights | {"limit": LIMIT} | changes))
