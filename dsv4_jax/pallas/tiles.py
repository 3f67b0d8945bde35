"""What the Pallas-Triton bodies share: unmasked power-of-two tiles, index arrays, e2m1, and what can be addressed."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

__all__ = ["e2m1_codes", "interpreted", "outer", "pieces", "problem", "read", "too_large", "whole"]


def whole(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Returns the array in one block: bodies index it with ids that they load themselves."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def interpreted(interpret: bool | None) -> bool:
    """`interpret`, or whether the default backend is the CPU."""
    return jax.default_backend() == "cpu" if interpret is None else interpret


def problem() -> str | None:
    """Why no Pallas kernel can be used in this process: they are compiled for GPUs, and interpreted on a CPU."""
    backend = jax.default_backend()
    return None if backend in ("cpu", "gpu") else f"Pallas kernels are for GPUs, the backend is {backend}"


def too_large(*arrays: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why Pallas-Triton does not reach every element of the arrays, None if it does.

    Up to 2^32 bytes it counts elements in a signed 32-bit number (above that in 64 bits), so the second
    half of a byte array of 2 to 4 GiB lies at negative offsets.
    """
    for x in arrays:
        size = math.prod(x.shape)
        if size > 2**31 and size * x.dtype.itemsize <= 2**32:
            return f"it does not reach all of an array of {size} {x.dtype}: between 2^31 elements and 4 GiB"
    return None


def pieces(width: int, group: int | None = None) -> list[tuple[int, int, int]]:
    """`width` columns as tiles that need no mask: (first column, groups, lanes), both counts powers of two.

    Whole groups of `group` columns (default: no groups) come first, a shorter last one after them.
    """
    full, rest = divmod(width, group) if group else (0, width)
    tiles = [(first * (group or 0), count, group or 0) for first, count in _powers(full)]
    return tiles + [(width - rest + first, 1, lanes) for first, lanes in _powers(rest)]


def outer(*indices: jax.Array) -> tuple[jax.Array, ...]:
    """Returns index arrays of the outer product of 1-D index arrays, one axis each."""
    shape = tuple(i.shape[0] for i in indices)
    return tuple(
        jnp.broadcast_to(i.reshape(*(-1 if axis == a else 1 for a in range(len(shape)))), shape)
        for axis, i in enumerate(indices)
    )


def read(ref, index: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
    """The elements at `index`, zeros where `mask` is false."""
    return pltriton.load(ref.at[index], mask=mask, other=jnp.zeros(mask.shape, ref.dtype))


def e2m1_codes(codes: jax.Array) -> jax.Array:
    """Returns the e4m3 codes of 2^-6 times the values of e2m1 codes (uint8, high bits ignored), exact.

    Shifted into place, exponent and mantissa are those of an e4m3 (of a subnormal one for 0.5) but for
    the exponent's bias.
    """
    return (codes << np.uint8(2)) & np.uint8(0x1C) | (codes << np.uint8(4)) & np.uint8(0x80)


def _powers(n: int) -> list[tuple[int, int]]:
    """n as powers of two, largest first: (sum of those before, power)."""
    out, first = [], 0
    for bit in reversed(range(n.bit_length())):
        if n & 1 << bit:
            out.append((first, 1 << bit))
            first += 1 << bit
    return out
