"""The simulated FP8 matrix unit: against fractions, what it promises, and what other rules would give."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from ..oracle import matrix_unit as unit

E4M3 = ml_dtypes.float8_e4m3fn


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """All exponents, with subnormals and zeros of both signs; no NaN."""
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    codes[rng.random(shape) < 0.1] &= 0x87
    return codes


def value(code: int) -> Fraction:
    return Fraction(float(np.uint8(code).view(E4M3)))


def own_exponent(x: Fraction) -> int:
    """Of a number's leading bit."""
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return exponent - (abs(x) < Fraction(2) ** exponent)


def cut(x: Fraction, exponent: int) -> Fraction:
    """Toward zero, 13 bits behind the point of 2^exponent."""
    step = Fraction(2) ** (exponent - 13)
    return int(x / step) * step  # int() cuts off toward zero


def one_element(a: np.ndarray, b: np.ndarray, c: float) -> float:
    """The rule once more, on fractions, one element at a time."""

    def of(code: int) -> int:
        return max(int(code) >> 3 & 15, 1) - 7

    terms = [(value(x) * value(y), of(x) + of(y)) for x, y in zip(a, b, strict=True)]
    terms += [(Fraction(c), own_exponent(Fraction(c)) if c else 0)]
    terms = [(x, exponent) for x, exponent in terms if x]
    if not terms:
        return 0.0
    most = max(exponent for _, exponent in terms)
    total = sum((cut(x, most) for x, _ in terms), Fraction(0))
    return float(cut(total, own_exponent(total))) if total else 0.0


def test_equals_the_rule_on_fractions() -> None:
    rng = np.random.default_rng(0)
    a, b = random_codes(rng, 6, 32), random_codes(rng, 7, 32)
    a[0], b[0, 3:] = 0, 0
    a[1] &= 0x87  # subnormals alone
    for c in (np.zeros((6, 7), np.float32), rng.standard_normal((6, 7)).astype(np.float32) * 300):
        got = unit.add_products(a, b, c)
        want = [[one_element(x, y, float(z)) for y, z in zip(b, row, strict=True)] for x, row in zip(a, c, strict=True)]
        np.testing.assert_array_equal(got, np.array(want, np.float32))


def test_keeps_fourteen_bits() -> None:
    rng = np.random.default_rng(1)
    a, b = random_codes(rng, 16, 32), random_codes(rng, 16, 32)
    out = unit.add_products(a, b, np.zeros((16, 16), np.float32))
    assert not (out.view(np.uint32) & 0x3FF).any() and (out.view(np.uint32) & 0x400).any()
    exact = a.view(E4M3).astype(np.float64) @ b.view(E4M3).astype(np.float64).T
    most = np.abs(a.view(E4M3).astype(np.float64))[:, None] * np.abs(b.view(E4M3).astype(np.float64))[None]
    assert (np.abs(out - exact) <= (32 * 2.0**-13 * most.max(-1)) + 2.0**-13 * np.abs(exact)).all()
    assert (out != exact).any()


def test_small_sums_are_exact_and_have_no_sign_of_zero() -> None:
    ones = np.full((1, 32), 0x38, np.uint8)  # 1.0
    assert unit.add_products(ones, ones, np.full((1, 1), 96, np.float32)).item() == 128
    minus = ones | np.where(np.arange(32) % 2, 0x80, 0).astype(np.uint8)
    zero = unit.add_products(ones, minus, np.full((1, 1), -0.0, np.float32))
    assert zero.item() == 0 and not np.signbit(zero).any()


def test_what_it_depends_on() -> None:
    """Not on the order of columns, nor on which factor is which; a power of two goes through; NaN is its row's."""
    rng = np.random.default_rng(2)
    a, b = random_codes(rng, 8, 32), random_codes(rng, 24, 32)
    c = unit.add_products(a, b, np.zeros((8, 24), np.float32))
    out, order = unit.add_products(a, b, c), rng.permutation(32)
    np.testing.assert_array_equal(unit.add_products(a[:, order], b[:, order], c), out)
    np.testing.assert_array_equal(unit.add_products(b, a, c.T), out.T)
    np.testing.assert_array_equal(unit.add_products(a[2:3], b[5:9], c[2:3, 5:9]), out[2:3, 5:9])
    small = np.where(a & 0x78, a & 0x87 | 0x30, 0).astype(np.uint8)  # 0.5 to 0.9375: twice as much is e4m3, too
    np.testing.assert_array_equal(
        unit.add_products(small + 8 * (small != 0).astype(np.uint8), b, 2 * c), 2 * unit.add_products(small, b, c)
    )
    a[3, 4] = 0x7F
    lost = np.isnan(unit.add_products(a, b, c))
    assert lost[3].all() and lost.sum() == 24


