"""The released model's rounding and what it does to a feed-forward layer's experts, in NumPy: an independent opinion.

Rounded rows are given as their values, so that any product of them is a fake-quantised one.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .experts import NAMES, Matrix, dequantised

__all__ = ["as_released", "bf16", "experts", "rounded", "swiglu"]

BLOCK = 128  # columns that share a scale


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float64."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def as_released(x: np.ndarray, block: int = BLOCK, floor: float = 1e-4) -> tuple[np.ndarray, np.ndarray]:
    """Finite rows by the released kernel's steps: amax times 1/448 in float32, its exponent rounded up by bits."""
    blocks = x.astype(np.float32).reshape(len(x), x.shape[1] // block, block)
    amax = np.maximum(np.abs(blocks).max(-1), np.float32(floor))
    bits = (amax * np.float32(1 / 448)).view(np.uint32)
    field = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    scale = (field << 23).astype(np.uint32).view(np.float32)
    codes = np.clip(blocks / scale[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8).reshape(x.shape), field.astype(np.uint8)


def rounded(x: np.ndarray) -> np.ndarray:
    """The values of rows' codes, float64."""
    codes, scales = as_released(bf16(x))
    factors = np.exp2(scales.astype(np.float64) - 127).repeat(BLOCK, 1)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * factors


def swiglu(gate: np.ndarray, up: np.ndarray, limit: float, weight: np.ndarray | float = 1.0) -> np.ndarray:
    """What goes into the second product, as its values: the routing weight is in it before it is rounded."""
    gate, up = np.minimum(bf16(gate), limit), np.clip(bf16(up), -limit, limit)
    return rounded(gate / (1 + np.exp(-gate)) * up * weight)


def experts(
    x: np.ndarray, chosen: np.ndarray, share: np.ndarray, weights: list[dict[str, Matrix]], limit: float, first: int = 0
) -> np.ndarray:
    """As `experts.experts`, with rows and results rounded as released."""
    out, x = np.zeros(x.shape), rounded(x)
    for e, matrices in enumerate(weights):
        gate, up, down = (dequantised(*matrices[name]) for name in NAMES)
        here = chosen == first + e
        token = here.any(1).nonzero()[0]
        weight = np.where(here, share, 0).sum(1, dtype=np.float32)[token, None]
        hidden = swiglu(x[token] @ gate.T, x[token] @ up.T, limit, weight)
        out[token] += bf16(hidden @ down.T)
    return out
