"""What the swap tests share: caches of random bytes, records written by NumPy, all implementations jitted once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import KVCache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.plan import StateSwapPlan, SwapPlan
from dsv4_jax.tiers import swap
from dsv4_jax.tiers.host_cache import HostCache, init_host_cache

SWA, CSA, HCA = AttentionType
# Widths and an HCA entry a block that make pieces of 1, 2, 4, 8 and 16 bytes' alignment, several of each kind.
CFG = DSV4Config.tiny(
    layer_types=(SWA, CSA, HCA, CSA, HCA, HCA), hca_ratio=128, head_dim=23, rope_dim=6, index_head_dim=16
)
SIZE = CacheSize(num_blocks=7, num_slots=3, max_blocks_per_request=4)
PAGES = 14
FORMATS = [("fp8", "fp4"), ("fp8_per_entry", "fp8"), ("bf16", "bf16"), ("f32", "f32")]
# Records of states: of the kinds of ring and of HCA state that there are. The second adds only widths to the others.
STATES = [
    (FORMATS[0], {}),
    pytest.param(FORMATS[1], dict(draft_tokens=3), marks=pytest.mark.slow),
    (FORMATS[3], dict(hca_state="raw", draft_tokens=1)),
]
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
    """Random pages; page 0 is zero."""
    host = init_host_cache(layout, PAGES)
    data = np.random.default_rng(seed).integers(0, 256, host.pages.shape, np.uint8)
    data[0] = 0
    return HostCache(jax.device_put(data, host.pages.sharding), layout)


def image(cache: KVCache) -> Image:
    """Copies of all bytes: leaf -> [rows, row bytes] uint8."""
    return {name: np.array(x).view(np.uint8).reshape(x.shape[0], -1) for name, x in cache.arrays.items()}


def model_out(layout: CacheLayout, data: Image, pool: np.ndarray, plan: SwapPlan) -> None:
    """NumPy's swap_out: sets rows of `pool`."""
    for unit, record in zip(*plan, strict=True):
        pieces = _units(layout, data)
        if 0 < unit < len(pieces[0][0]) and 0 < record < len(pool):
            pool[record] = 0
            for view, start, size in pieces:
                pool[record, start : start + size] = view[unit]


def model_in(layout: CacheLayout, data: Image, pool: np.ndarray, plan: SwapPlan) -> None:
    """NumPy's swap_in: sets units of `data`."""
    for unit, record in zip(*plan, strict=True):
        for view, start, size in _units(layout, data):
            if 0 < unit < len(view) and 0 < record < len(pool):
                view[unit] = pool[record, start : start + size]


def _units(layout: CacheLayout, data: Image) -> list[tuple[np.ndarray, int, int]]:
    """Every piece of a block record, in order: (a layer's blocks [blocks, bytes], where it begins, bytes)."""
    out, start = [], 0
    for leaf in layout.leaves:
        if leaf.scope == "block":
            size = leaf.rows * leaf.row_bytes
            for view in data[leaf.name].reshape(leaf.layers, -1, size):
                out.append((view, start, size))
                start += -(-size // 16) * 16
    return out


def model_snapshot(layout: CacheLayout, data: Image, pool: np.ndarray, plan: StateSwapPlan) -> None:
    """NumPy's snapshot: sets rows of `pool`."""
    for slot, records, tokens in zip(*plan, strict=True):
        if not (0 < slot <= SIZE.num_slots and 0 < records[0] < len(pool)):
            continue
        state, _ = _state(layout, data, slot, tokens, b"")
        state = state.ljust(len(records) * pool.shape[1], b"\0")
        for i, record in enumerate(records):
            if 0 < record < len(pool):
                pool[record] = np.frombuffer(state[i * pool.shape[1] :][: pool.shape[1]], np.uint8)


def model_restore(layout: CacheLayout, data: Image, pool: np.ndarray, plan: StateSwapPlan) -> None:
    """NumPy's restore: sets slots of `data`."""
    for slot, records, tokens in zip(*plan, strict=True):
        if 0 < slot <= SIZE.num_slots and 0 < records[0] < len(pool):
            state = b"".join(pool[record if 0 < record < len(pool) else 0].tobytes() for record in records)
            _, slots = _state(layout, data, slot, tokens, state)
            for leaf, rows in slots.items():
                data[leaf].reshape(rows.shape[0], -1, *rows.shape[1:])[:, slot] = rows


def _state(layout: CacheLayout, data: Image, slot: int, tokens: int, given: bytes) -> tuple[bytes, Image]:
    """The state of a slot as its bytes; and its leaves [layers, rows, bytes] as `given` says they are."""
    cfg, tokens = layout.cfg, max(int(tokens), 0)
    own, of_hca = (tokens // ratio * ratio for ratio in (cfg.csa_ratio, cfg.hca_ratio))
    window = range(tokens - cfg.sliding_window, tokens)
    carried, unfinished = [], []  # (leaf, positions, from which byte of a row, to which)
    for leaf in layout.leaves:
        quarter = leaf.row_bytes // 4
        if leaf.pool == "swa":
            carried.append((leaf, window, 0, leaf.row_bytes))
        elif leaf.pool in ("csa_state", "index_state"):
            carried += [(leaf, range(own - cfg.csa_ratio, own), q * quarter, (q + 1) * quarter) for q in (0, 2)]
            unfinished.append((leaf, range(own, own + cfg.csa_ratio - 1), 0, leaf.row_bytes))
        elif leaf.pool == "hca_state" and layout.hca_state == "raw":
            unfinished.append((leaf, range(of_hca, of_hca + cfg.hca_ratio - 1), 0, leaf.row_bytes))
        elif leaf.pool == "hca_state":
            unfinished.append((leaf, range(tokens - 1, tokens) if tokens > of_hca else range(-1, 0), 0, leaf.row_bytes))
    state, slots = b"", dict[str, np.ndarray]()
    for part in (carried, unfinished):
        for leaf, positions, first, last in part:
            view = data[leaf.name].reshape(leaf.layers, -1, leaf.rows, leaf.row_bytes)[:, slot]
            new = slots.setdefault(leaf.name, np.zeros_like(view))
            for layer in range(leaf.layers):
                for position in positions:
                    live, row = 0 <= position < tokens, position % leaf.rows
                    end = len(state) + last - first
                    if live:
                        some = np.frombuffer(given[len(state) : end], np.uint8)
                        new[layer, row, first : first + len(some)] = some
                    state += view[layer, row, first:last].tobytes() if live else bytes(last - first)
                state += bytes(-len(state) % 16)
        state += bytes(-len(state) % 128)
    return state, slots


def assert_image(cache: KVCache, expected: Image, where: object = "") -> None:
    for name, data in image(cache).items():
        assert np.array_equal(data, expected[name]), (name, where)


@functools.cache
def jitted(operation: str, donate: bool = True) -> Callable:
    """`swap.<operation>`, its destination donated."""
    written = "host" if operation in ("swap_out", "snapshot") else "cache"
    options = {"donate_argnames": written} if donate else {}
    return jax.jit(getattr(swap, operation), static_argnames="implementation", **options)
