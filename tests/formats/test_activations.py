"""Rows rounded to e4m3: all bfloat16 numbers, against the rule in float32 bits, and against float64 with `frexp`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.formats.activations import ROW_BLOCK, dequantise_rows, quantise_rows, to_bfloat16

from ..oracle.released import as_released
from ..oracle.rows import LARGEST, _amax, _codes, _scale_exponent

quantise = jax.jit(quantise_rows)
ALL = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def in_float64(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by `frexp` and float64, NaN and infinities too."""
    blocks = x.astype(np.float64).reshape(len(x), -1, ROW_BLOCK)
    exponent = _scale_exponent(_amax(blocks, 1e-4), LARGEST["e4m3"])
    with np.errstate(invalid="ignore"):
        codes = _codes("e4m3", blocks / np.exp2(exponent)[..., None])
    return codes.reshape(x.shape), (exponent + 127).astype(np.uint8)


def rows_of_all() -> np.ndarray:
    """Every bfloat16 as the greatest of a block, and every one among random ones of its size."""
    finite = np.sort(ALL[np.isfinite(ALL.astype(np.float32))])[::-1][: 256 * 127]
    rng = np.random.default_rng(0)
    greatest = finite[:, None].astype(np.float32) * rng.uniform(-1, 1, (len(finite), ROW_BLOCK))
    greatest[:, 5] = finite
    return np.concatenate([greatest.astype(ml_dtypes.bfloat16), finite.reshape(-1, ROW_BLOCK)])


def test_all_numbers_as_released() -> None:
    x = rows_of_all()
    codes, scales = (np.asarray(y) for y in quantise(x))
    for want_codes, want_scales in (as_released(x), in_float64(x)):
        np.testing.assert_array_equal(scales, want_scales)
        np.testing.assert_array_equal(codes & 0x7F, want_codes & 0x7F)
        nonzero = codes & 0x7F != 0
        np.testing.assert_array_equal(codes[nonzero], want_codes[nonzero])


def test_rounding_to_bfloat16_is_one_and_stays() -> None:
    """XLA may leave out a pair of conversions, but not what this is lowered to."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32), ALL.astype(np.float32)])
    with np.errstate(invalid="ignore"):  # NaN
        want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(to_bfloat16)(x)), want)
    text = quantise.lower(x[:ROW_BLOCK]).as_text()
    assert "stablehlo.reduce_precision" in text and "bf16" not in text


def test_ties_go_to_even_and_nothing_is_clipped() -> None:
    x = np.zeros((1, ROW_BLOCK), np.float32)
    x[0, :7] = [448, 17, 19, 21, 2**-10, 3 * 2**-10, -17]  # steps of 2 from 16 on; 2^-9 is the least subnormal
    codes, scales = quantise(x)
    assert np.asarray(scales).tolist() == [[127]]
    values = np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert values[0, :7].tolist() == [448, 16, 20, 20, 0, 2**-8, -16]
    above = np.asarray(quantise(np.where(x == 448, 450, x))[1])  # the next bfloat16: another scale, no clipping
    assert above.tolist() == [[128]]


def assert_within_half_a_step(x: np.ndarray) -> np.ndarray:
    """Checks what rows of bfloat16 numbers are rounded to. Returns the steps between the codes near each."""
    codes, scales = (np.asarray(y) for y in quantise(x))
    _, exponent = np.frexp(np.abs(x).astype(np.float64) / (factor := np.exp2(scales - 127.0).repeat(ROW_BLOCK, 1)))
    steps = np.exp2(np.clip(exponent - 1, -6, 8) - 3) * factor
    assert (np.abs(np.asarray(dequantise_rows(codes, scales), np.float64) - x) <= steps / 2).all()
    return steps


@pytest.mark.parametrize("exponent", [-20, -8, 0, 7, 60])
def test_a_scale_that_doubles_moves_nothing_by_a_step(exponent: int) -> None:
    """The greatest of a block is 448 times a power of two, or the next number: another scale, the same values but for
    rounding.
    """
    rng = np.random.default_rng(exponent + 20)
    below = (rng.standard_normal((16, 2 * ROW_BLOCK)) * 100).astype(ml_dtypes.bfloat16).astype(np.float32)
    below = np.clip(below, -440, 440) * np.float32(2) ** exponent
    below[:, 7] = np.float32(448) * np.float32(2) ** exponent
    above = np.where(below == below[:, 7:8], below * np.float32(450 / 448), below)
    steps = assert_within_half_a_step(below), assert_within_half_a_step(above)
    (a, one), (b, other) = (quantise(x) for x in (below, above))
    np.testing.assert_array_equal(np.asarray(other) - np.asarray(one), np.tile(np.uint8([1, 0]), (16, 1)))
    values = [np.asarray(dequantise_rows(*parts), np.float64) for parts in ((a, one), (b, other))]
    moved = np.abs(values[1] - values[0])
    assert (moved <= np.maximum(*steps)).all() and not moved[:, ROW_BLOCK:].any()
    assert np.linalg.norm(moved) < 0.03 * np.linalg.norm(values[0])


def test_outliers_cost_the_others_nothing() -> None:
    """Columns of thirty times the size, one in two hundred: the others keep their precision."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 1024)) * np.where(rng.random(1024) < 0.005, 30, 1)
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_within_half_a_step(x)
    usual = np.abs(x) < 5
    error = np.where(usual, np.asarray(dequantise_rows(*quantise(x))) - x, 0)
    assert 0.02 < np.linalg.norm(error) / np.linalg.norm(np.where(usual, x, 0)) < 0.03


def test_small_blocks_have_the_floor_and_nan_is_its_own() -> None:
    x = np.zeros((3, 2 * ROW_BLOCK), np.float32)
    x[0, 0], x[1, 3], x[2, 7], x[2, 200] = 1e-6, np.nan, np.inf, -np.inf
    x[1, 4] = 1.0
    codes, scales = (np.asarray(y) for y in quantise(x))
    assert scales[:, 0].tolist() == [127 - 22, 127 - 8, 127 + 120] and scales[2, 1] == 127 + 120
    assert codes[1, 3] == 0x7F and codes[2, 7] == 0x7E and codes[2, 200] == 0xFE
    np.testing.assert_array_equal(codes, in_float64(x)[0])


def test_values_come_back_within_a_step() -> None:
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(ml_dtypes.bfloat16).astype(np.float32)
    codes, scales = quantise(x)
    back = np.asarray(dequantise_rows(codes, scales))
    assert np.array_equal(np.asarray(dequantise_rows(codes, scales, jnp.bfloat16)).astype(np.float32), back)
    np.testing.assert_array_equal(np.asarray(dequantise_rows(*quantise(back))), back)  # rounding again changes nothing
    error = np.linalg.norm(back - x) / np.linalg.norm(x)
    assert 0.02 < error < 0.03


@pytest.mark.parametrize(("block", "floor"), [(64, 1e-4), (ROW_BLOCK, 1e-2)])
def test_another_rule_has_other_codes(block: int, floor: float) -> None:
    """A block of 64, another floor: the comparison above would see them."""
    x = rows_of_all()[-256:]
    small = (np.random.default_rng(2).standard_normal((64, 256)) * 1e-3).astype(ml_dtypes.bfloat16)
    seen = [np.array_equal(np.asarray(quantise(y)[0]), as_released(y, block, floor)[0]) for y in (x, small)]
    assert not all(seen)


def test_columns_are_in_128s() -> None:
    with pytest.raises(ShapeError, match="quantise_rows: rows have 192 columns, expected a multiple of 128"):
        quantise_rows(jnp.zeros((2, 192)))
