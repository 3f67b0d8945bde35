"""What the swap tests share: caches of random bytes, records written by NumPy, all implementations jitted once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.plan import SwapPlan
from dsv4_jax.records import record_format
from dsv4_jax.tiers import swap
from dsv4_jax.tiers.host_cache import HostCache, init_host_cache

SWA, CSA, HCA = AttentionType
# Widths and an HCA entry a block that make pieces of 1, 2, 4, 8 and 16 bytes' alignment, several of each kind.
CFG = DSV4Config.tiny(
    layer_types=(SWA, CSA, HCA, CSA, HCA, HCA), hca_ratio=128, head_dim=23, rope_dim=6, index_head_dim=16
)
SIZE = CacheSize(num_blocks=7, num_slots=3, max_blocks_per_request=4)
RECORDS, SNAPSHOTS = 6, 4
FORMATS = [("fp8", "fp4"), ("fp8_per_entry", "fp8"), ("bf16", "bf16"), ("f32", "f32")]
Image = dict[str, np.ndarray]


def random_cache(layout: CacheLayout, seed: int, shards: int = 1) -> KVCache:
    """Every byte random, NaNs included, but for the null block and slot."""
    rng, arrays = np.random.default_rng(seed), {}
    for leaf in layout.leaves:
        rows, width = layout.leaf_shape(leaf, SIZE)
        data = rng.integers(0, 256, (shards * rows, width * np.dtype(leaf.dtype).itemsize), np.uint8)
        # Not where the allocator would have put it: a CPU device would take that as it is, and copy it before writing.
        arrays[leaf.name] = jnp.array(data.view(leaf.dtype))
    return KVCache(arrays, layout)


def random_host(layout: CacheLayout, seed: int) -> HostCache:
    """Random block records (snapshots zero); record 0 zero."""
    host, rng = init_host_cache(layout, RECORDS, snapshots=SNAPSHOTS), np.random.default_rng(seed)
    data = rng.integers(0, 256, host.blocks.shape, np.uint8)
    data[0] = 0
    return HostCache(jax.device_put(data, host.blocks.sharding), host.snapshots, layout)


def image(cache: KVCache) -> Image:
    """Copies of all bytes: leaf -> [rows, row bytes] uint8."""
    return {name: np.array(x).view(np.uint8).reshape(x.shape[0], -1) for name, x in cache.arrays.items()}


def units(layout: CacheLayout, data: Image, scope: str) -> list[tuple[np.ndarray, int, int]]:
    """Every piece of a record, in order: (a layer's units [units, bytes], where it begins, bytes)."""
    out = []
    for piece in record_format(layout, scope).pieces:
        view = data[piece.leaf.name].reshape(piece.layers, -1, piece.bytes)
        out += [(view[layer], piece.offset + layer * piece.stride, piece.bytes) for layer in range(piece.layers)]
    return out


def model_out(layout: CacheLayout, data: Image, pool: np.ndarray, plan: SwapPlan, scope: str = "block") -> None:
    """NumPy's swap_out: sets rows of `pool`."""
    for unit, record in zip(*plan, strict=True):
        pieces = units(layout, data, scope)
        if 0 < unit < len(pieces[0][0]) and 0 < record < len(pool):
            pool[record] = 0
            for view, start, size in pieces:
                pool[record, start : start + size] = view[unit]


def model_in(layout: CacheLayout, data: Image, pool: np.ndarray, plan: SwapPlan, scope: str = "block") -> None:
    """NumPy's swap_in: sets units of `data`."""
    for unit, record in zip(*plan, strict=True):
        for view, start, size in units(layout, data, scope):
            if 0 < unit < len(view) and 0 < record < len(pool):
                view[unit] = pool[record, start : start + size]


def assert_image(cache: KVCache, expected: Image, where: object = "") -> None:
    for name, data in image(cache).items():
        assert np.array_equal(data, expected[name]), (name, where)


@functools.cache
def jitted(operation: str, donate: bool = True) -> Callable:
    """`swap.<operation>`, its destination donated."""
    written = "host" if operation in ("swap_out", "snapshot") else "cache"
    options = {"donate_argnames": written} if donate else {}
    return jax.jit(getattr(swap, operation), static_argnames="implementation", **options)
