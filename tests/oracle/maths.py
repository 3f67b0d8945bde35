"""Float32 arithmetic as the cache defines it: each operation rounded on its own, sums as halving trees.

rsqrt, cos and sin are the only operations taken from XLA (element by element, on long arrays);
everything else is NumPy float32. XLA's CPU backend treats subnormals as zeros; so does
`mul`, the only place where the traces can meet one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

TINY = np.finfo(np.float32).tiny
_PAD = 64  # XLA vectorises; keep clear of its scalar remainder code


def from_xla(fn, x: np.ndarray) -> np.ndarray:
    flat = np.asarray(x, np.float32).reshape(-1)
    padded = np.zeros(-(-flat.size // _PAD) * _PAD, np.float32)
    padded[: flat.size] = flat
    return np.asarray(fn(padded))[: flat.size].reshape(np.shape(x))


def exp(x: np.ndarray) -> np.ndarray:
    """e^x for x <= 0 as the cache defines it: argument reduction by ln 2 (Cody-Waite), series to r^7."""
    x = np.asarray(x, np.float32)
    inside = np.where(x < -87, np.float32(0), x)
    n = np.rint(inside * np.float32(np.log2(np.e)))
    ln2_high = np.float32(355 / 512)
    ln2_low = np.float32(np.log(2) - 355 / 512)
    r = inside - n * ln2_high - n * ln2_low
    total = np.float32(1 / math.factorial(7))
    for k in range(6, -1, -1):
        total = mul(total, r) + np.float32(1 / math.factorial(k))
    return np.where(x < -87, np.float32(0), np.ldexp(total, n.astype(int)))


def mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = np.multiply(a, b, dtype=np.float32)
    return np.where(np.abs(product) < TINY, np.copysign(np.float32(0), product), product)


def tree_sum(x: np.ndarray) -> np.ndarray:
    """Sum over axis 0."""
    if len(x) == 1:
        return x[0]
    half = 1 << (len(x) - 1).bit_length() - 1
    right = np.concatenate([x[half:], np.zeros((2 * half - len(x), *x.shape[1:]), np.float32)])
    return tree_sum(x[:half] + right)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [n]"""
    mean = mul(tree_sum(mul(x, x)), np.float32(1 / x.size))
    factor = from_xla(jax.lax.rsqrt, np.array([mean + np.float32(eps)]))
    return mul(mul(x, factor), weight)


def rope(x: np.ndarray, position: int, inv_freq: np.ndarray) -> np.ndarray:
    """x [n]; rotates adjacent pairs of its tail."""
    angle = np.float32(position) * inv_freq
    cos, sin = from_xla(jnp.cos, angle), from_xla(jnp.sin, angle)
    y = x.copy()
    first = x.size - 2 * inv_freq.size
    for i in range(inv_freq.size):
        a, b = x[first + 2 * i], x[first + 2 * i + 1]
        y[first + 2 * i] = mul(a, cos[i]) - mul(b, sin[i])
        y[first + 2 * i + 1] = mul(a, sin[i]) + mul(b, cos[i])
    return y


def hadamard(x: np.ndarray) -> np.ndarray:
    def unscaled(v: np.ndarray) -> np.ndarray:
        if v.size == 1:
            return v
        a, b = unscaled(v[: v.size // 2]), unscaled(v[v.size // 2 :])
        return np.concatenate([a + b, a - b])

    return mul(unscaled(x), np.float32(x.size**-0.5))


def yarn_frequencies(rope_dim: int, theta: float, factor: float, context: int, fast: float, slow: float) -> np.ndarray:
    """RoPE frequencies with YaRN, from docs/model.md, pair by pair."""

    def pair(turns: float) -> float:
        return rope_dim * np.log(context / (2 * np.pi * turns)) / (2 * np.log(theta))

    low, high = max(int(np.floor(pair(fast))), 0), min(int(np.ceil(pair(slow))), rope_dim - 1)
    out = []
    for i in range(rope_dim // 2):
        f = theta ** (-2 * i / rope_dim)
        ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        out.append(f * (1 - ramp) + f / factor * ramp)
    return np.array(out, np.float32)
