"""Stored rows: floats to unsigned carriers and back, and ids from anywhere to safe int32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import check_integer
from ..errors import PoolError, ShapeError
from ..formats import index_format
from ..formats.index_fp8 import decode as _fp8_decode
from ..formats.index_fp8 import encode as _fp8_encode
from .spec import STORAGE, distinct

__all__ = ["as_rows", "check_array", "decode", "encode", "safe_ids", "safe_layer", "to_carrier"]

_FLOAT = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
_NAN = {"bf16": 0x7FC0, "f16": 0x7E00}


def to_carrier(x: jax.Array, storage: str) -> jax.Array:
    """Float values -> bit patterns of a 16- or 32-bit storage; a NaN becomes the quiet one (f32: as it is)."""
    bits = lax.bitcast_convert_type(x.astype(_FLOAT[storage]), jnp.dtype(STORAGE[storage]))
    if storage == "f32":
        return bits
    return jnp.where(jnp.isnan(x), jnp.asarray(_NAN[storage], bits.dtype), bits)


def encode(x: jax.Array, storage: str) -> tuple[jax.Array, ...]:
    """Encodes rows [n, width] to their parts: (carrier [n, width],), for fp8 also the scale [n, 1] float32."""
    if storage == "fp8":
        return _fp8_encode(index_format("fp8", x.shape[-1]), x)
    return (to_carrier(x, storage),)


def decode(parts: tuple[jax.Array, ...], storage: str, dtype: Any = None) -> jax.Array:
    """Undoes `encode`, in `dtype` (default: the stored type; bf16 for fp8)."""
    if storage == "fp8":
        fmt = index_format("fp8", parts[0].shape[-1])
        return _fp8_decode(fmt, parts, jnp.bfloat16 if dtype is None else dtype)  # type: ignore[arg-type]
    values = lax.bitcast_convert_type(parts[0], _FLOAT[storage])
    return values if dtype is None else values.astype(dtype)


def safe_layer(layer: Any, layers: int) -> int | jax.Array:
    """Returns a layer's number: a Python int in 0..layers-1, or on the device an int32 in 0..layers, the last for no
    layer.

    Device arrays cannot be checked: a number out of range becomes `layers` before it is multiplied, so that none
    wraps around.

    Raises:
        PoolError: the number is known on the host and out of range, or no integer.
        ShapeError: a device array is no single integer.
    """
    if isinstance(layer, jax.Array):
        if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise ShapeError(f"layer must be a single integer, got {layer.dtype}{list(layer.shape)}")
        layer = layer.astype(jnp.int32) if layer.dtype.itemsize < 4 else layer
        return jnp.where((layer >= 0) & (layer < layers), layer, jnp.full_like(layer, layers)).astype(jnp.int32)
    return check_integer("layer", layer, 0, layers - 1, error=PoolError)


def safe_ids(name: str, ids: Any, last: int, *, unique: bool = False) -> jax.Array:
    """Returns the ids as int32 in 0..last, of the same shape.

    Ids known on the host (NumPy arrays and lists, int64 welcome) are checked here. Device arrays cannot be:
    an id outside 0..last becomes 0, the null id, before it is narrowed, so none wraps around.

    Raises:
        PoolError: a host id is out of range, or (with `unique`) is named twice and not 0.
        ShapeError: the ids are not integers.
    """
    if not isinstance(ids, jax.Array):
        try:
            host = np.asarray(ids)
        except ValueError:  # ragged
            raise ShapeError(f"{name} must be integers, got {ids!r}") from None
        if host.size == 0:
            return jnp.zeros(host.shape, jnp.int32)
        if host.dtype.kind not in "iu":
            raise ShapeError(f"{name} must be integers, got {host.dtype}")
        if host.min() < 0 or host.max() > last:
            raise PoolError(f"{name} must be in 0..{last}, got {int(host.min())}..{int(host.max())}")
        live = host[host != 0]
        if unique and distinct(live).size != live.size:
            raise PoolError(f"{name} names a slot twice")
        return jnp.asarray(host.astype(np.int32))
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ShapeError(f"{name} must be integers, got {ids.dtype}")
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    return jnp.where((ids >= 0) & (ids <= last), ids, jnp.zeros_like(ids)).astype(jnp.int32)


def check_array(name: str, x: Any) -> None:
    """Raises `ShapeError` unless this is an array."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise ShapeError(f"{name} must be an array, got {type(x).__name__}")


def as_rows(name: str, x: jax.Array, count: int, heads: int, dim: int) -> jax.Array:
    """[..., heads, dim] or [..., heads * dim] -> [count, heads * dim]. Raises `ShapeError`."""
    check_array(name, x)
    width = heads * dim
    fits = x.shape[-1:] == (width,) or x.shape[-2:] == (heads, dim)
    if not fits or math.prod(x.shape) != count * width:
        rows = f"{count} rows (the shape of the indices) of [{heads}, {dim}] or [{width}]"
        raise ShapeError(f"{name} has shape {x.shape}, expected {rows}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ShapeError(f"{name} must be floating point, got {x.dtype}")
    return x.reshape(count, width)
