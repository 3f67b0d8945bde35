"""Float32 arithmetic whose bits do not depend on how the compiler groups it.

The cache promises equal bytes for any chunking of the same rows. XLA may contract `a * b + c`
into a fused multiply-add and may sum in any order, and may decide differently for another batch
size. So products are rounded before they are added and sums follow a fixed tree. XLA's own exp is
such a case (its polynomial is contracted or not, by the loop it lands in), so the compressors use
the `exp` below. What is left to the backend is rsqrt, cos and sin, one element at a time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config import AttentionType, DSV4Config, YarnScaling

__all__ = [
    "MIN_ROWS",
    "clamped_swiglu",
    "exp",
    "hadamard",
    "inv_frequencies",
    "pad_rows",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_tables",
    "rounded",
    "row_total",
    "tree_sum",
    "unit_rms",
]

# XLA's GPU compiler takes a product of one row for a vector's and converts bfloat16 weights to float32 for it, whole
# packs of layers if they are packed, in every step: five times the traffic, and gigabytes of temporaries. A few zero
# rows make it a matrix product, which cuBLAS computes in bfloat16. Two rows would do, but to eight XLA pads itself.
MIN_ROWS = 8


def rounded(product: jax.Array) -> jax.Array:
    """Returns the product, rounded to float32 before anyone adds to it.

    The select hides the multiplication from the fused-multiply-add contraction; it is an identity
    on values (any NaN becomes the default NaN).
    """
    return jnp.where(jnp.isnan(product), np.float32(np.nan), product)


def tree_sum(x: jax.Array, axis: int = -1) -> jax.Array:
    """Sums over an axis as a fixed binary tree: first half plus second half, repeatedly.

    The axis is padded with zeros to a power of two. The axis is kept with size 1.
    """
    size = x.shape[axis]
    width = 1 << (size - 1).bit_length()
    if width != size:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, width - size)
        x = jnp.pad(x, padding)
    while width > 1:
        width //= 2
        x = lax.slice_in_dim(x, 0, width, axis=axis) + lax.slice_in_dim(x, width, 2 * width, axis=axis)
    return x


def row_total(x: jax.Array) -> jax.Array:
    """Sums the last axis of [B, n] in an order that is the same for every B, and wherever the sum stands."""
    while (n := x.shape[-1]) > 1:
        terms = min(n, 16)
        width = -(-n // terms)
        x = jnp.pad(x, ((0, 0), (0, terms * width - n)))
        parts = [x[:, i * width : (i + 1) * width] for i in range(terms)]
        x = functools.reduce(jnp.add, parts)
    return x[:, 0]


def exp(x: jax.Array) -> jax.Array:
    """e^x for x <= 0, float32, within 2 ulp; zero below -87, so that no result is subnormal.

    e^x = 2^n e^r with n = round(x / ln 2), and e^r by its Taylor series to r^7 (|r| < 0.35: the
    rest is below 2^-27). ln 2 is split in two, the first part short enough for n times it to be exact.
    """
    clamped = jnp.maximum(x, np.float32(-88))
    n = jnp.round(clamped * np.float32(1.4426950408889634))
    r = clamped - rounded(n * np.float32(0.693359375)) - rounded(n * np.float32(-2.12194440e-4))
    series = jnp.full_like(r, np.float32(1 / 5040))
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        series = rounded(series * r) + np.float32(1 / factorial)
    scale = lax.bitcast_convert_type((n.astype(jnp.int32) + np.int32(127)) << np.int32(23), jnp.float32)
    return jnp.where(x < np.float32(-87), np.float32(0), rounded(series * scale))


def pad_rows(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[T, ...] -> [max(T, MIN_ROWS), ...], by zero rows, before products with bfloat16 weights; of others as it was."""
    missing = MIN_ROWS - x.shape[0] if dtype == jnp.bfloat16 else 0
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing > 0 else x


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) over the last axis, summed as the backend does: nothing of it is stored."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.float32(eps))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, float32. [..., n], [n] -> [..., n]"""
    mean = rounded(tree_sum(rounded(x * x)) * np.float32(1.0 / x.shape[-1]))
    return rounded(x * lax.rsqrt(mean + np.float32(eps))) * lax.expand_dims(weight, range(x.ndim - 1))


