"""Row codecs in NumPy, by what the parts of a format hold: float64 arithmetic (exact here), `frexp` for scales,
ml_dtypes for the narrow casts. That they agree with the codecs shows that a format's facts say what it stores.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dsv4_jax.formats import Codes, RowFormat, Scales

F32_MAX = float(np.finfo(np.float32).max)
F32_TINY = float(np.finfo(np.float32).tiny)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def encode(fmt: RowFormat, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Stored parts of float32 rows [..., dim]."""
    x = np.asarray(x, np.float32)
    parts, scales, first = [], None, 0
    for part in fmt.parts:
        if isinstance(part.holds, Codes):
            values = x[..., first : first + part.holds.dims]
            first += part.holds.dims
            if part.holds.code == "f32":
                parts.append(values.copy())
            elif part.holds.code == "bf16":
                parts.append(_bf16_bits(values))
            else:
                assert scales is None, "one part of a row is scaled"
                (rule,) = fmt.scales
                codes, scales = _encode_scaled(part.holds.code, rule, _flushed(values))
                parts.append(codes)
        else:
            assert isinstance(part.holds, Scales) and scales is not None
            padding = [(0, 0)] * (x.ndim - 1) + [(0, part.width - scales.shape[-1])]
            parts.append(np.pad(scales, padding))
    return tuple(parts)


def decode(fmt: RowFormat, parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Stored parts -> float32 rows."""
    values = []
    for holds, part in zip(fmt.holds, parts, strict=True):
        if not isinstance(holds, Codes):
            continue
        if holds.code == "f32":
            values.append(part.copy())
        elif holds.code == "bf16":
            values.append(_bf16_values(part))
        else:
            (rule,) = fmt.scales
            factor = _factors(rule, parts[fmt.holds.index(rule)]).repeat(rule.group, -1)[..., : holds.dims]
            values.append(_f32(_values(holds.code, part) * factor))
    return np.concatenate(values, -1)


def _encode_scaled(code: str, rule: Scales, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of float64 values and one scale for each group of them."""
    codes, scales = [], []
    for first in range(0, x.shape[-1], rule.group):
        group = x[..., first : first + rule.group]
        amax = _amax(group, rule.floor)
        if rule.code == "absmax":
            amax = amax.astype(np.float32)[..., None]
            codes.append(_codes(code, group.astype(np.float32) * (np.float32(LARGEST[code]) / amax)))
            scales.append(amax[..., 0] * (np.float32(1) / np.float32(LARGEST[code])))
            continue
        exponent = _scale_exponent(amax, LARGEST[code])
        codes.append(_codes(code, group / np.exp2(exponent)[..., None]))
        if rule.code == "power_of_two":
            scales.append(np.exp2(exponent).astype(np.float32))
        else:
            assert rule.code == "ue8m0"
            lost = np.isnan(group).any(-1) & (code == "e2m1")
            scales.append(np.where(lost, 255, exponent + 127).astype(np.uint8))
    codes = np.concatenate(codes, -1)
    if code == "e2m1":
        codes = codes[..., 0::2] + 16 * codes[..., 1::2]
    return codes, np.stack(scales, -1)


def _codes(code: str, x: np.ndarray) -> np.ndarray:
    nan = np.isnan(x)
    if code == "e2m1":
        distance = np.abs(np.minimum(np.abs(np.where(nan, 0.0, x)), 6.0)[..., None] - E2M1)
        low, high = distance.argmin(-1), 7 - distance[..., ::-1].argmin(-1)  # differ only on a tie
        codes = np.where(low % 2 == 0, low, high) | (np.signbit(x) * 8)
        return np.where(nan, 0, codes).astype(np.uint8)
    codes = np.clip(x, -LARGEST[code], LARGEST[code]).astype(np.float32).astype(FP8[code]).view(np.uint8)
    return np.where(nan, np.uint8(0x7F), codes)


def _values(code: str, stored: np.ndarray) -> np.ndarray:
    if code == "e2m1":
        codes = np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1)
        return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    return stored.view(FP8[code]).astype(np.float64)


def _factors(rule: Scales, stored: np.ndarray) -> np.ndarray:
    if rule.code == "ue8m0":
        return np.where(stored == 255, np.nan, np.exp2(stored.astype(np.float64) - 127))
    return stored.astype(np.float64)


def _flushed(x: np.ndarray) -> np.ndarray:
    """float64 with float32 subnormals as signed zeros."""
    x = x.astype(np.float64)
    return np.where(np.abs(x) < F32_TINY, np.copysign(0.0, x), x)


def _amax(x: np.ndarray, floor: float) -> np.ndarray:
    magnitude = np.minimum(np.where(np.isnan(x), 0.0, np.abs(x)), F32_MAX)
    return np.maximum(magnitude.max(-1), float(np.float32(floor)))


def _scale_exponent(amax: np.ndarray, limit: float) -> np.ndarray:
    """Smallest k with amax <= limit * 2^k."""
    mantissa, exponent = np.frexp(amax)
    limit_mantissa, limit_exponent = np.frexp(limit)
    return (exponent - limit_exponent + (mantissa > limit_mantissa)).astype(np.int64)


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        bits = _flushed(x).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), bits)


def _bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return _flushed(x).astype(np.float32)
