"""The `fp8` weights for products with rows of e4m3 (`formats.activations`): the same bits in another order.

Such products (csrc's dense_e4m3 kernels) need no decoding, and read tiles whose codes lie as the matrix units read
them. A tile is 64 rows x 128 columns: row r is 128 bytes, its 16 columns from 16 c on at place c ^ (r % 8) of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .fp8 import LARGEST_SCALE, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, decode, encode, random_matrix

__all__ = ["LARGEST_SCALE", "TILE_BYTES", "TILE_COLUMNS", "TILE_ROWS", "decode", "draw", "encode", "pack", "unpack"]

_CHUNKS = 8  # of 16 columns in a row of a tile, and rows after which it repeats


def pack(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packs codes and scales as released into the parts: codes [N / 64, K / 128, 8192] uint8, and the scales."""
    rows, columns = codes.shape
    tiles = codes.reshape(rows // TILE_ROWS, TILE_ROWS, columns // TILE_COLUMNS, TILE_COLUMNS).swapaxes(1, 2)
    return _turned(tiles).reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_BYTES), scales


def unpack(packed: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks the parts to codes and scales as released."""
    tiles, steps, _ = packed.shape
    rows = _turned(packed.reshape(tiles, steps, TILE_ROWS, TILE_COLUMNS)).swapaxes(1, 2)
    return rows.reshape(tiles * TILE_ROWS, steps * TILE_COLUMNS), scales


def draw(key: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Returns the parts of a random matrix of unit gain: a normal one, encoded."""
    return pack(*random_matrix(key, rows, columns))


def _turned(tiles: jax.Array) -> jax.Array:
    """[tiles, steps, 64, 128] with the 16 columns at c of row r where those at c ^ (r % 8) were: its own inverse."""
    chunk = np.arange(_CHUNKS)
    chunks = tiles.reshape(*tiles.shape[:2], TILE_ROWS // _CHUNKS, _CHUNKS, _CHUNKS, -1)
    return jnp.asarray(chunks)[:, :, :, chunk[:, None], chunk[:, None] ^ chunk].reshape(tiles.shape)
