"""Row codecs in NumPy: float64 arithmetic (exact here), `frexp` for scales, ml_dtypes for the narrow casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32_MAX = float(np.finfo(np.float32).max)
F32_TINY = float(np.finfo(np.float32).tiny)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def encode(name: str, x: np.ndarray, rope_dim: int = 0) -> tuple[np.ndarray, ...]:
    """Stored parts of float32 rows [..., dim]; `rope_dim` > 0 means a KV row, 0 an index key."""
    x = np.asarray(x, np.float32)
    if name == "f32":
        return (x.copy(),)
    if name == "bf16":
        return (_bf16_bits(x),)
    if name == "fp4":
        return _encode_fp4(x)
    if not rope_dim:
        exponent = _scale_exponent(_amax(_flushed(x), 1e-4), 448.0)[..., None]
        return _e4m3(_flushed(x) / np.exp2(exponent)), np.exp2(exponent).astype(np.float32)
    nope, rope = _flushed(x[..., :-rope_dim]), _bf16_bits(x[..., -rope_dim:])
    if name == "fp8_per_entry":
        amax = _amax(nope, 1e-4).astype(np.float32)[..., None]
        scaled = nope.astype(np.float32) * (np.float32(448) / amax)
        return _e4m3(scaled), rope, amax * (np.float32(1) / np.float32(448))
    assert name == "fp8"
    codes, scales = [], []
    for first in range(0, nope.shape[-1], 64):
        group = nope[..., first : first + 64]
        exponent = _scale_exponent(_amax(group, 1e-4), 448.0)
        codes.append(_e4m3(group / np.exp2(exponent)[..., None]))
        scales.append((exponent + 127).astype(np.uint8))
    scales += [np.zeros_like(scales[0])] * (-len(scales) % 8)
    return np.concatenate(codes, -1), rope, np.stack(scales, -1)


def decode(name: str, parts: tuple[np.ndarray, ...], rope_dim: int = 0) -> np.ndarray:
    """Stored parts -> float32 rows."""
    if name == "f32":
        return parts[0].copy()
    if name == "bf16":
        return _bf16_values(parts[0])
    if name == "fp4":
        codes = np.stack([parts[0] & 15, parts[0] >> 4], -1).reshape(*parts[0].shape[:-1], -1)
        values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
        scales = np.where(parts[1] == 255, np.nan, np.exp2(parts[1].astype(np.float64) - 127))
        return _f32(values * np.repeat(scales, 32, -1)[..., : values.shape[-1]])
    values = parts[0].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if not rope_dim:
        return _f32(values * parts[1])
    if name == "fp8_per_entry":
        nope = _f32(values * parts[2])
    else:
        scale = np.exp2(parts[2].astype(np.float64) - 127)
        nope = _f32(values * np.repeat(scale, 64, -1)[..., : values.shape[-1]])
    return np.concatenate([nope, _bf16_values(parts[1])], -1)


def _encode_fp4(x: np.ndarray) -> tuple[np.ndarray, ...]:
    x = _flushed(x)
    codes, scales = [], []
    for first in range(0, x.shape[-1], 32):
        group = x[..., first : first + 32]
        exponent = _scale_exponent(_amax(group, 6 * 2.0**-126), 6.0)
        nan = np.isnan(group)
        scaled = np.where(nan, 0.0, group) / np.exp2(exponent)[..., None]
        distance = np.abs(np.minimum(np.abs(scaled), 6.0)[..., None] - E2M1)
        low, high = distance.argmin(-1), 7 - distance[..., ::-1].argmin(-1)  # differ only on a tie
        code = np.where(low % 2 == 0, low, high) | (np.signbit(scaled) * 8)
        codes.append(np.where(nan, 0, code).astype(np.uint8))
        scales.append(np.where(nan.any(-1), 255, exponent + 127).astype(np.uint8))
    code = np.concatenate(codes, -1)
    return code[..., 0::2] + 16 * code[..., 1::2], np.stack(scales, -1)


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


def _e4m3(x: np.ndarray) -> np.ndarray:
    codes = np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        bits = _flushed(x).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), bits)


def _bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return _flushed(x).astype(np.float32)