def rope(x: jax.Array, position: jax.Array, inv_freq: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates adjacent pairs of the last `2 * len(inv_freq)` dims by position * inv_freq (docs/model.md, RoPE).

    Args:
        x: [..., n] float32.
        position: int32, broadcastable to x.shape[:-1].
        inv_freq: [rope_dim / 2] float32.
        inverse: rotate backwards (for the attention output).
    """
    rope_dim = 2 * inv_freq.shape[0]
    cos, sin = rope_tables(position, inv_freq)
    sin = -sin if inverse else sin
    plain, rotary = x[..., :-rope_dim], x[..., -rope_dim:]
    even, odd = rotary[..., 0::2], rotary[..., 1::2]
    turned = jnp.stack([rounded(even * cos) - rounded(odd * sin), rounded(even * sin) + rounded(odd * cos)], -1)
    return jnp.concatenate([plain, turned.reshape(rotary.shape)], -1)


def rope_tables(position: jax.Array, inv_freq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of position * inv_freq: [...], [n] -> two of [..., n] float32.

    What all layers of a kind ask for is the same: in a step XLA computes it once, for kernels to read.
    """
    position, inv_freq = jnp.asarray(position), jnp.asarray(inv_freq)
    angle = position[..., None].astype(jnp.float32) * lax.expand_dims(inv_freq, range(position.ndim))
    return jnp.cos(angle), jnp.sin(angle)


def hadamard(x: jax.Array) -> jax.Array:
    """Multiplies x @ H_n / sqrt(n) over the last axis (n a power of two), as log2(n) butterfly stages."""
    n = x.shape[-1]
    lead = x.shape[:-1]
    half = 1
    while half < n:
        pairs = x.reshape(*lead, n // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], -2).reshape(*lead, n)
        half *= 2
    return rounded(x * np.float32(n**-0.5))


def inv_frequencies(rope_dim: int, theta: float, yarn: YarnScaling | None = None) -> np.ndarray:
    """Returns the RoPE frequencies theta^(-2i / rope_dim), scaled by YaRN if given (docs/model.md, RoPE).

    YaRN divides slow pairs by `factor`, keeps fast pairs, and is linear in between.

    Returns:
        [rope_dim / 2] float32, radians per position of each pair of dims.
    """
    freq = theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    if yarn is not None:
        low, high = yarn.ramp(rope_dim, theta)
        ramp = np.clip((np.arange(rope_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        freq = freq * (1 - ramp) + freq / yarn.factor * ramp
    return freq.astype(np.float32)


def rope_frequencies(cfg: DSV4Config, attn: AttentionType) -> np.ndarray:
    """Returns the RoPE frequencies of all of a layer's rows and queries: what `Epilogue`, `queries` and `attend` of it
    take.

    The plain RoPE for SWA layers, the one that YaRN scales for CSA and HCA layers: their window rows, queries and
    index keys too (docs/model.md, RoPE).

    Returns:
        [rope_dim / 2] float32, radians per position of each pair of dims.

    Raises:
        ConfigError: `attn` is no `AttentionType`.
    """
    if not cfg.ratio(attn):  # SWA
        return inv_frequencies(cfg.rope_dim, cfg.rope_theta)
    return inv_frequencies(cfg.rope_dim, cfg.compress_rope_theta, cfg.yarn)


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Computes silu(min(gate, limit)) * clip(up, -limit, limit)."""
    return jax.nn.silu(jnp.minimum(gate, np.float32(limit))) * jnp.clip(up, -np.float32(limit), np.float32(limit))
