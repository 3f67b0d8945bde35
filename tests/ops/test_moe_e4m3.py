"""moe_e4m3 against fake-quantised float64 and the simulated unit. Subclass `MoeE4m3Test` to test a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.formats.weights import fp4_e4m3
from dsv4_jax.ops import moe_e4m3

from ..oracle import experts as plain
from ..oracle import matrix_unit, released
from .test_moe import EXPERTS, HIDDEN, INTER, LIMIT, STATIC, MoeTest


class MoeE4m3Test(MoeTest):
    op = "moe_e4m3"
    multiply = jax.jit(moe_e4m3, static_argnames=STATIC)
    codec = fp4_e4m3
    oracle = released

    def test_shares_that_differ_little_move_results_little(self) -> None:
        """The scale of hidden columns doubles between two shares 1e-4 apart: none moves by more than a step."""
        (x, chosen, _), packed, weights = self.case(EXPERTS)
        chosen[:, 0], chosen[:, 1:] = np.arange(EXPERTS), -1
        rows, steps = released.rounded(x.astype(np.float64)), np.zeros((EXPERTS, INTER))
        shares = np.zeros((2, *chosen.shape), np.float32)
        for e, matrices in enumerate(weights):
            gate, up = (released.bf16(rows[e] @ plain.dequantised(*matrices[name]).T) for name in ("gate", "up"))
            gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
            hidden = np.abs(gate / (1 + np.exp(-gate)) * up)
            share = 449 * np.exp2(np.floor(np.log2(hidden[:128].max())) - 9) / hidden[:128].max()
            shares[:, e, 0] = share * (1 - 5e-5), share * (1 + 5e-5)
            below, above = (released.bf16(hidden[None] * share) for share in shares[:, e, 0].astype(np.float64))
            scales = [released.as_released(h)[1][0].astype(int) for h in (below, above)]
            assert scales[1][0] == scales[0][0] + 1
            scale = np.exp2(scales[1].repeat(128) - 127.0)
            steps[e] = np.exp2(np.maximum(np.frexp(above[0] / scale)[1] - 1, -6) - 3) * scale
        one, other = (self.run(x, chosen, share, *packed).astype(np.float64) for share in shares)
        downs = [np.abs(plain.dequantised(*matrices["down"])) for matrices in weights]
        bound = np.stack([down @ step for down, step in zip(downs, steps, strict=True)])
        assert (np.abs(other - one) <= bound + 2.0**-7 * np.abs(one)).all()
        moved = np.linalg.norm(other - one, axis=1) / np.linalg.norm(one, axis=1)
        assert 0 < moved.max() < 0.02

    def test_columns_share_their_scale_in_128s(self) -> None:
        """In both products half of the columns are so much less than the others that few codes are left for them."""
        (x, chosen, share), _, weights = self.case(self.tokens)
        small = np.arange(HIDDEN) % 128 >= 64
        x = (x.astype(np.float32) * np.where(small, 2.0**-6, 2.0**8)).astype(jnp.bfloat16)
        for matrices in weights:
            for _, scales in matrices.values():
                scales[:] = np.where(small[: 32 * scales.shape[1] : 32], 127, 113)  # so that they count as much
            matrices["up"][1][small[:INTER]] -= 14
        got = self.run(x, chosen, share, *self.packed(weights))
        want = released.experts(x.astype(np.float64), chosen, share, weights, LIMIT)
        assert np.linalg.norm(got - want) <= self.tolerance * np.linalg.norm(want)

    def test_what_is_beside_is_added_before_the_sums_are_rounded(self) -> None:
        (x, chosen, share), packed, _ = self.case(self.tokens)
        x[2, 17], chosen[2, 0] = np.nan, 2
        beside = (30 * np.random.default_rng(5).standard_normal(x.shape)).astype(jnp.bfloat16)
        sums = self.run(x, chosen, share, *packed)
        how = dict(limit=LIMIT, routed=2 * EXPERTS, implementation=self.implementation)
        got = np.asarray(type(self).multiply(x, chosen, share, *packed, beside=beside, **how))
        assert got.dtype == jnp.bfloat16 and np.isnan(got[2]).all()
        want = (sums + beside.astype(np.float32)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


class TestMoeE4m3(MoeE4m3Test):
    implementation = "xla"
    test_devices_with_a_part_of_the_experts = None  # as of `moe`: its sums are these

    def test_is_what_rounding_makes_of_moe(self) -> None:
        """2.6e-2 a product; the share before the second rounding, and blocks of 128 columns, are seen."""
        (x, chosen, share), packed, weights = self.case(self.tokens)
        got, exact = self.run(x, chosen, share, *packed), plain.experts(x, chosen, share, weights, LIMIT)
        assert 2e-2 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 6e-2
        ones = np.ones_like(share)
        each = [self.run(x, np.where(np.arange(6) == i, chosen, -1), ones, *packed) for i in range(6)]
        after = sum(share[:, i, None] * part for i, part in enumerate(each))
        assert np.linalg.norm(got - after) > 5e-3 * np.linalg.norm(got)


@pytest.mark.parametrize("promote", [128, 32])
def test_the_unit_has_the_same_products(promote: int) -> None:
    """One expert in the canonical form: its first product from the same rows, its second from the same codes."""
    rng = np.random.default_rng(3)
    (weights,) = plain.random_weights(rng, 1, HIDDEN, INTER)
    x = released.bf16(rng.standard_normal((3, HIDDEN)))
    codes, scales = released.as_released(x)
    row_scales = np.exp2(scales.astype(np.float32) - 127)
    first = [matrix_unit.expert_product(codes, row_scales, *weights[name], promote) for name in ("gate", "up")]
    for sums, name in zip(first, ("gate", "up"), strict=True):
        want = released.rounded(x) @ plain.dequantised(*weights[name]).T
        assert 0 < np.linalg.norm(sums - want) <= 3e-4 * np.linalg.norm(want)
    weight = np.float32(0.7)
    hidden = released.bf16(released.swiglu(*first, LIMIT, weight))
    codes, scales = released.as_released(hidden)
    second = matrix_unit.expert_product(codes, np.exp2(scales.astype(np.float32) - 127), *weights["down"], promote)
    want = hidden @ plain.dequantised(*weights["down"]).T
    assert 0 < np.linalg.norm(second - want) <= 3e-4 * np.linalg.norm(want)


def test_how_an_expert_is_added_up() -> None:
    """What spans more than 2^14 in one row is promoted every 32 columns, and then so is the matrix; bits differ."""
    rng = np.random.default_rng(4)
    ((codes, scales),) = (w["down"] for w in plain.random_weights(rng, 1, HIDDEN, INTER))
    x = rng.standard_normal((3, INTER)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    ones = np.ones((3, INTER // 128), np.float32)
    assert np.array_equal(
        matrix_unit.expert_product(x, ones, codes, scales), matrix_unit.expert_product(x, ones, codes, scales, 128)
    )
    scales[7, 2] = scales[7, 0] - 16
    got, by_32 = (matrix_unit.expert_product(x, ones, codes, scales, promote) for promote in (None, 32))
    np.testing.assert_array_equal(got, by_32)
    with pytest.raises(AssertionError, match="a code was lost"):
        matrix_unit.expert_product(x, ones, codes, scales, 128)
    assert np.asarray(fp4_e4m3.spans(codes, scales)).max() > fp4_e4m3.MAX_SPAN
    assert not jnp.any(fp4_e4m3.widened(jnp.asarray(codes), jnp.asarray(scales))[2])
