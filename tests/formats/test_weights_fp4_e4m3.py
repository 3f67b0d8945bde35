"""FP4 weights widened to e4m3: no bit is lost, what cannot be widened stays, and a thread's words hold its codes."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dsv4_jax.formats.weights import fp4_e4m3
from dsv4_jax.formats.weights.fp4_e4m3 import LARGEST_SCALE, MAX_SPAN, TILE_BYTES, spans

from ..oracle.experts import dequantised

pack, unpack = jax.jit(fp4_e4m3.pack), jax.jit(fp4_e4m3.unpack)
E4M3 = ml_dtypes.float8_e4m3fn
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def matrix(span: int, rows: int = 64, columns: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Any codes; the exponents of each 128 columns span so much, from anywhere."""
    rng = np.random.default_rng(span)
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    least = rng.integers(1, 128 - span, (rows, columns // 128, 1))
    scales = least + rng.permuted(np.tile([0, span, span // 2, 1 if span else 0], (*least.shape[:2], 1)), axis=-1)
    return codes, scales.reshape(rows, -1).astype(np.uint8)


def selected(table: np.ndarray, word: int) -> np.ndarray:
    """PRMT: four bytes of the eight, by the nibbles of the low half of a word."""
    return table[[word >> shift & 7 for shift in (0, 4, 8, 12)]]


def as_the_kernel(tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes [64, 128] of a tile and the factor of each [64, 4], thread by thread, as registers of the unit's A."""
    words = tile[:4096].view("<u4").reshape(4, 128, 2)
    rows = tile[4096:].view("<u4").reshape(4, 8, 2)
    codes, factors = np.zeros((64, 128), np.uint8), np.zeros((64, 4))
    for group, thread, half in np.ndindex(4, 128, 2):
        warp, r, q = thread >> 5, thread >> 2 & 7, thread & 3
        row, of_row, word = 16 * warp + r + 8 * half, int(rows[warp, r, half]), int(words[group, thread, half])
        if of_row >> 24 >= 0xFE:
            k, scale = (of_row >> 8 + 4 * group & 15) - 8, of_row & 0xFF
        else:
            k, scale = 0, of_row >> 8 * group & 0xFF
        table = (MAGNITUDES * 2.0**k).astype(E4M3)
        assert (table.astype(np.float64) == MAGNITUDES * 2.0**k).all()
        factors[row, group] = 2.0 ** (scale - 127)
        magnitudes = np.stack([selected(table.view(np.uint8), word), selected(table.view(np.uint8), word >> 16)])
        signs = [[at >> 8 * i & 0x80 for i in range(4)] for at in (word, word << 4 & 0xFFFFFFFF)]
        for block in range(2):
            first = 32 * group + 16 * block + 4 * q
            codes[row, first : first + 4] = magnitudes[block] | np.array(signs[block], np.uint8)
    return codes, factors


@pytest.mark.every_case
@pytest.mark.parametrize("span", [*range(16), 40])
def test_decodes_as_released(span: int) -> None:
    assert_decodes(*matrix(span), widens=span <= MAX_SPAN)


def assert_decodes(codes: np.ndarray, scales: np.ndarray, widens: bool) -> None:
    """Of a matrix [64, 256]: the kernel's codes times their factors are the weights, and come back as released."""
    (packed,) = (np.asarray(x) for x in pack(codes, scales))
    assert packed.shape == (1, 2, TILE_BYTES)
    want = dequantised(codes, scales)
    for step in range(2):
        got, factors = as_the_kernel(packed[0, step])
        alike = (factors == factors[:, :1]).all()
        assert alike == widens or (scales == scales[:, :1]).all()  # a scale of 128 columns, or of 32 in all the matrix
        values = got.view(E4M3).astype(np.float64) * factors.repeat(32, 1)
        np.testing.assert_array_equal(values, want[:, 128 * step : 128 * step + 128])
    for part, released in zip(unpack(packed), (codes, scales), strict=True):
        np.testing.assert_array_equal(part, released)


def test_least_codes_are_subnormal() -> None:
    """Every magnitude times the least factor that is widened, 2^-8, beside the greatest, 2^6."""
    codes = np.tile(np.arange(16, dtype=np.uint8) | np.arange(16, dtype=np.uint8) << 4, (64, 8))
    scales = np.tile(np.uint8([120, 106, 106, 120]), (64, 2))
    assert_decodes(codes, scales, widens=True)
    (packed,) = (np.asarray(x) for x in pack(codes, scales))
    got, _ = as_the_kernel(packed[0, 0])
    least = got[:, 32:96] & 0x7F
    assert sorted({*least.flat}) == [0, 1, 2, 3, 4, 6, 8, 12] and {*got[:, :32].flat} >= {0x7C, 0xFC}  # 384


@given(data=st.data(), most=st.integers(0, 20))
@settings(max_examples=15)
def test_no_weight_changes(data: st.DataObject, most: int) -> None:
    """Any codes, any scales: what is multiplied are the released weights, by one scale or by four."""
    codes = data.draw(arrays(np.uint8, (64, 128), elements=st.integers(0, 255)))
    least = data.draw(arrays(np.uint8, (64, 2, 1), elements=st.integers(1, LARGEST_SCALE - 20)))
    apart = data.draw(arrays(np.uint8, (64, 2, 4), elements=st.integers(0, most)))
    codes[:, ::16] |= 1  # no group is zero, of which the scale would be another
    scales = (least + apart).reshape(64, 8)
    widens = bool(np.ptp(apart, axis=-1).max() <= MAX_SPAN)
    assert bool(spans(codes, scales).max() <= MAX_SPAN) == widens
    assert_decodes(codes, scales, widens)


def test_one_row_decides_for_its_matrix_alone() -> None:
    codes, scales = (np.stack([x, x, x]) for x in matrix(9))
    scales[1, 17, 4:8] = [90, 90, 105, 90]
    (tiles,) = pack(codes, scales)
    marks = np.asarray(tiles)[..., 4096:].reshape(3, -1, 4)[..., 3]
    assert (marks[[0, 2]] == 0xFF).all() and (marks[1] != 0xFF).all()
    assert np.unravel_index(spans(codes, scales).argmax(), (3, 64, 2)) == (1, 17, 1)
    assert spans(codes, scales).max() == 15


@pytest.mark.parametrize("apart", [11, 12])
def test_a_row_within_eleven_binades_has_one_scale(apart: int) -> None:
    """Then no code is subnormal, whose products the unit would align otherwise; one row more decides for all."""
    codes, scales = matrix(0)
    scales[:] = np.arange(40, 104)[:, None] + np.random.default_rng(0).integers(0, 12, scales.shape)
    codes[:, ::16] |= 1
    codes[3, 16 * 5 : 16 * 6] = 0x80  # zeros, whose scale does not count
    scales[3], scales[3, 5] = np.arange(46, 54), 127
    scales[17, [2, 6]] = 60, 60 + apart
    scales[17, [0, 1, 3, 4, 5, 7]] = 61
    (packed,) = (np.asarray(x) for x in pack(codes, scales))
    got, factors = zip(*(as_the_kernel(tile) for tile in packed[0]), strict=True)
    codes_e4m3, factors = np.concatenate(got, -1) & 0x7F, np.concatenate(factors, -1)
    one = apart <= fp4_e4m3.MAX_ROW_SPAN
    assert (packed[..., 4096:].reshape(-1, 4)[:, 3] == (0xFE if one else 0xFF)).all()
    assert (factors == factors[:, :1]).all() == one
    assert not one or (codes_e4m3[codes_e4m3 > 0] >= 8).all()
    np.testing.assert_array_equal(fp4_e4m3.decode(*unpack(packed)), fp4_e4m3.decode(codes, scales))


def test_zeros_have_no_scale() -> None:
    """A group of zeros, of either sign, spans nothing, whatever its scale says; least scales keep their values."""
    codes, scales = matrix(3)
    codes[:, :16] = 0x80
    scales[:, 0] = np.where(np.arange(64) % 2, 1, 128)
    codes[5], scales[6] = 0, [1, 2, 3, 4, 5, 6, 7, 1]
    assert spans(codes, scales).max() <= 4 + 2 and not spans(codes, scales)[5].any()
    (packed,) = pack(codes, scales)
    got, factors = as_the_kernel(np.asarray(packed)[0, 0])
    assert (factors == factors[:, :1]).all()
    values = got.view(E4M3).astype(np.float64) * factors.repeat(32, 1)
    np.testing.assert_array_equal(values, dequantised(codes, scales)[:, :128])
    np.testing.assert_array_equal(fp4_e4m3.decode(*unpack(packed)), fp4_e4m3.decode(codes, scales))