def problem(rng: np.random.Generator, rows: int, count: int, columns: int, groups: int = 1) -> tuple[np.ndarray, ...]:
    x = (rng.standard_normal((rows, groups * columns)) * 100).astype(E4M3).view(np.uint8)
    weights = (rng.standard_normal((count, columns)) * 100).astype(E4M3).view(np.uint8)
    row_scales = np.exp2(rng.integers(-8, -4, (rows, groups * columns // 128))).astype(np.float32)
    scales = np.exp2(rng.integers(-14, -10, (count, columns // 128))).astype(np.float32)
    return x, row_scales, weights, scales


def exact(x: np.ndarray, row_scales: np.ndarray, weights: np.ndarray, scales: np.ndarray, groups: int) -> np.ndarray:
    x64 = x.view(E4M3).astype(np.float64) * row_scales.repeat(128, 1)
    w64 = weights.view(E4M3).astype(np.float64) * scales.repeat(128, 1)
    pairs = zip(np.split(x64, groups, 1), np.split(w64, groups), strict=True)
    return np.concatenate([part @ w.T for part, w in pairs], 1)


@pytest.mark.parametrize(("columns", "groups", "parts"), [(512, 1, 1), (1024, 1, 2), (256, 3, 1)])
def test_sums_are_near_the_exact_ones(columns: int, groups: int, parts: int) -> None:
    given = problem(np.random.default_rng(3), 5, 12 * groups, columns, groups)
    out, want = unit.dense(*given, parts=parts, groups=groups), exact(*given, groups)
    assert 1e-6 < np.linalg.norm(out - want) / np.linalg.norm(want) < 3e-4


def test_other_rules_have_other_bits() -> None:
    """Promotion every 256 columns or every 32, other parts, scales that are no powers of two: none goes unseen."""
    given = problem(np.random.default_rng(4), 5, 12, 1024)
    alike = given[0], given[1][:, :1].repeat(8, 1), given[2], given[3][:, :1].repeat(8, 1)  # so that promotion can vary
    out = unit.dense(*alike, parts=2)
    for promote in (32, 256):
        assert (unit.dense(*alike, parts=2, promote=promote) != out).mean() > 0.3, promote
    tenfold = unit.dense(alike[0], alike[1] * np.float32(1.1), *alike[2:], parts=2)
    assert (tenfold / np.float32(1.1) != out).any()
    # A block's sum has 14 bits, so totals of blocks of one size are exact, and parts show only between sizes.
    np.testing.assert_array_equal(unit.dense(*alike, parts=1), out)
    x, row_scales, weights, scales = given
    apart = x, row_scales, weights, scales * np.exp2(np.arange(8) * 5 % 8 * 2.0 - 8).astype(np.float32)
    out = unit.dense(*apart, parts=2)
    for parts in (1, 4):
        assert (unit.dense(*apart, parts=parts) != out).mean() > 0.1, parts


def test_powers_of_two_in_the_scales_change_no_bit() -> None:
    """Of a block's codes times 2^j, its scale times 2^-j: as FP4 weights are widened."""
    x, row_scales, weights, scales = problem(np.random.default_rng(5), 5, 12, 512)
    weights = (weights & 0x87 | (0x20 + (weights & 0x18))).astype(np.uint8)  # exponents from 2^-3 to 2^0
    moved, by = weights.copy(), np.float32(2.0**3)
    moved[:, 128:256] += 3 << 3
    other = scales.copy()
    other[:, 1] /= by
    np.testing.assert_array_equal(
        unit.dense(x, row_scales, moved, other, parts=1), unit.dense(x, row_scales, weights, scales, parts=1)
    )


def test_a_row_does_not_see_the_others() -> None:
    x, row_scales, weights, scales = problem(np.random.default_rng(6), 9, 64, 512, 2)
    out = unit.dense(x, row_scales, weights, scales, parts=1, groups=2)
    alone = unit.dense(x[4:5], row_scales[4:5], weights, scales, parts=1, groups=2)
    np.testing.assert_array_equal(alone, out[4:5])


@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [(32768, 1024, 1), (8192, 4096, 1), (4096, 8192, 2), (4096, 2048, 2), (1536, 4096, 4), (2048, 7168, 4),
     (7168, 16384, 1), (6144, 7168, 1), (64, 512, 1), (64, 384, 1), (64, 1024, 2)],
)  # fmt: skip
def test_parts_follow_from_the_matrix(rows: int, columns: int, parts: int) -> None:
    assert unit.parts_of(rows, columns) == parts
