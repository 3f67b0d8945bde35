"""Hopper's FP8 matrix unit in NumPy, bit for bit, and the sums that `ops.dense_e4m3` makes of its products.

A product of 32 columns (`QGMMA`, 64 x N x 32): all products, which are exact, and the number they are added to are
aligned to the greatest exponent among them, each is cut off toward zero 13 bits behind the point, and added up exactly;
of the sum 14 leading bits are kept, cut off toward zero. A product's exponent is the sum of its factors' (which of
a subnormal e4m3 is that of the least normal one), so that a product's leading bit may lie a place higher, or lower.
Nothing depends on the order of the columns, on the other rows and columns, or on which factor is which.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .experts import Matrix
from .released import as_released
from .rows import E2M1

__all__ = ["add_products", "dense", "expert", "expert_product", "parts_of", "swiglu"]

DEPTH, BLOCK = 32, 128  # columns of a product of the unit; of a scale
BITS = 13  # behind the point
E4M3_BIAS, E4M3_MANTISSA, E4M3_NAN = 7, 3, 0x7F
LOWEST = -(1 << 20)  # an exponent below all others: of zero


def _fields(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The significand, in eighths, with its sign, and the exponent of e4m3 codes."""
    codes = codes.astype(np.int64)
    field, fraction = codes >> E4M3_MANTISSA & 15, codes & 7
    significand = np.where(field > 0, fraction + 8, fraction) * np.where(codes & 0x80, -1, 1)
    return significand, np.maximum(field, 1) - E4M3_BIAS


def add_products(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c [M, N] float32 plus the products of e4m3 codes a [M, 32] and b [N, 32]: what one instruction makes."""
    (sa, ea), (sb, eb) = _fields(a), _fields(b)
    significand = (sa[:, None] * sb[None]).astype(np.float64)
    exponent = ea[:, None] + eb[None]
    fraction, c_exponent = np.frexp(c.astype(np.float64))
    terms = np.concatenate([significand / 64, 2 * fraction[..., None]], -1)
    exponents = np.where(terms == 0, LOWEST, np.concatenate([exponent, c_exponent[..., None] - 1], -1))
    most = exponents.max(-1, keepdims=True)
    cut = np.trunc(np.ldexp(terms, np.maximum(exponents - most, -64) + BITS)).sum(-1)  # whole numbers: exact
    fraction, exponent = np.frexp(cut)
    kept = np.ldexp(np.trunc(np.ldexp(fraction, BITS + 1)), exponent - BITS - 1)
    with np.errstate(over="ignore"):
        out = np.where(cut == 0, 0.0, np.ldexp(kept, np.where(cut == 0, 0, most[..., 0] - BITS))).astype(np.float32)
    lost = np.isnan(c) | ((a & E4M3_NAN) == E4M3_NAN).any(-1)[:, None] | ((b & E4M3_NAN) == E4M3_NAN).any(-1)[None]
    return np.where(lost, np.float32(np.nan), out)


def parts_of(weight_rows: int, columns: int) -> int:
    """Into how many parts K of a matrix is cut (`e4m3_parts` of csrc/dense/e4m3.cuh)."""
    parts, blocks = 1, columns // BLOCK
    while parts < 4 and weight_rows // 64 * parts < 96 and blocks % (2 * parts) == 0 and blocks // (2 * parts) >= 4:
        parts *= 2
    return parts


def dense(
    x: np.ndarray,
    row_scales: np.ndarray,
    weights: np.ndarray,
    scales: np.ndarray,
    *,
    parts: int,
    groups: int = 1,
    promote: int = BLOCK,
) -> np.ndarray:
    """[T, groups * K] codes and float32 scales [T, groups * K / 128] times [N, K] and float32 scales [N, K / 128], of
    each of the weights' rows, or [N, K / promote]: [T, N] float32. `promote`: columns that the unit adds up.
    """
    count, columns = weights.shape
    of_weights = columns // scales.shape[1]
    size, out = count // groups, np.zeros((len(x), count), np.float32)
    for group in range(groups):
        rows = slice(group * size, (group + 1) * size)
        first = group * columns
        for part in range(parts):
            total = np.zeros((len(x), size), np.float32)
            for k in range(part * columns // parts, (part + 1) * columns // parts, promote):
                sums = np.zeros_like(total)
                for i in range(k, k + promote, DEPTH):
                    sums = add_products(x[:, first + i : first + i + DEPTH], weights[rows, i : i + DEPTH], sums)
                factor = row_scales[:, (first + k) // BLOCK, None] * scales[rows, k // of_weights][None]
                total = total + sums * factor  # the product by a power of two is exact: one rounding, as a fused one
            out[:, rows] = total if part == 0 else out[:, rows] + total
    return out


def expert_product(
    x: np.ndarray, row_scales: np.ndarray, codes: np.ndarray, scales: np.ndarray, promote: int | None = None
) -> np.ndarray:
    """The sums of e4m3 rows with an expert's FP4 matrix as released: codes [N, K / 2] and scales [N, K / 32].

    Widened to e4m3 with a scale per row and 128 columns, 2^-6 times the greatest of those of groups that are not zero,
    where no 128 columns of the matrix span more than 2^14; else 32 columns are added up at a time (`promote`: tests ask
    for either). All of K is one part: experts have tiles enough.
    """
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    magnitude = E2M1[pairs & 7].reshape(len(codes), -1, 4, 32)
    exponents = np.where(magnitude.any(-1), scales.reshape(len(codes), -1, 4).astype(np.int64) - 127, LOWEST)
    most = exponents.max(-1, keepdims=True)
    least = np.where(exponents == LOWEST, most, exponents).min(-1, keepdims=True)
    promote = promote or (BLOCK if (most - least).max() <= 14 else 32)
    block = np.where(most == LOWEST, 0, most - 6) if promote == BLOCK else np.where(exponents == LOWEST, 0, exponents)
    factor = np.where(exponents == LOWEST, 0, exponents - block)
    values = magnitude * np.exp2(factor)[..., None]
    signed = np.where(pairs & 8, -1, 1) * values.reshape(pairs.shape)
    widened = signed.astype(ml_dtypes.float8_e4m3fn)
    assert (widened.astype(np.float64) == signed).all(), "a code was lost"
    of_rows = np.exp2(block.reshape(len(codes), -1)).astype(np.float32)
    return dense(x, row_scales, widened.view(np.uint8), of_rows, parts=1, promote=promote)


def exp(x: np.ndarray) -> np.ndarray:
    """e^x of float32 x <= 0, every step rounded to float32: `exact_exp` of csrc/common/row_math.cuh."""
    f = np.float32
    n = np.round(np.maximum(x, f(-88)) * f(1.4426950408889634))
    r = np.maximum(x, f(-88)) - n * f(0.693359375) - n * f(-2.12194440e-4)
    series = np.full_like(r, f(1 / 5040))
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        series = series * r + f(1 / factorial)
    with np.errstate(invalid="ignore"):
        out = series * np.exp2(n).astype(f)
    return np.where(x < f(-87), f(0), out)


def swiglu(gate: np.ndarray, up: np.ndarray, limit: float, share: np.ndarray | np.float32) -> np.ndarray:
    """float32, every step rounded; bf16 comes out. NaN stays."""
    gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, -np.float32(limit), np.float32(limit))
    e = exp(-np.abs(gate))
    silu = np.where(gate < 0, gate * e, gate) / (np.float32(1) + e)
    return (silu * up * share).astype(ml_dtypes.bfloat16)


def expert(x: np.ndarray, share: np.ndarray | np.float32, matrices: dict[str, Matrix], limit: float) -> np.ndarray:
    """bf16 rows [T, hidden] and float32 shares, [T, 1] or one, through an expert as released: [T, hidden] float32.

    Its first two matrices are widened, or not, as the one that they are when they are packed.
    """
    gate_up = tuple(np.concatenate([matrices[name][i] for name in ("gate", "up")]) for i in (0, 1))
    both = _rounded_product(x, *gate_up)
    gate, up = both[:, : len(both[0]) // 2], both[:, len(both[0]) // 2 :]
    return _rounded_product(swiglu(gate, up, limit, share), *matrices["down"])


def _rounded_product(x: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of bf16, rounded to e4m3, times a matrix; rounded to bf16, as float32."""
    known = np.where(np.isnan(x), 0, x).astype(np.float32)
    of_rows, row_scales = as_released(known)
    of_rows = np.where(np.isnan(x), np.uint8(E4M3_NAN), of_rows)
    sums = expert_product(of_rows, np.exp2(row_scales.astype(np.float32) - 127), codes, scales)
    return sums.astype(ml_dtypes.bfloat16).astype(np.float32)
